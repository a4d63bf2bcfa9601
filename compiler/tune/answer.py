"""The answer of a search: the best candidates, why the first wins, what would change that, and why others are refused.

A search over variants (runtime/tune/variants.py) asks for the best that each can do on any mesh, by prices alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.errors import ConfigError, Problem
from ..core.format import human_bytes
from ..core.known import Unknown
from ..driver import plan_run
from ..estimate.estimate import estimate_step
from ..estimate.estimated_step import assume_overlap, overrides_of
from ..estimate.program_costs import Numbers
from ..figures import StepFigures, StepWork
from ..spec.overlap_spec import OverlapSpec
from ..spec.plan_spec import Objective, PlanSpec
from ..target.target import TargetPlan
from .families import Family, Key, Reference, TracePoint, family_key, find_families, group_candidates
from .price import Prices, price_candidates
from .space import MeshCandidate, Refused, Variant, find_candidates

MARGIN = 1.06  # prices of memory that are this much over the limit are looked at again, exactly
NUM_EXACT = 12  # best candidates that are estimated one by one, in a round
MOST_ROUNDS = 4  # of these, until enough candidates fit
# Values of variants that cannot run, above any step. The value grows with the memory of one that is too large.
TOO_LARGE, REFUSED = 1e15, 1e18


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """A candidate with an estimate of its own. figures: by it; they fit if they fit in the share of memory that a
    candidate may take. work: what its step does. cost: the price of a million tokens; None if a chip-hour has no price.
    overlap: the overlap of the estimated step."""

    candidate: MeshCandidate
    figures: StepFigures
    work: StepWork
    cost: float | None
    overlap: OverlapSpec

    @property
    def seconds(self) -> float:
        """Returns the time of the step, which every estimate of a search has."""
        assert not isinstance(self.figures.step_seconds, Unknown), "its time cannot be estimated"
        return self.figures.step_seconds

    @property
    def peak_bytes(self) -> int:
        assert not isinstance(self.figures.peak_bytes, Unknown), "an estimate has a peak"
        return self.figures.peak_bytes

    @property
    def compile_overrides(self) -> tuple[str, ...]:
        """Returns the overrides that compile what was estimated, without a search for another overlap."""
        return (*self.candidate.overrides, *overrides_of(self.overlap, self.candidate.variant.spec.overlap))


@dataclass(frozen=True)
class WhatIf:
    """The choice if one price were different. what: "twice the bandwidth of all links". before: the winner of the
    search. best: the winner by the other prices; None if nothing fits."""

    what: str
    before: MeshCandidate
    best: MeshCandidate | None
    seconds_before: float
    seconds: float | None

    @property
    def is_other(self) -> bool:
        return self.best is None or self.best.overrides != self.before.overrides


@dataclass(frozen=True)
class Answer:
    """The answer of a search. best: candidates that were estimated one by one, the best first. prices: those of all
    candidates that the rules allow. refused: the other candidates. limit_bytes: the memory of a device that a candidate
    may take. changes: what would change the choice."""

    target: TargetPlan
    best: tuple[Estimated, ...]
    prices: Prices
    refused: Refused
    limit_bytes: int
    changes: tuple[WhatIf, ...]

    @property
    def num_candidates(self) -> int:
        """Returns the number of candidates of the space."""
        return len(self.prices.candidates) + self.refused.total

    @property
    def num_too_large(self) -> int:
        """Returns the number of candidates that need, by their price, more memory than they may take."""
        return int((self.prices.peak_bytes > self.limit_bytes).sum())


@dataclass(frozen=True)
class Runner:
    """Maps functions over values, in several processes if the caller has them."""

    trace: Callable[[Callable[[TracePoint], Reference], Sequence[TracePoint]], Iterable[Reference]]
    estimate: Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]


def remembering(run: Runner) -> Runner:
    """Returns a runner that traces no point of a space twice."""
    known: dict[str, Reference] = {}

    def trace(function: Callable[[TracePoint], Reference], points: Sequence[TracePoint]) -> Iterable[Reference]:
        keys = [
            repr((one.variant.choices, one.sizes, one.num_microbatches, one.sequences_of_device, one.num_loss_chunks,
                  one.strategies))
            for one in points
        ]  # fmt: skip
        new = {key: point for key, point in zip(keys, points, strict=True) if key not in known}
        known.update(zip(new, run.trace(function, list(new.values())), strict=True))
        return [known[key] for key in keys]

    return replace(run, trace=trace)


def tune(variants: Sequence[Variant], run: Runner) -> Answer:
    """Returns the answer of a search over these variants of one declaration.

    Raises ConfigError if the target's figures are not known, or no candidate is left.
    """
    spec = variants[0].spec
    target = variants[0].target()
    limit = limit_of(variants[0])
    candidates, refused = find_candidates(variants)
    if not candidates:
        reason, count = refused.counts.most_common(1)[0] if refused.counts else ("the space is empty", 0)
        what = f"no candidate is left: {count:,} of {refused.total:,} are refused by {reason}"
        raise ConfigError([Problem("tune", what, "widen tune.groups or tune.mesh, or remove a pin")])
    families = find_families(group_candidates(candidates), run.trace)
    prices = price_candidates(candidates, families)
    best = _estimate_best(prices, limit, spec, run)
    if not best:
        raise ConfigError([_nothing_fits(prices, limit)])
    changes = find_changes(variants, prices, families, limit)
    return Answer(target, best, prices, refused, limit, changes)


def find_changes(
    variants: Sequence[Variant], prices: Prices, families: Mapping[Key, Family], limit: int
) -> tuple[WhatIf, ...]:
    """Returns the winners, by prices alone, with faster links, more memory, or half the batch."""
    spec = variants[0].spec
    objective = spec.tune.objective
    now = winner(prices, limit, objective)
    if now is None:
        return ()
    fast = price_candidates(prices.candidates, families, link_speed=2.0)
    worlds = [("links of twice the bandwidth", fast, limit), ("20 % more memory", prices, int(1.2 * limit))]
    if spec.global_batch_size % 2 == 0:
        halved = [
            Variant(one.choices, one.spec.model_copy(update={"global_batch_size": spec.global_batch_size // 2}))
            for one in variants
        ]
        known = [one for one in find_candidates(halved)[0] if family_key(one, families)]
        if known:
            worlds.append(("half the global batch", price_candidates(known, families), limit))
    before, seconds_before = prices.candidates[now], float(prices.time.seconds[now])

    def change(what: str, other: Prices, room: int) -> WhatIf:
        then = winner(other, room, objective)
        if then is None:
            return WhatIf(what, before, None, seconds_before, None)
        return WhatIf(what, before, other.candidates[then], seconds_before, float(other.time.seconds[then]))

    return tuple(change(*world) for world in worlds)


def winner(prices: Prices, limit: float, objective: Objective) -> int | None:
    """Returns the place of the best candidate whose price fits; None if none does."""
    fits = prices.peak_bytes <= limit
    if not fits.any():
        return None
    return int(np.argmin(np.where(fits, merit(prices, objective), np.inf)))


def limit_of(variant: Variant) -> int:
    """Returns the memory of a device that a candidate may take. Raises ConfigError if the target's is not known."""
    target = variant.target()
    memory = target.hbm_bytes_per_device
    if memory is None:
        what = f"nothing is known of the speed and the memory of {target.name}"
        raise ConfigError([Problem("target", what, "name chips, such as target=v5p-128 or target=h100-64")])
    return int(variant.spec.tune.max_memory_share * memory)


def _nothing_fits(prices: Prices, limit: int) -> Problem:
    least = int(np.argmin(prices.peak_bytes))
    number = len(prices.candidates)
    none = "the only candidate does not fit" if number == 1 else f"none of {number:,} candidates fits"
    what = f"{none} in {human_bytes(limit)}: {'it' if number == 1 else 'the smallest'} needs about "
    what += f"{human_bytes(int(prices.peak_bytes[least]))} ({' '.join(prices.candidates[least].overrides)})"
    return Problem("tune", what, "use more chips, a smaller batch or shorter sequences, or widen tune.groups.remat")


def merit(prices: Prices, objective: Objective) -> Numbers:
    """Returns the figure that the objective minimises."""
    return prices.peak_bytes if objective == "memory" else prices.time.seconds


def _estimate_best(prices: Prices, limit: int, spec: PlanSpec, run: Runner) -> tuple[Estimated, ...]:
    """Returns the best candidates that fit, with an estimate of each."""
    merits = np.where(prices.peak_bytes <= MARGIN * limit, merit(prices, spec.tune.objective), np.inf)
    order = [int(place) for place in np.argsort(merits, kind="stable") if np.isfinite(merits[place])]
    found: list[Estimated] = []
    for start in range(0, min(len(order), MOST_ROUNDS * NUM_EXACT), NUM_EXACT):
        ones = [prices.candidates[place] for place in order[start : start + NUM_EXACT]]
        exact = run.estimate(estimate_spec, [one.spec() for one in ones])
        estimated = [_estimated(one, each, limit) for one, each in zip(ones, exact, strict=True)]
        found += [one for one in estimated if one.figures.runs]
        if len(found) >= min(spec.tune.num_shown, NUM_EXACT):
            break
    is_memory = spec.tune.objective == "memory"
    found.sort(key=lambda one: one.peak_bytes if is_memory else one.seconds)
    return tuple(found[: spec.tune.num_shown])


@dataclass(frozen=True)
class Exact:
    """A declaration by its own estimate: its figures, the work of its step, and the overlap of the estimated step."""

    figures: StepFigures
    work: StepWork
    overlap: OverlapSpec


def estimate_spec(spec: PlanSpec) -> Exact:
    """Returns the estimate of one declaration, which takes a second and no devices."""
    plan = plan_run(spec)
    found = estimate_step(plan).figures
    if isinstance(found.step_seconds, Unknown):
        problem = Problem("model", f"its time cannot be estimated: {found.step_seconds.why}", "see `meshloom explain`")
        raise ConfigError([problem])
    return Exact(found, plan.work, assume_overlap(plan))


def _estimated(one: MeshCandidate, exact: Exact, limit: int) -> Estimated:
    target, figures = one.variant.target(), exact.figures
    assert figures.peak_bytes, "an estimate has a peak"
    limit *= target.used_devices_per_chip
    figures = figures.model_copy(update={"limit_bytes": limit, "fits": figures.peak_bytes <= limit}).rated(exact.work)
    cost = cost_per_million_tokens(one.variant.spec, target, figures.step_seconds or 0.0)
    return Estimated(candidate=one, figures=figures, work=exact.work, cost=cost, overlap=exact.overlap)


def cost_per_million_tokens(spec: PlanSpec, target: TargetPlan, seconds: float) -> float | None:
    """Returns what a million tokens cost, by the user's price of a chip-hour; None without one."""
    price = spec.tune.price_per_chip_hour.get(target.chip.name) if target.chip else None
    if price is None:
        return None
    return price * target.num_chips * seconds / 3600 / spec.tokens_per_step * 1e6


def value_of_variants(variants: Sequence[Variant], run: Runner) -> list[float]:
    """Returns the least value of each variant's objective over all meshes, in seconds or bytes. Raises ConfigError if
    the target's memory is not known."""
    limit = limit_of(variants[0])
    candidates, _ = find_candidates(variants)
    prices = price_candidates(candidates, find_families(group_candidates(candidates), run.trace))
    return [_value(variant, prices, limit) for variant in variants]


def _value(variant: Variant, prices: Prices, limit: int) -> float:
    own = np.array([one.variant is variant for one in prices.candidates], dtype=bool)
    if not own.any():
        return REFUSED
    peak = prices.peak_bytes[own]
    fits = peak <= limit
    if not fits.any():
        return TOO_LARGE * float(peak.min() / limit)
    return float(merit(prices, variant.spec.tune.objective)[own][fits].min())
