"""How communication is to be hidden behind arithmetic."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from meshloom.models.config import Config

from ..core.config_types import Fraction, Text


class LayerLoop(Config):
    """The loop over a stack's layers (layers.py)."""

    unroll: PositiveInt  # layers in a trip
    batch_parts: PositiveInt  # of a device's sequences, side by side in a layer: one computes while another is sent
    prefetch: NonNegativeInt  # layers whose weights are gathered ahead
    deferred_reduce_scatter: bool  # a layer's gradients cross while the layer below runs backward; needs prefetch
    reduce_in_backward: bool  # what is reduced once per step crosses while the last microbatch runs backward

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.deferred_reduce_scatter and not self.prefetch:
            what = "is on, and the loop over layers prefetches nothing"
            fix = {"key": "deferred_reduce_scatter", "fix": "set overlap.layers.prefetch=1, or choose overlap=prefetch"}
            raise PydanticCustomError("choice", "{what}", {"what": what, **fix})
        return self


def _auto_or_names(value: Any) -> Any:
    """One error for both, where a union would tell of each."""
    if value == "auto":
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value):
        return tuple(value)
    context = {"what": f"{value!r} is neither auto nor a list of names", "fix": "set auto, or give a list"}
    raise PydanticCustomError("choice", "{what}", context)


Rings = Annotated[Literal["auto"] | tuple[Text, ...], BeforeValidator(_auto_or_names)]


class Way(Config):
    """How layers are run: what a search tries, and one is declared."""

    layers: LayerLoop
    rings: Rings  # matmuls whose parts are added up in a ring, by what they make (matmul.py)
    option_sets: tuple[Text, ...]  # of compiler_options.py, by name; the later wins

    @property
    def name(self) -> str:
        """In a few words: "prefetch 1, deferred, unroll 2, rings, sparse_core"."""
        loop = self.layers
        words = [f"prefetch {loop.prefetch}"] if loop.prefetch else ["scan"]
        words += ["deferred"] if loop.deferred_reduce_scatter else []
        words += ["reduced in backward"] if loop.reduce_in_backward else []
        words += [f"unroll {loop.unroll}"] if loop.unroll > 1 else []
        words += [f"{loop.batch_parts} batch parts"] if loop.batch_parts > 1 else []
        words += ["rings"] if self.rings else []
        return ", ".join([*words, *self.option_sets])


class OverlapSearch(Config):
    """How far `meshloom compile` goes to find the loop and the option sets that hide most (candidates.py)."""

    max_candidates: PositiveInt  # programs that are compiled, the one that is declared among them
    budget_seconds: PositiveFloat  # no other program is begun after so long


class OverlapSpec(Way):
    head: Literal["auto", "whole", "parts"]  # of the vocabulary, whose weights are gathered and used (lm_head.py)
    search: OverlapSearch | None
    max_exposed: Fraction | None  # of the predicted step, waiting for communication; compiling fails above it
