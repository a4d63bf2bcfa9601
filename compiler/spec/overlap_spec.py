"""Declares how communication overlaps with compute."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from meshloom.models.config import Config, mistake

from ..core.config_types import Fraction, LocalPath, Text
from .program_keys import ProgramKeys

AUTO = "auto"  # a strategy, or flag presets, that the plan chooses
PRICES = "prices"  # a PGLE file that is made from the prices of the compiled program


class LayerLoop(Config):
    """The loop over the layers of a stack (step/sequential.py)."""

    unroll: PositiveInt  # layers per iteration
    batch_split: PositiveInt  # parts of a device's sequences that are interleaved in a layer
    prefetch: NonNegativeInt  # layers whose weights are gathered ahead
    deferred_reduce_scatter: bool  # a layer's gradients are reduced while the layer below runs backward; needs prefetch
    reduce_in_backward: bool  # gradients reduced once per step overlap with the last microbatch's backward pass

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.deferred_reduce_scatter and not self.prefetch:
            what = "is true, but the loop over layers prefetches nothing"
            fix = "set overlap.layers.prefetch=1, or choose overlap=prefetch"
            raise mistake(what, fix, "deferred_reduce_scatter")
        return self


def _one_or_by_name(value: Any) -> Any:
    """Raises one error, where a union would raise one for each of its types."""
    is_text = lambda x: isinstance(x, str) and bool(x)  # noqa: E731
    if is_text(value) or (isinstance(value, Mapping) and all(map(is_text, [*value, *value.values()]))):
        return value
    what = f"{value!r} is neither a strategy nor a mapping of names to strategies"
    raise mistake(what, "set auto, a strategy, or {NAME: STRATEGY}")


# How an operation runs over the mesh: auto, one strategy for all of its sites, or a strategy for each named site.
StrategyChoice = Annotated[Text | dict[Text, Text], BeforeValidator(_one_or_by_name)]


class OverlapConfig(Config):
    """A way to run the layers: one candidate of a search.

    parallel: strategies of the operations that a search chooses, as in the group `parallel`.
    """

    layers: LayerLoop
    parallel: dict[Text, StrategyChoice]
    flag_presets: tuple[Text, ...]  # names of compiler_options.py; later ones take precedence

    @property
    def name(self) -> str:
        """Returns a short description: "prefetch 1, deferred, unroll 2, collective_matmul, sparse_core"."""
        loop = self.layers
        words = [f"prefetch {loop.prefetch}"] if loop.prefetch else ["scan"]
        words += ["deferred"] if loop.deferred_reduce_scatter else []
        words += ["reduced in backward"] if loop.reduce_in_backward else []
        words += [f"unroll {loop.unroll}"] if loop.unroll > 1 else []
        words += [f"batch split {loop.batch_split}"] if loop.batch_split > 1 else []
        words += [name for name in self.strategies if name != "plain"]
        return ", ".join([*words, *self.flag_presets])

    @property
    def strategies(self) -> tuple[str, ...]:
        """Returns every strategy that some operation runs by, each once."""
        named = ((x,) if isinstance(x, str) else tuple(x.values()) for x in self.parallel.values())
        return tuple(dict.fromkeys(name for names in named for name in names))


class OverlapSearch(Config):
    """Bounds of the search for the loop and the flag presets that hide the most (search/candidates.py)."""

    max_candidates: PositiveInt  # programs that are compiled, including the declared one
    budget_seconds: PositiveFloat  # after this time no further program is compiled
    min_gain: Fraction  # share of the shortest step so far; a candidate that could not save it is not compiled


class StepOverlap(ProgramKeys):
    """How the loop over layers is written, so that communication overlaps with compute."""

    layers: LayerLoop


class OverlapSpec(StepOverlap):
    """A way to overlap, the search for a better one, and the limit of exposed communication."""

    flag_presets: tuple[Text, ...]  # names of compiler_options.py; later ones take precedence
    pgle: LocalPath | None  # times by which XLA schedules for GPUs: PRICES, or a file (xla/pgle.py)
    search: OverlapSearch | None
    max_exposed: Fraction | None  # share of the step that waits for transfers; compiling fails above it
