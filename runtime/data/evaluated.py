"""Opens the data of an evaluation: one split of each source, once through, whatever its length.

Training needs whole batches, and enough of them for its steps; an evaluation takes any number of sequences. The last
batch is filled up with rows that have no target.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import grain
import numpy as np

from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any
from meshloom.compiler.core.format import counted
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.models import IGNORED_TARGET, PADDING_TARGET

from .batches import Batches, BatchSource, shuffled
from .corpus import Corpus
from .splits import WeightedSource, identity_of_data, open_sources, unit_of
from .store import Split

SPLIT_KEY = "evaluation.split"


@dataclass(frozen=True)
class EvaluatedPart:
    """What is evaluated by itself. name: "data", or the name of a part of a mixture. num_sequences: of its split.
    batches: the last one may hold rows without targets."""

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
    sources, corpora = open_sources(spec, partial(_check_some, split=split))
    identity = identity_of_data(spec, corpora, sources) | {SPLIT_KEY: spec.evaluation.split}
    parts = [corpus.sequences[split] for corpus in corpora]
    whole = _part("data", spec, parts, [source.weight for source in sources], identity)
    alone = [] if len(sources) == 1 else [
        _part(_name_of(source), spec, [part], [1.0], identity) for source, part in zip(sources, parts, strict=True)
    ]  # fmt: skip
    return EvaluatedData((whole, *alone), identity, unit_of(corpora))


def _check_some(spec: RunSpec, corpora: list[Corpus], sources: list[WeightedSource], *, split: Split) -> None:
    del sources
    if split == "held_out" and not spec.data.held_out_fraction:
        what = "is held_out, and data.held_out_fraction is 0"
        raise ConfigError([Problem(SPLIT_KEY, what, f"use {SPLIT_KEY}=all, or hold out a part")])
    fix = "lower sequence_length" + ("" if spec.evaluation.split == "all" else f", or use {SPLIT_KEY}=all")
    empty = (corpus for corpus in corpora if not len(corpus.sequences[split]))
    raise_if_any(
        Problem(corpus.where, f"its {split} split has no sequence of {counted(spec.sequence_length, 'token')}", fix)
        for corpus in empty
    )


def _name_of(source: WeightedSource) -> str:
    """Returns the name of a part of a mixture: data.source.parts.web.source -> web."""
    return source.where.removeprefix("data.source.parts.").removesuffix(".source")


def _part(
    name: str, spec: RunSpec, parts: Sequence[Any], weights: Sequence[float], identity: dict[str, Any]
) -> EvaluatedPart:
    order, size = shuffled(parts, weights, seed=0, num_epochs=1), spec.global_batch_size
    num_batches = min(spec.evaluation.num_batches, math.ceil(len(order) / size))
    source = BatchSource(
        _Filled(order, PADDING_TARGET if spec.data.may_pad else IGNORED_TARGET),
        batch_size=size,
        num_batches=num_batches,
        rows=range(size),
        vocab_size=spec.model.vocab_size,
    )
    threads, buffer = spec.data.num_prefetch_threads, spec.data.num_prefetch_batches
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffer)
    return EvaluatedPart(name, min(len(order), num_batches * size), Batches(source, options, identity))


class _Filled:
    """Sequences in an order, and after its end ones without targets."""

    def __init__(self, order: Any, no_target: int):
        self._order, self._no_target = order, no_target

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if index < len(self._order):
            return self._order[index]
        first = self._order[0]
        return {**first, "targets": np.full_like(first["targets"], self._no_target)}
