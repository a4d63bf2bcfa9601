"""Choices of experts that found no room in a buffer: the user hears of the first, metrics have them all."""

from collections.abc import Callable
from typing import Self

from meshloom.compiler.core.errors import Problem

from .metrics import Metrics
from .observer import ObservedRun, Observer

DROPPED = "dropped"  # the statistic of a layer (models/moe.py): layers/dropped, or layers/dropped/0 of one layer
FIX = (
    "raise moe.max_imbalance (null: room for any imbalance), or moe.capacity_factor with parallel.experts=capacity; "
    "metrics.jsonl has the share of each step"
)


class DroppedTokens(Observer):
    """Warns of the first step in which experts had no room for all choices."""

    def __init__(self, warn: Callable[[Problem], None]):
        self._warn = warn
        self._has_warned = False

    @classmethod
    def of_run(cls, run: ObservedRun) -> Self:
        """Returns the observer of a run."""
        return cls(run.warn)

    def step_reported(self, metrics: Metrics) -> None:
        """Warns if the step dropped something, once in a run."""
        shares = [value for name, value in metrics.auxiliary.items() if name.split("/")[1] == DROPPED]
        if self._has_warned or not any(share > 0 for share in shares):
            return
        self._has_warned = True
        what = f"{max(shares):.2%} of the choices of experts found no room and were dropped"
        self._warn(Problem(f"step {metrics.step}", what, FIX))
