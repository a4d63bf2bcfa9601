"""Documents -> tokens -> sequences -> global batches, by Grain.

All documents of a split are laid end to end, each closed by END_OF_DOCUMENT, and cut into sequences; a sequence is
drawn by its index, in an order that the seed fixes. So the state of an iterator is one number, and any process can
read any part of any batch.
"""

import hashlib
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import grain
import numpy as np

from meshloom.compiler.problems import Problem, raise_if_any
from meshloom.compiler.spec import RunSpec

END_OF_DOCUMENT = 256  # behind the 256 bytes
BYTES_VOCABULARY = 257
Split = Literal["train", "held_out"]
HostBatch = dict[str, np.ndarray]  # inputs, targets: int32 (rows, length)


class TokenSequences:
    """A random-access source of `length` tokens each, with the tokens that follow them as targets."""

    def __init__(self, tokens: np.ndarray, length: int):
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._length)

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        first = int(index) * self._length
        window = self._tokens[first : first + self._length + 1].astype(np.int32)
        return {"inputs": window[:-1], "targets": window[1:]}

    def __repr__(self) -> str:  # Grain puts it in its errors
        return f"TokenSequences({len(self)} x {self._length})"


class RowsOfBatches:
    """A random-access source of some rows of each global batch, without reading the others."""

    def __init__(self, sequences: Any, batch_size: int, rows: Sequence[int]):
        self._sequences, self._batch_size, self._rows = sequences, batch_size, rows

    def __len__(self) -> int:
        return len(self._sequences) // self._batch_size * len(self._rows)

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        batch, row = divmod(int(index), len(self._rows))
        return self._sequences[batch * self._batch_size + self._rows[row]]

    def __repr__(self) -> str:
        return f"RowsOfBatches({self._rows} of {self._batch_size})"


@dataclass(frozen=True)
class Batches:
    """The global batches of a split; iterated, whole ones. num_batches: None where they are endless."""

    sequences: grain.MapDataset[dict[str, np.ndarray]]
    batch_size: int
    num_batches: int | None
    options: grain.ReadOptions

    def of_rows(self, rows: Sequence[int]) -> grain.IterDataset[HostBatch]:
        """These rows of each batch. An iterator's state is the number of batches drawn, whatever the rows."""
        source = RowsOfBatches(self.sequences, self.batch_size, rows)
        batches = grain.MapDataset.source(source).batch(len(rows))
        return batches[: self.num_batches].to_iter_dataset(self.options)

    def __iter__(self) -> Any:
        return iter(self.of_rows(range(self.batch_size)))


Data = dict[Split, Batches]


def open_data(spec: RunSpec) -> Data:
    """The global batches of both splits: `train` shuffled and endless, `held_out` in a fixed order, once.

    Raises ConfigError where the vocabulary or the splits are too small for the run.
    """
    splits: dict[Split, TokenSequences] = {
        split: TokenSequences(tokens, spec.sequence_length)
        for split, tokens in tokens_of_splits(spec.data.source, spec.data.held_out_fraction).items()
    }
    check_data(spec, {split: len(sequences) for split, sequences in splits.items()})
    options = grain.ReadOptions(num_threads=spec.data.num_prefetch_threads, prefetch_buffer_size=4)
    train = grain.MapDataset.source(splits["train"]).seed(spec.data.shuffle_seed).shuffle().repeat()
    held_out = grain.MapDataset.source(splits["held_out"]).seed(0).shuffle()  # the same batches for every run
    size, num_held_out = spec.global_batch_size, spec.evaluation.num_batches
    return {
        "train": Batches(train, size, None, options),
        "held_out": Batches(held_out, size, num_held_out, options),
    }


def check_data(spec: RunSpec, num_sequences: dict[Split, int]) -> None:
    """Raise ConfigError where tokens do not fit the model's vocabulary, or a split holds too few sequences."""
    problems = []
    if spec.model.vocab_size < BYTES_VOCABULARY:
        what = f"{spec.model.vocab_size} is less than the {BYTES_VOCABULARY} tokens of tokenizer 'bytes'"
        problems.append(Problem("model.vocab_size", what, f"use {BYTES_VOCABULARY} or more"))
    needed = {"train": spec.global_batch_size, "held_out": spec.global_batch_size * spec.evaluation.num_batches}
    for split, count in num_sequences.items():
        if count < needed[split]:
            what = (
                f"its {split} split has {count} sequences of {spec.sequence_length} tokens, {needed[split]} are needed"
            )
            fix = "lower sequence_length or global_batch_size"
            more = ", evaluation.num_batches too, or raise data.held_out_fraction" if split == "held_out" else ""
            problems.append(Problem("data", what, fix + more))
    raise_if_any(problems)


@cache
def tokens_of_splits(source: str, held_out_fraction: float) -> dict[Split, np.ndarray]:
    """uint16 tokens of each split. A document is held out by the hash of its name: the same ones on every machine."""
    splits: dict[Split, list[np.ndarray]] = {"train": [], "held_out": []}
    for name, text in DOCUMENTS[source]():
        fraction = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64
        split: Split = "held_out" if fraction < held_out_fraction else "train"
        splits[split].append(encode(text))
    empty = np.zeros(0, np.uint16)
    return {split: np.concatenate(documents or [empty]) for split, documents in splits.items()}


def encode(text: bytes) -> np.ndarray:
    """Bytes as tokens, and the end of the document."""
    return np.append(np.frombuffer(text, np.uint8).astype(np.uint16), np.uint16(END_OF_DOCUMENT))


def python_stdlib() -> Iterator[tuple[str, bytes]]:
    """The source files of the running Python's standard library, by path; without what was installed beside it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" not in name and "__pycache__" not in name:
            yield name, path.read_bytes()


def synthetic() -> Iterator[tuple[str, bytes]]:
    """512 documents of arithmetic statements: learnable, and made at once."""
    chance = random.Random(0)
    for number in range(512):
        pairs = [(chance.randrange(100), chance.randrange(100)) for _ in range(200)]
        yield f"synthetic/{number}", b"".join(b"%d + %d = %d\n" % (a, b, a + b) for a, b in pairs)


DOCUMENTS = {"python_stdlib": python_stdlib, "synthetic": synthetic}
