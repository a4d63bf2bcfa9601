"""Opens the data of a run: both splits as global batches, after checking that they suffice for the run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import grain

from meshloom.compiler.core.errors import ConfigError, Problem, all_of, raise_if_any
from meshloom.compiler.core.format import be, counted, human_parameters
from meshloom.compiler.declare.data_spec import MixtureSource, OneSource
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.plan import Plan

from .batches import NEXT_BATCH, Batches, BatchSource, shuffled
from .corpus import SPLITS, Corpus, Sequences, open_corpus
from .documents import corpus_parts
from .locate import LocatedRow, Places, names_of
from .pairs import ItemsOfPairs, PairedSequences, PairsOf
from .store import Split
from .tokenizers import Tokenizer, TokenizerIdentity, open_tokenizer

MOST_SEQUENCES = 2**32  # that Grain shuffles


@dataclass(frozen=True)
class WeightedSource:
    """A source of the run. where: its key. weight: its share of the sequences, relative to the sum of all weights."""

    source: OneSource
    where: str
    weight: float


@dataclass(frozen=True)
class Data:
    """The data of a run.

    splits: train, shuffled, and held_out, the same batches for every run. identity: everything that a place in the data
    depends on, by key; flat JSON. token_unit: "byte" or "token", or "pair" for an objective of pairs. summary: a
    description to show. sources: each source with its sequences to train on. places: the order of these, as (source,
    sequence). tokenizer: for sources of text. pairs: the sequences of all splits, if they are pairs.
    """

    splits: dict[Split, Batches]
    identity: dict[str, Any]
    token_unit: str
    summary: str
    sources: tuple[tuple[WeightedSource, Sequences], ...]
    places: Any
    tokenizer: Tokenizer | None
    pairs: tuple[PairedSequences, ...]

    def __getitem__(self, split: Split) -> Batches:
        return self.splits[split]

    def locate(self, position: Mapping[str, int], rows: Sequence[int]) -> list[LocatedRow]:
        """Returns the documents of rows of a global batch to train on. position: the `BatchIterator.get_state` before
        the batch. Reads sources of text again. Raises ConfigError if one cannot be read."""
        first = position[NEXT_BATCH] * self.identity["global_batch_size"]
        places = [self.places[first + row] for row in rows]
        documents = [self.sources[part][1].documents(index) for part, index in places]
        names = []
        for number, (source, _) in enumerate(self.sources):
            own = [one for (part, _), each in zip(places, documents, strict=True) if part == number for one in each]
            names.append(names_of(source.source, source.where, own, self.tokenizer))
        return [
            LocatedRow(row, self.sources[part][0].where, each, tuple(names[part][i] for i in each if i in names[part]))
            for row, (part, _), each in zip(rows, places, documents, strict=True)
        ]


def open_data(spec: RunSpec) -> Data:
    """Returns the data of a run, opened, tokenised and checked. Raises ConfigError with all problems of the data."""
    sources, corpora = open_sources(spec, _check_lengths)
    identity = identity_of_data(spec, corpora, sources)
    splits: dict[Split, Batches] = {split: _batches(spec, split, corpora, sources, identity) for split in SPLITS}
    of_train = tuple((source, corpus.sequences["train"]) for source, corpus in zip(sources, corpora, strict=True))
    places = [Places(part, len(sequences)) for part, (_, sequences) in enumerate(of_train)]
    order = _order(spec, places, sources)
    every = (sequences for corpus in corpora for sequences in corpus.sequences.values())
    pairs = tuple(each for each in every if isinstance(each, PairedSequences))
    unit = "pair" if spec.has_pairs else unit_of(corpora)
    return Data(splits, identity, unit, _summary(spec, corpora), of_train, order, corpora[0].reader, pairs)


CheckLengths = Callable[[RunSpec, list[Corpus], list[WeightedSource]], None]


def open_sources(spec: RunSpec, check_lengths: CheckLengths) -> tuple[list[WeightedSource], list[Corpus]]:
    """Returns the sources of a declaration, each opened and tokenised. Raises ConfigError with all of their problems.

    check_lengths: raises ConfigError where a source has too few sequences.
    """
    sources = _sources(spec)
    _check_objective(spec, sources)
    corpora = _open_corpora(spec, sources)
    all_of(
        lambda: _check_one_tokenizer(_tokenizers(corpora), corpora),
        lambda: _check_vocabulary(spec, corpora),
        lambda: check_lengths(spec, corpora, sources),
    )
    return sources, corpora


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


def unit_of(corpora: Sequence[Corpus]) -> Literal["byte", "token"]:
    """Returns what one target is."""
    tokenizers = _tokenizers(corpora)
    return "byte" if tokenizers and tokenizers[0].kind == "bytes" else "token"


def _tokenizers(corpora: Sequence[Corpus]) -> list[TokenizerIdentity]:
    return list(dict.fromkeys(corpus.tokenizer for corpus in corpora if corpus.tokenizer))


def _sources(spec: RunSpec) -> list[WeightedSource]:
    source = spec.data.source
    if not isinstance(source, MixtureSource):
        return [WeightedSource(source, "data.source", 1.0)]
    return [
        WeightedSource(part.source, f"data.source.parts.{name}.source", part.weight)
        for name, part in source.parts.items()
    ]


def _open_corpora(spec: RunSpec, sources: list[WeightedSource]) -> list[Corpus]:
    """Returns every source; text is tokenised. If the tokenizer cannot be opened, the problems of the files are
    reported with it."""
    declared = spec.data.tokenizer
    try:
        tokenizer = open_tokenizer(declared) if declared else None
    except ConfigError as error:
        of_text = [s for s in sources if s.source.kind not in ("tokens", "python")]
        all_of(partial(_raise, error), *(partial(corpus_parts, s.source, s.where) for s in of_text))
        raise
    return list(all_of(*(partial(open_corpus, spec, s.source, s.where, tokenizer) for s in sources)))


def _raise(error: Exception) -> None:
    raise error


def _check_one_tokenizer(tokenizers: list[TokenizerIdentity], corpora: list[Corpus]) -> None:
    if len(tokenizers) > 1:
        named = ", ".join(f"{corpus.where}: {corpus.tokenizer.kind}" for corpus in corpora if corpus.tokenizer)
        what = f"its parts are in tokens of {len(tokenizers)} tokenizers ({named})"
        raise ConfigError([Problem("data.source.parts", what, "write them all with the same tokenizer")])


def _check_vocabulary(spec: RunSpec, corpora: list[Corpus]) -> None:
    """Raises ConfigError if the model lacks tokens of the tokenizer, or the tokenizer lacks tokens of the shards."""
    size, problems = spec.model.vocab_size, []
    for tokenizer in dict.fromkeys(corpus.tokenizer for corpus in corpora if corpus.tokenizer):
        if size < tokenizer.vocab_size:
            what = f"{size} is less than the {tokenizer.vocab_size} tokens of tokenizer '{tokenizer.kind}'"
            own = ", or the tokenizer that the weights were trained with: data.tokenizer.path=FOLDER"
            fix = f"use {tokenizer.vocab_size} or more{own if tokenizer.kind == 'huggingface' else ''}"
            problems.append(Problem("model.vocab_size", what, fix))
    for corpus in corpora:
        if corpus.tokenizer and corpus.largest_token >= corpus.tokenizer.vocab_size:
            what = f"holds token {corpus.largest_token}; its tokenizer has {corpus.tokenizer.vocab_size}"
            problems.append(Problem(corpus.where, what, "write the shards again with `meshloom data`"))
    raise_if_any(problems)


def _check_lengths(spec: RunSpec, corpora: list[Corpus], sources: list[WeightedSource]) -> None:
    """Raises ConfigError if a split has fewer sequences than the run draws from it."""
    data, batch, length = spec.data, spec.global_batch_size, spec.sequence_length
    needed: dict[Split, int] = {"train": batch}
    if data.held_out_fraction:
        needed["held_out"] = batch * spec.evaluation.num_batches
    total_weight = sum(source.weight for source in sources)
    problems = []
    for corpus, source in zip(corpora, sources, strict=True):
        least: dict[Split, int] = {
            split: max(1, math.ceil(count * source.weight / total_weight - 1e-6)) for split, count in needed.items()
        }
        for split, sequences in corpus.sequences.items():
            if len(sequences) < least.get(split, 0):
                has = f"{counted(len(sequences), 'sequence')} of {counted(length, 'token')}"
                what = f"its {split} split has {has}, {least[split]:,} {be(least[split])} needed"
                where = "data" if len(corpora) == 1 else corpus.where
                problems.append(Problem(where, what, _fix_of_few(spec, corpus, least, split)))
            elif len(sequences) > MOST_SEQUENCES:
                what = f"its {split} split has {len(sequences):,} sequences, more than the {MOST_SEQUENCES:,} that can be shuffled"  # fmt: skip  # noqa: E501
                problems.append(Problem(corpus.where, what, "raise sequence_length"))
    raise_if_any(problems)
    num_batches = len(_train_order(spec, corpora, sources)) // batch
    if num_batches < spec.num_steps:
        per_epoch = max(1, num_batches // (data.num_epochs or 1))
        what = f"the data end after {num_batches:,} global batches, num_steps is {spec.num_steps:,}"
        fix = f"use data.num_epochs={-(-spec.num_steps // per_epoch)} or null (no end), or num_steps={num_batches}"
        raise ConfigError([Problem("data.num_epochs", what, fix)])


def _fix_of_few(spec: RunSpec, corpus: Corpus, least: Mapping[Split, int], split: Split) -> str:
    """Returns the fix for a split with too few sequences: only changes for which the corpus is large enough."""
    total, fraction = sum(map(len, corpus.sequences.values())), spec.data.held_out_fraction
    held_out = least.get("held_out", 0)
    by_position = math.floor(fraction * total) - 1
    is_enough = by_position >= held_out and total - by_position - 2 >= least["train"]
    if spec.data.held_out_by == "document" and is_enough:
        return "hold out the end of the corpus in place of whole documents: data.held_out_by=position"
    fixes = ["lower sequence_length or global_batch_size"]
    if split == "held_out":
        fixes = ["lower sequence_length, global_batch_size or evaluation.num_batches"]
        fixes += ["raise data.held_out_fraction"] if total >= least["train"] + held_out else []
    if fraction and total >= least["train"]:
        fixes.append("hold out nothing: data.held_out_fraction=0")
    return ", or ".join(fixes)


def _train_order(spec: RunSpec, corpora: list[Corpus], sources: list[WeightedSource]) -> Any:
    return _order(spec, [corpus.sequences["train"] for corpus in corpora], sources)


def _order(spec: RunSpec, parts: Sequence[Any], sources: list[WeightedSource], split: Split = "train") -> Any:
    """Returns the order of sequences, or of anything that is numbered as they are. That of held-out sequences is the
    same for every run, whatever its seed."""
    is_train, weights = split == "train", [source.weight for source in sources]
    seed, num_epochs = (spec.data.shuffle_seed, spec.data.num_epochs) if is_train else (0, None)
    if not spec.has_pairs:
        return shuffled(parts, weights, seed=seed, num_epochs=num_epochs)
    return ItemsOfPairs(shuffled([PairsOf(part) for part in parts], weights, seed=seed, num_epochs=num_epochs))


def _batches(
    spec: RunSpec, split: Split, corpora: list[Corpus], sources: list[WeightedSource], identity: dict[str, Any]
) -> Batches:
    size = spec.global_batch_size
    if split == "train":
        order = _train_order(spec, corpora, sources)
        num_batches = len(order) // size
    elif not spec.data.held_out_fraction:
        order, num_batches = [], 0
    else:
        order = _order(spec, [corpus.sequences[split] for corpus in corpora], sources, split)
        num_batches = spec.evaluation.num_batches
    source = BatchSource(
        order, batch_size=size, num_batches=num_batches, rows=range(size), vocab_size=spec.model.vocab_size
    )
    threads, buffer = spec.data.num_prefetch_threads, spec.data.num_prefetch_batches
    return Batches(source, grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffer), identity)


def identity_of_data(spec: RunSpec, corpora: list[Corpus], sources: list[WeightedSource]) -> dict[str, Any]:
    """Returns what the sequences and their order depend on: contents, not paths or ways of reading."""
    kept = ("packing", "isolate_documents", "held_out_fraction", "shuffle_seed")
    identity: dict[str, Any] = {f"data.{key}": getattr(spec.data, key) for key in kept}
    if spec.data.held_out_by != "document":  # the value for checkpoints without this key
        identity["data.held_out_by"] = spec.data.held_out_by
    if tokenizers := _tokenizers(corpora):
        identity |= {f"data.tokenizer.{key}": value for key, value in asdict(tokenizers[0]).items()}
    for corpus, source in zip(corpora, sources, strict=True):
        identity |= {f"{corpus.where}.{key}": value for key, value in corpus.content.items()}
        if len(sources) > 1:
            identity[f"{corpus.where.removesuffix('.source')}.weight"] = source.weight
    return identity | {"global_batch_size": spec.global_batch_size, "sequence_length": spec.sequence_length}


def _summary(spec: RunSpec, corpora: list[Corpus]) -> str:
    """Returns a description of the training data, one line for each source."""
    lines = []
    for corpus in corpora:
        train, held_out = corpus.sequences["train"], corpus.sequences["held_out"]
        fill = f", {train.fill:.1%} filled" if spec.data.packing != "concatenate" else ""
        name = "data" if len(corpora) == 1 else corpus.where
        to_train = f"{counted(len(train), 'sequence')} to train on{fill}"
        lines.append(f"{name}: {corpus.counts}; {to_train}, {len(held_out):,} held out")
    return "\n".join(lines)


LARGE = 1_000_000_000  # parameters; the 25 MB of Python's library teach such a model nothing


def warnings_of_demo_data(plan: Plan[RunSpec]) -> tuple[Problem, ...]:
    """Returns a warning if a large model would train on the default data, which are only meant for trying the loop."""
    if plan.spec.data.source.kind != "python_stdlib" or plan.num_parameters < LARGE:
        return ()
    what = (
        f"python_stdlib, the default, is the source text of Python's library as bytes, for {plan.spec.num_steps} "
        f"steps (num_steps={plan.spec.num_steps}): a model of {human_parameters(plan.num_parameters)} parameters on "
        f"{plan.target.name} learns nothing of use from it"
    )
    return (Problem("data", what, "choose your data, such as data=tokens data.source.directory=..., and num_steps="),)
