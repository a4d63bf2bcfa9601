"""Opens the data of a run, both splits as global batches, and of an evaluation, one split once through.

A run needs whole batches, and enough of them for its steps. An evaluation takes any number of sequences; its last batch
is filled up with rows that have no target. The documents of a batch are found from its place in the data.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, Literal

import grain
import jax
import numpy as np

from meshloom.compiler.core.errors import ConfigError, Problem, all_of, raise_if_any
from meshloom.compiler.core.format import be, counted, human_share
from meshloom.compiler.declare.data_spec import MixtureSource, OneSource
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.spec.target_spec import CpuTarget, LocalTarget, TargetSpec, TpuTarget
from meshloom.models import IGNORED_TARGET, PADDING_TARGET

from .batches import NEXT_BATCH, Batches, BatchSource, shuffled
from .corpus import Corpus, WeightedSource, open_corpus
from .documents import Document, corpus_parts
from .packing import ItemsOfPairs, PairedSequences, PairsOf
from .store import Split
from .tokenize import is_empty
from .tokenizers import Tokenizer, open_tokenizer

MOST_SEQUENCES = 2**32  # that Grain shuffles
SPLIT_KEY = "evaluation.split"


class Places:
    """The sequences of a part of an order, as numbers only: item i is the number of the part, and i."""

    def __init__(self, part: int, count: int):
        self._part, self._count = part, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self._part, int(index)


@dataclass(frozen=True)
class LocatedRow:
    """A row of a global batch.

    source: the key of its source. documents: the numbers of its documents in the source, from 0; for sequences of a
    user's class, the number of the item. names: the names of the documents, if the source is text.
    """

    row: int
    source: str
    documents: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """Returns the names of its documents, or their numbers if names are unknown."""
        return tuple(f"'{name}'" for name in self.names) or tuple(f"{number:,}" for number in self.documents)


def names_of(
    source: OneSource, where: str, numbers: Iterable[int], tokenizer: Tokenizer | None = None
) -> dict[int, str]:
    """Returns the names of documents by their numbers, from a source that is read again. Sources of tokens or finished
    sequences have no names. Raises ConfigError if the source cannot be read."""
    wanted = sorted(set(numbers))
    if not wanted or source.kind == "tokens" or (source.kind == "python" and source.items == "sequences"):
        return {}
    every = (one for part in corpus_parts(source, where, tokenizer) for one in part.read(0))
    documents = (one for one in every if isinstance(one, Problem) or not is_empty(one))
    first = list(islice(documents, wanted[-1] + 1))
    return {number: one.name for number in wanted if isinstance(one := first[number], Document)}


def describe_documents(rows: Sequence[LocatedRow], most: int = 3) -> str:
    """Returns the documents of the first rows as text, by source."""
    by_source: dict[str, dict[str, None]] = {}
    for one in rows[:most]:
        by_source.setdefault(one.source, {}).update(dict.fromkeys(one.labels))
    named = ", ".join(
        f"document{'s' if len(labels) > 1 else ''} {', '.join(labels)} of {source}"
        for source, labels in by_source.items()
    )
    return named + (f", and those of {counted(len(rows) - most, 'more sequence')}" if len(rows) > most else "")


@dataclass(frozen=True)
class OpenedSources:
    """The sources of a declaration, each opened and tokenised."""

    spec: RunSpec
    corpora: tuple[Corpus, ...]

    @property
    def unit(self) -> Literal["byte", "token"]:
        """Returns what one target is."""
        kinds = [corpus.tokenizer.kind for corpus in self.corpora if corpus.tokenizer]
        return "byte" if kinds and kinds[0] == "bytes" else "token"

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Returns what the sequences and their order depend on: contents, not paths or ways of reading."""
        data = self.spec.data
        kept = ("packing", "isolate_documents", "held_out_fraction", "shuffle_seed")
        identity: dict[str, Any] = {f"data.{key}": getattr(data, key) for key in kept}
        if data.held_out_by != "document":  # the value for checkpoints without this key
            identity["data.held_out_by"] = data.held_out_by
        for tokenizer in [corpus.tokenizer for corpus in self.corpora if corpus.tokenizer][:1]:
            identity |= {f"data.tokenizer.{key}": value for key, value in asdict(tokenizer).items()}
        for corpus in self.corpora:
            identity |= {f"{corpus.where}.{key}": value for key, value in corpus.content.items()}
            if len(self.corpora) > 1:
                identity[f"{corpus.where.removesuffix('.source')}.weight"] = corpus.weight
        sizes = ("global_batch_size", "sequence_length")
        return identity | {key: getattr(self.spec, key) for key in sizes}

    def order(self, parts: Sequence[Any], split: Split = "train") -> Any:
        """Returns the order of sequences, or of anything that is numbered as they are, a part for each source. The
        order of held-out sequences is the same for every run, whatever its seed."""
        is_train, data = split == "train", self.spec.data
        seed, num_epochs = (data.shuffle_seed, data.num_epochs) if is_train else (0, None)
        weights = self._weights
        if not self.spec.has_pairs:
            return shuffled(parts, weights, seed=seed, num_epochs=num_epochs)
        return ItemsOfPairs(shuffled([PairsOf(part) for part in parts], weights, seed=seed, num_epochs=num_epochs))

    def sequences(self, split: Split) -> Any:
        """Returns the sequences of a split in their order."""
        return self.order([corpus.sequences[split] for corpus in self.corpora], split)

    def held_out(self) -> tuple[Any, int]:
        """Returns the held-out sequences in their order, and the number of batches of them: what is declared, or all
        that there are. Rows without targets fill up the last one; pairs, which have no such rows, are left out."""
        spec, size = self.spec, self.spec.global_batch_size
        if not spec.data.held_out_fraction:
            return [], 0
        least = _least(self, size * spec.evaluation.num_batches)
        parts: list[Any] = [corpus.sequences["held_out"] for corpus in self.corpora]
        if all(len(part) >= count for part, count in zip(parts, least, strict=True)):
            return self.sequences("held_out"), spec.evaluation.num_batches
        if spec.has_pairs:
            once = ItemsOfPairs(shuffled([PairsOf(part) for part in parts], self._weights, seed=0, num_epochs=1))
            return once, len(once) // size
        once = shuffled(parts, self._weights, seed=0, num_epochs=1)
        return self.filled(once), min(spec.evaluation.num_batches, math.ceil(len(once) / size))

    def filled(self, order: Any) -> "_Filled":
        """Returns sequences in an order, and after its end ones without targets."""
        return _Filled(order, PADDING_TARGET if self.spec.data.may_pad else IGNORED_TARGET)

    @property
    def _weights(self) -> list[float]:
        return [corpus.weight for corpus in self.corpora]

    def batches(self, sequences: Any, num_batches: int, identity: dict[str, Any]) -> Batches:
        """Returns sequences in an order as global batches."""
        size, data = self.spec.global_batch_size, self.spec.data
        vocab_size = self.spec.model.vocab_size
        source = BatchSource(sequences, size, num_batches, rows=range(size), vocab_size=vocab_size)
        threads, buffer = data.num_prefetch_threads, data.num_prefetch_batches
        return Batches(source, grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffer), identity)


@dataclass(frozen=True)
class Data:
    """The data of a run.

    splits: train, shuffled, and held_out, the same batches for every run. places: the order of the sequences to train
    on, as (source, sequence). token_unit: "byte" or "token", or "pair" for an objective of pairs. pairs: the sequences
    of all splits, if they are pairs.
    """

    opened: OpenedSources
    splits: dict[Split, Batches]
    places: Any
    token_unit: str
    pairs: tuple[PairedSequences, ...]

    def __getitem__(self, split: Split) -> Batches:
        return self.splits[split]

    @property
    def identity(self) -> dict[str, Any]:
        """Returns everything that a place in the data depends on, by key; flat JSON."""
        return self.opened.identity

    @property
    def summary(self) -> str:
        """Returns a description of the training data, one line for each source."""
        spec, lines, corpora = self.opened.spec, [], self.opened.corpora
        packing = spec.data.packing
        for number, corpus in enumerate(corpora):
            train, held_out = corpus.sequences["train"], corpus.sequences["held_out"]
            fill = f", {human_share(train.fill)} filled" if packing != "concatenate" else ""
            name = "data" if len(corpora) == 1 else corpus.where
            to_train = f"{counted(len(train), 'sequence')} to train on{fill}"
            passes = _least(self.opened, spec.num_steps * spec.global_batch_size)[number] / max(1, len(train))
            steps = f"{passes:,.3g} {'pass' if passes == 1 else 'passes'} in {counted(spec.num_steps, 'step')}"
            lines.append(f"{name}: {corpus.counts}; {to_train}, {len(held_out):,} held out; {steps}")
        return "\n".join(lines)

    def locate(self, position: Mapping[str, int], rows: Sequence[int]) -> list[LocatedRow]:
        """Returns the documents of rows of a global batch to train on. position: the `BatchIterator.get_state` before
        the batch. Reads sources of text again. Raises ConfigError if one cannot be read."""
        first = position[NEXT_BATCH] * self.identity["global_batch_size"]
        corpora = self.opened.corpora
        places = [self.places[first + row] for row in rows]
        documents = [corpora[part].sequences["train"].documents(index) for part, index in places]
        names = []
        for number, corpus in enumerate(corpora):
            own = [one for (part, _), each in zip(places, documents, strict=True) if part == number for one in each]
            names.append(names_of(corpus.source, corpus.where, own, corpus.reader))
        return [
            LocatedRow(row, corpora[part].where, each, tuple(names[part][i] for i in each if i in names[part]))
            for row, (part, _), each in zip(rows, places, documents, strict=True)
        ]


def open_data(spec: RunSpec) -> Data:
    """Returns the data of a run, opened, tokenised and checked. Raises ConfigError with all problems of the data."""
    opened = _open_sources(spec, _check_is_enough)
    if spec.counts_epochs:
        opened = replace(opened, spec=spec.settled(num_steps=len(opened.sequences("train")) // spec.global_batch_size))
    train, (held_out, num_held_out) = opened.sequences("train"), opened.held_out()
    splits: dict[Split, Batches] = {
        "train": opened.batches(train, len(train) // spec.global_batch_size, opened.identity),
        "held_out": opened.batches(held_out, num_held_out, opened.identity),
    }
    places = opened.order([Places(i, len(corpus.sequences["train"])) for i, corpus in enumerate(opened.corpora)])
    every = (sequences for corpus in opened.corpora for sequences in corpus.sequences.values())
    pairs = tuple(each for each in every if isinstance(each, PairedSequences))
    return Data(opened, splits, places, "pair" if spec.has_pairs else opened.unit, pairs)


@dataclass(frozen=True)
class EvaluatedPart:
    """A part of the data that is evaluated by itself. name: "data", or the name of a part of a mixture. num_sequences:
    of its split. batches: the last one may hold rows without targets."""

    name: str
    num_sequences: int
    batches: Batches


@dataclass(frozen=True)
class EvaluatedData:
    """The data of an evaluation. parts: of a mixture the whole, by its weights, and then each source alone. identity:
    everything that the batches depend on. unit: what one target is."""

    parts: tuple[EvaluatedPart, ...]
    identity: dict[str, Any]
    unit: Literal["byte", "token"]


def open_evaluated(spec: RunSpec) -> EvaluatedData:
    """Returns the data of `evaluation.split`. Its first batches of held-out data are those that a run evaluates.

    Raises ConfigError with all problems of the data, and for a split without sequences.
    """
    split: Split = "held_out" if spec.evaluation.split == "held_out" else "train"
    if spec.evaluation.split == "all":
        data = spec.data.model_copy(update={"held_out_fraction": 0.0})
        spec = spec.model_copy(update={"data": data})
    opened = _open_sources(spec, partial(_check_is_there, split=split))
    identity = opened.identity | {SPLIT_KEY: spec.evaluation.split}

    def part(name: str, corpora: Sequence[Corpus]) -> EvaluatedPart:
        order = shuffled(
            [each.sequences[split] for each in corpora], [each.weight for each in corpora], seed=0, num_epochs=1
        )
        size = spec.global_batch_size
        num_batches = min(spec.evaluation.num_batches, math.ceil(len(order) / size))
        batches = opened.batches(opened.filled(order), num_batches, identity)
        return EvaluatedPart(name, min(len(order), num_batches * size), batches)

    alone = opened.corpora if len(opened.corpora) > 1 else ()  # data.source.parts.web.source is called web
    names = [each.where.removeprefix("data.source.parts.").removesuffix(".source") for each in alone]
    parts = (part("data", opened.corpora), *(part(name, [each]) for name, each in zip(names, alone, strict=True)))
    return EvaluatedData(parts, identity, opened.unit)


class _Filled:
    """Sequences in an order, and after its end ones without targets."""

    def __init__(self, order: Any, no_target: int):
        self._order, self._no_target = order, no_target

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if index < len(self._order):
            return self._order[index]
        first = self._order[0]
        return {**first, "targets": np.full_like(first["targets"], self._no_target)}


def _least(opened: OpenedSources, count: int) -> list[int]:
    """Returns how many of so many sequences each source has to give, by its weight."""
    total = sum(corpus.weight for corpus in opened.corpora)
    return [max(1, math.ceil(count * corpus.weight / total - 1e-6)) for corpus in opened.corpora]


def _open_sources(spec: RunSpec, check_lengths: Callable[[OpenedSources], None]) -> OpenedSources:
    """Returns the sources of a declaration. Raises ConfigError with all of their problems. check_lengths: raises
    ConfigError where a source has too few sequences."""
    source, declared = spec.data.source, spec.data.tokenizer
    sources = [
        WeightedSource(part.source, f"data.source.parts.{name}.source", part.weight)
        for name, part in (source.parts if isinstance(source, MixtureSource) else {}).items()
    ]
    if not isinstance(source, MixtureSource):
        sources = [WeightedSource(source, "data.source", 1.0)]
    _check_objective(spec, sources)
    try:
        tokenizer = open_tokenizer(declared) if declared else None
    except ConfigError as error:  # reported with the problems of the files
        of_text = [each for each in sources if each.source.kind not in ("tokens", "python")]
        all_of(partial(raise_if_any, error.problems), *(partial(corpus_parts, s.source, s.where) for s in of_text))
        raise
    opened = OpenedSources(spec, all_of(*(partial(open_corpus, spec, each, tokenizer) for each in sources)))
    all_of(lambda: _check_tokenizers(spec.model.vocab_size, opened.corpora), lambda: check_lengths(opened))
    return opened


def _check_objective(spec: RunSpec, sources: Sequence[WeightedSource]) -> None:
    """Raises ConfigError if the objective compares pairs and a source holds none, or the other way round."""
    problems, kind = [], spec.objective.kind
    for source in sources:
        holds_pairs = source.source.kind == "preferences"
        if spec.has_pairs and not holds_pairs:
            what = f"{kind} compares pairs, and {source.where}.kind={source.source.kind} holds none"
            problems.append(Problem("objective", what, "use data=preferences data.source.paths=[...]"))
        elif holds_pairs and not spec.has_pairs:
            what = f"{kind} learns from documents, and {source.where}.kind=preferences holds pairs of them"
            problems.append(Problem("objective", what, "use objective=dpo or objective=simpo, or data=chats"))
    if not problems and spec.has_pairs != (spec.data.packing == "pairs"):
        does, fix = ("compares", "pairs") if spec.has_pairs else ("does not compare", "concatenate or first_fit")
        what = f"is {spec.data.packing}, and objective={kind} {does} pairs"
        problems.append(Problem("data.packing", what, f"use {fix}"))
    if spec.has_pairs and spec.data.held_out_by == "position" and spec.data.held_out_fraction:
        what = "position could hold out one document of a pair"
        problems.append(Problem("data.held_out_by", what, "use document"))
    if spec.has_pairs and spec.loss.z_loss_weight:
        what = f"{spec.loss.z_loss_weight} is not implemented for objective={kind}"
        problems.append(Problem("loss.z_loss_weight", what, "set it to 0"))
    raise_if_any(problems)


def _check_tokenizers(vocab_size: int, corpora: Sequence[Corpus]) -> None:
    """Raises ConfigError for several tokenizers, for a model that lacks tokens of the tokenizer, and for shards with
    tokens that the tokenizer lacks."""
    problems = []
    tokenizers = dict.fromkeys(corpus.tokenizer for corpus in corpora if corpus.tokenizer)
    if len(tokenizers) > 1:
        named = ", ".join(f"{corpus.where}: {corpus.tokenizer.kind}" for corpus in corpora if corpus.tokenizer)
        what = f"its parts are in tokens of {len(tokenizers)} tokenizers ({named})"
        problems.append(Problem("data.source.parts", what, "write them all with the same tokenizer"))
    for tokenizer in tokenizers:
        if vocab_size < tokenizer.vocab_size:
            what = f"{vocab_size} is less than the {tokenizer.vocab_size} tokens of tokenizer '{tokenizer.kind}'"
            own = ", or the tokenizer that the weights were trained with: data.tokenizer.path=FOLDER"
            fix = f"use {tokenizer.vocab_size} or more{own if tokenizer.kind == 'huggingface' else ''}"
            problems.append(Problem("model.vocab_size", what, fix))
    for corpus in corpora:
        if corpus.tokenizer and corpus.largest_token >= corpus.tokenizer.vocab_size:
            what = f"holds token {corpus.largest_token}; its tokenizer has {corpus.tokenizer.vocab_size}"
            problems.append(Problem(corpus.where, what, "write the shards again with `meshloom data`"))
    raise_if_any(problems)


def _check_is_there(opened: OpenedSources, *, split: Split) -> None:
    """Raises ConfigError if a source has no sequence to evaluate."""
    spec = opened.spec
    if split == "held_out" and not spec.data.held_out_fraction:
        what = "is held_out, and data.held_out_fraction is 0"
        raise ConfigError([Problem(SPLIT_KEY, what, f"use {SPLIT_KEY}=all, or hold out a part")])
    fix = "lower sequence_length" + ("" if spec.evaluation.split == "all" else f", or use {SPLIT_KEY}=all")
    what = f"its {split} split has no sequence of {counted(spec.sequence_length, 'token')}"
    raise_if_any(Problem(corpus.where, what, fix) for corpus in opened.corpora if not len(corpus.sequences[split]))


def _check_is_enough(opened: OpenedSources) -> None:
    """Raises ConfigError if a split has fewer sequences than the run draws from it."""
    spec, corpora = opened.spec, opened.corpora
    data, batch = spec.data, spec.global_batch_size
    needed: dict[Split, list[int]] = {"train": _least(opened, batch)}
    if data.held_out_fraction:  # of pairs a batch, of others what there is
        needed["held_out"] = _least(opened, batch if spec.has_pairs else 1)
    problems = []
    for number, corpus in enumerate(corpora):
        for split, sequences in corpus.sequences.items():
            least = needed[split][number] if split in needed else 0
            if len(sequences) < least:
                has = f"{counted(len(sequences), 'sequence')} of {counted(spec.sequence_length, 'token')}"
                what = f"its {split} split has {has}, {least:,} {be(least)} needed"
                where = "data" if len(corpora) == 1 else corpus.where
                counts: dict[Split, int] = {name: each[number] for name, each in needed.items()}
                fix = _fix_of_few(opened, sum(map(len, corpus.sequences.values())), len(sequences), counts, split)
                problems.append(Problem(where, what, fix))
            elif len(sequences) > MOST_SEQUENCES:
                what = f"its {split} split has {len(sequences):,} sequences; {MOST_SEQUENCES:,} can be shuffled"
                problems.append(Problem(corpus.where, what, "raise sequence_length"))
    raise_if_any(problems)
    num_batches = len(opened.sequences("train")) // batch
    if num_batches < spec.num_steps and not spec.counts_epochs:
        per_epoch = max(1, num_batches // (data.num_epochs or 1))
        what = f"the data end after {num_batches:,} global batches, num_steps is {spec.num_steps:,}"
        fix = f"use data.num_epochs={-(-spec.num_steps // per_epoch)} or null (no end), or num_steps={num_batches}"
        raise ConfigError([Problem("data.num_epochs", what, fix)])


def _fix_of_few(opened: OpenedSources, total: int, has: int, least: Mapping[Split, int], split: Split) -> str:
    """Returns the fix for a split with too few sequences: only changes for which the corpus is large enough. total:
    the sequences of all splits. has: those of this one."""
    spec = opened.spec
    fraction, held_out = spec.data.held_out_fraction, least.get("held_out", 0)
    by_position = math.floor(fraction * total) - 1
    is_enough = by_position >= held_out and total - by_position - 2 >= least["train"]
    if split == "held_out" and spec.data.held_out_by == "document" and is_enough and not spec.has_pairs:
        return "hold out the end of the corpus in place of whole documents: data.held_out_by=position"
    fixes = []
    if smaller := _smaller_batch(opened, has):
        fixes.append(f"global_batch_size={smaller}")
    if shorter := _shorter_sequences(opened, has, least[split]):
        fixes.append(f"sequence_length={shorter}")
    if fraction and total >= least["train"]:
        fixes.append("data.held_out_fraction=0, which holds out nothing")
    return f"use {', or '.join(fixes)}" if fixes else "lower sequence_length, or give more data"


def _smaller_batch(opened: OpenedSources, most: int) -> int | None:
    """Returns a part of the global batch that the data fill, and that still divides over devices and microbatches;
    None if there is none."""
    spec = opened.spec
    step = spec.num_microbatches * (2 if spec.has_pairs else 1) * _num_devices(spec.target)
    fitting = (size for size in range(step, min(most, spec.global_batch_size - 1) + 1, step))
    return max((size for size in fitting if spec.global_batch_size % size == 0), default=None)


def _num_devices(target: TargetSpec) -> int:
    """Returns how many devices a batch may have to be split over."""
    if isinstance(target, CpuTarget):
        return target.num_devices
    if isinstance(target, LocalTarget):
        return target.num_devices or jax.device_count()
    chips = math.prod(target.shape) * (target.num_slices if isinstance(target, TpuTarget) else 1)
    return chips * target.chip.num_devices


def _shorter_sequences(opened: OpenedSources, has: int, least: int) -> int | None:
    """Returns a part of sequence_length by which as many tokens are enough sequences; None if a sequence is a whole
    document, or there are too few."""
    spec = opened.spec
    if spec.has_pairs or spec.data.gives_sequences or not has:
        return None
    return next((spec.sequence_length // n for n in (2, 4, 8, 16) if spec.sequence_length % n == 0
                 and spec.sequence_length // n >= 32 and has * n >= least * 1.1), None)  # fmt: skip
