"""How communication is to be hidden behind arithmetic."""

from typing import Self

from pydantic import NonNegativeInt, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from meshloom.models.config import Config

from .config_types import Fraction


class LayerLoop(Config):
    """The loop over a stack's layers (layers.py)."""

    unroll: PositiveInt  # layers in a trip
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


class OverlapSpec(Config):
    layers: LayerLoop
    max_exposed: Fraction | None  # of the predicted step, waiting for communication; compiling fails above it
