"""Evaluates candidates. All searches share both types; they differ in how they generate candidates.

alternatives.py   other remat policies, shardings and overlaps        by the estimate
                  changes that save memory, to make a step fit        by the estimate
overlap.py        loops over layers, strategies and flag presets      by the compiled schedule
../tune/space.py  meshes, microbatches and options of groups          by prices, the best by the estimate
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..analysis.compiled_step import CompiledStep
from ..core.errors import ConfigError
from ..core.known import Unknown, known
from ..core.partition_spec import Axes
from ..estimate.estimate import StepEstimate, estimate_step
from ..plan import Plan

Replan = Callable[[tuple[str, ...]], Plan]  # the plan with these additional overrides; raises ConfigError


@dataclass(frozen=True)
class Candidate:
    """A declaration that a search tries. overrides: the overrides of the searched declaration that lead to it; () for
    that declaration itself. cost: in words, its cost besides the figures of its evaluation."""

    overrides: tuple[str, ...]
    cost: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Evaluation:
    """A candidate's step, as its estimate or its schedule predicts it, in seconds and in bytes per device. None:
    unknown.

    bubble_seconds: what the stages of a pipeline wait for each other; 0 without one.
    exposed: seconds by the mesh axes of the collectives, if they are told apart. fits: whether it fits in the device's
    memory. host_fits: whether it fits in the device's share of the host's memory. why_not: the reason why nothing is
    known.
    """

    seconds: float | None
    compute_seconds: float | None
    exposed_seconds: float | None
    peak_bytes: int | None
    host_bytes: int | None
    fits: bool | None
    host_fits: bool | None
    exposed: Mapping[Axes, float] = field(default_factory=dict)
    why_not: str | None = None
    bubble_seconds: float | None = 0.0

    @property
    def exposed_fraction(self) -> float | None:
        """Returns the exposed fraction of the step."""
        if self.seconds is None or self.exposed_seconds is None:
            return None
        return self.exposed_seconds / self.seconds if self.seconds else 0.0

    @property
    def runs(self) -> bool | None:
        """Returns whether the step fits in both memories."""
        return False if self.host_fits is False else self.fits


def unknown(why: str) -> Evaluation:
    """Returns an evaluation without figures, such as that of a candidate that the compiler refused."""
    return Evaluation(None, None, None, None, None, None, None, why_not=why, bubble_seconds=None)


def evaluate_plan(plan: Plan) -> Evaluation:
    """Returns the evaluation of a plan by its estimate, without a compiler."""
    return evaluate_estimate(estimate_step(plan))


def evaluate_estimate(estimate: StepEstimate) -> Evaluation:
    """Returns the evaluation of a plan that has been estimated."""
    memory, time = estimate.memory, estimate.time
    return Evaluation(
        seconds=time and time.seconds,
        compute_seconds=time and time.compute_seconds,
        exposed_seconds=time and time.exposed_seconds,
        peak_bytes=memory.peak_bytes,
        host_bytes=memory.host_bytes,
        fits=memory.fits,
        host_fits=memory.host_fits,
        exposed=dict(time.exposed) if time else {},
        bubble_seconds=time and time.bubble_seconds,
        why_not=None if time else str(estimate.why_uncounted),
    )


def evaluate_allowed(one: Candidate, replan: Replan) -> tuple[Plan, Evaluation] | None:
    """Returns the plan of a candidate and its evaluation; None if the declaration does not allow it."""
    try:
        plan = replan(one.overrides)
        return plan, evaluate_plan(plan)
    except ConfigError:
        return None


def evaluate_step(step: CompiledStep) -> Evaluation:
    """Returns the evaluation of a compiled step by its schedule."""
    schedule = step.schedule
    figures = None if isinstance(schedule, Unknown) else schedule.step
    return Evaluation(
        seconds=figures and known(figures.predicted_seconds),
        compute_seconds=figures and known(figures.compute_seconds),
        exposed_seconds=figures and known(figures.exposed_seconds),
        peak_bytes=step.needed_bytes,
        host_bytes=step.host_bytes,
        fits=step.fits,
        host_fits=step.fits_host,
        bubble_seconds=figures and known(figures.bubble_seconds),
        why_not=schedule.why if isinstance(schedule, Unknown) else None,
    )
