"""Makes the batches of a check: random documents, packed as the declaration says by the code that packs a run's data.

What a batch has to hold is known from its tokens alone, without that code: a document ends with END, which is nowhere
else, and a token of residue UNTRAINED is not to be learnt where the data say which are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.sharding.batch import REFERENCE
from meshloom.models import IGNORED_TARGET, PADDING_TARGET

from ..data.batches import BatchSource, HostBatch
from ..data.packing import ConcatenatedSequences, PackedSequences, PairedSequences
from ..data.store import Shard, TokenStore, TokenStream

END = 0
MODULUS, UNTRAINED = 4, 1
_RECOGNISED = 8  # tokens in a row that occur once among all documents


@dataclass(frozen=True)
class CheckData:
    """The batches of a check, with rows and tokens in their own order. In the last one some tokens are not to be
    learnt, so that devices and microbatches have different numbers of targets."""

    spec: RunSpec
    num_batches: int

    def batches(self) -> list[HostBatch]:
        """Returns the global batches."""
        spec = self.spec
        made = [self._batch(number) for number in range(self.num_batches)]
        if spec.objective.kind == "dpo":
            rng = np.random.default_rng(0)
            for batch in made:
                batch[REFERENCE] = (-40 + 4 * rng.standard_normal(spec.global_batch_size)).astype(np.float32)
        return made

    def _batch(self, number: int) -> HostBatch:
        spec, stream = self.spec, self._stream(number, is_masked=number == self.num_batches - 1)
        if spec.data.gives_sequences:
            return self._given(stream)
        sequences, size = self._sequences(stream), spec.global_batch_size
        source = BatchSource(sequences, size, self.num_batches, rows=range(size), vocab_size=spec.model.vocab_size)
        return dict(source[0])

    def _sequences(self, stream: TokenStream) -> Any:
        spec = self.spec
        if spec.data.packing == "pairs":
            return PairedSequences(stream, spec.sequence_length)
        kind = PackedSequences if spec.data.packing == "first_fit" else ConcatenatedSequences
        return kind(stream, spec.sequence_length, isolate_documents=spec.data.isolate_documents)

    def tokens(self, number: int) -> np.ndarray:
        """Returns the tokens that a batch is made of, one document after the other."""
        return self._documents(number)[0]

    def _documents(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens, and where each document ends."""
        spec, rng, length = self.spec, np.random.default_rng(number), self.spec.sequence_length
        sizes = rng.integers(4, length + length // 4, size=4 * spec.global_batch_size + 4)
        tokens = rng.integers(1, spec.model.vocab_size, size=int(sizes.sum())).astype(np.uint32)
        ends = np.cumsum(sizes)
        tokens[ends - 1] = END
        return tokens, ends

    def _stream(self, number: int, *, is_masked: bool) -> TokenStream:
        tokens, ends = self._documents(number)
        documents = np.stack([ends, np.arange(len(ends))], axis=1).astype(np.uint64)
        trained = tokens % MODULUS != UNTRAINED if is_masked else None
        tokenizer: Any = None
        store = TokenStore((Shard(tokens, documents, trained),), tokenizer, "", int(tokens.max()))
        return TokenStream(store, "train", 0.0)

    def _given(self, stream: TokenStream) -> HostBatch:
        """Returns sequences as a class of the user may return them: of many lengths, with padding after them."""
        size, length = self.spec.global_batch_size, self.spec.sequence_length
        window = stream.read(0, size * (length + 1)).reshape(size, length + 1)
        is_token = np.arange(length)[None] < np.linspace(length, length // 2, size).astype(int)[:, None]
        batch = {
            "inputs": np.where(is_token, window[:, :-1], 0).astype(np.int32),
            "targets": np.where(is_token, window[:, 1:], PADDING_TARGET).astype(np.int32),
        }
        if self.spec.data.isolate_documents:
            batch["positions"] = np.where(is_token, np.arange(length)[None], 0).astype(np.int32)
            batch["segment_ids"] = is_token.astype(np.int32)
        return batch


def pieces_of(row: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields where each document of a sequence begins and ends, by the tokens alone: `7 7 0 5 0 0 0` -> (0, 3), (3, 5).
    What follows the last end is padding if it is END throughout."""
    begin = 0
    for end in (np.flatnonzero(row == END) + 1).tolist():
        if end - begin > 1 or begin == 0:
            yield begin, end
        begin = end
    if begin < len(row):
        yield begin, len(row)


def wrong_targets(batch: HostBatch, *, is_masked: bool, is_isolated: bool) -> list[str]:
    """Returns what is wrong with the targets of a batch, by its inputs alone: each target is the next token of its
    document, the last token of an isolated document has none, and neither has a token that is not to be learnt."""
    inputs, targets, wrong = batch["inputs"], batch["targets"], list[str]()
    following = np.roll(inputs, -1, axis=1)
    has_next = np.arange(inputs.shape[1])[None] < inputs.shape[1] - 1
    is_end = inputs == END
    counted = targets >= 0
    is_next = counted & has_next & ~is_end
    if not np.array_equal(targets[is_next], following[is_next]):
        number = int(np.sum(targets[is_next] != following[is_next]))
        wrong.append(f"{number} targets are not the next token")
    if is_isolated and np.any(counted & is_end):
        wrong.append(f"{int(np.sum(counted & is_end))} ends of documents have a target")
    if is_masked and np.any(counted & (targets % MODULUS == UNTRAINED)):
        wrong.append("tokens that are not to be learnt are targets")
    known = has_next & ~is_end & (following % MODULUS != UNTRAINED if is_masked else True)
    known &= targets != PADDING_TARGET
    if "positions" in batch:
        for row, positions in zip(inputs, batch["positions"], strict=True):
            if any(not np.array_equal(positions[a:b], np.arange(b - a)) for a, b in pieces_of(row)):
                wrong.append("positions do not count each document from 0")
                break
    if np.any(~counted & known):
        wrong.append(f"{int(np.sum(~counted & known))} tokens have no target")
    return wrong


def wrong_last_targets(batch: HostBatch, tokens: np.ndarray, *, is_masked: bool) -> list[str]:
    """Returns what is wrong with the targets of the last places, of which a sequence itself does not know the next
    token: where its document goes on, the target is the token that follows the same tokens there. tokens: of all
    documents, one after the other."""
    follows = {tuple(part[:-1]): int(part[-1]) for part in _windows(tokens, _RECOGNISED + 1)}
    wrong, unknown = 0, 0
    for row, targets in zip(batch["inputs"], batch["targets"], strict=True):
        if row[-1] == END:
            continue
        next_one = follows.get(tuple(row[-_RECOGNISED:].tolist()))
        if next_one is None:
            unknown += 1
            continue
        is_learnt = not is_masked or next_one % MODULUS != UNTRAINED
        wrong += int(targets[-1]) != (next_one if is_learnt else IGNORED_TARGET)
    said = [f"{wrong} last targets of sequences are not the token that follows"] if wrong else []
    return [*said, f"{unknown} sequences end in tokens that no document has"] if unknown else said


def _windows(tokens: np.ndarray, size: int) -> list[list[int]]:
    return np.lib.stride_tricks.sliding_window_view(tokens.astype(np.int64), size).tolist()
