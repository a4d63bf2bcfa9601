"""The candidates of searches, which all have the same figures; searches differ in how they generate candidates.

alternatives.py   other remat policies, shardings and overlaps        by the estimate
                  changes that save memory, to make a step fit        by the estimate
overlap.py        loops over layers, strategies and flag presets      by the compiled schedule
../tune/space.py  meshes, microbatches and options of groups          by prices, the best by the estimate
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.errors import ConfigError
from ..estimate.estimate import estimate_step
from ..figures import StepFigures
from ..plan import Plan

Replan = Callable[[tuple[str, ...]], Plan]  # the plan with these additional overrides; raises ConfigError


@dataclass(frozen=True)
class Candidate:
    """A declaration that a search tries. overrides: the overrides of the searched declaration that lead to it; () for
    that declaration itself. cost: in words, its cost besides the figures of its evaluation."""

    overrides: tuple[str, ...]
    cost: str = field(default="", kw_only=True)


def estimate_allowed(one: Candidate, replan: Replan) -> tuple[Plan, StepFigures] | None:
    """Returns the plan of a candidate and its estimated figures; None if the declaration does not allow it."""
    try:
        plan = replan(one.overrides)
        return plan, estimate_step(plan).figures
    except ConfigError:
        return None
