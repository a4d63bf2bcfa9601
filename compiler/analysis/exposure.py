"""`overlap.max_exposed`: the share of a step in which compute may wait for communication, and the finding if it waits
longer."""

import math
from collections.abc import Sequence

from ..core.format import human_seconds, human_share
from ..plan import Plan
from ..schema import CollectiveReport, Finding, StepReport, by_exposed, total

TOO_EXPOSED = "too-exposed"
NUM_WORST = 3


def find_too_exposed(
    plan: Plan, step: StepReport, collectives: Sequence[CollectiveReport], *, is_searched: bool = False
) -> Finding | None:
    """Returns the finding; None if there is no limit, or the schedule meets it. An unknown exposure does not meet it.

    is_searched: the step is the best of `overlap.search`."""
    limit, share = plan.spec.overlap.max_exposed, step.exposed_fraction
    if limit is None:
        return None
    if share is None or None in [each.exposed_seconds for each in collectives]:
        what = f"overlap.max_exposed allows {human_share(limit)} of the step, and the exposed time is not known"
        fix = "see why below `unknown` in report.json; choose another target, or set overlap.max_exposed=null"
        return Finding(rule=TOO_EXPOSED, severity="warning", what=what, where="step.exposed_fraction", fix=fix)
    if share <= limit:
        return None
    worst = by_exposed(collectives)[:NUM_WORST]
    named = [f"{each.kind} of {each.source}, {human_seconds(each.exposed_seconds or 0.0)}" for each in worst]
    return Finding(
        rule=TOO_EXPOSED,
        severity="warning",
        what=f"{human_share(share)} of the step is exposed, and overlap.max_exposed allows {human_share(limit)}",
        where="; ".join(named),
        fix=_fix(plan, step, collectives, limit, is_searched),
    )


def least_batch(
    plan: Plan, compute_seconds: float, collectives: Sequence[CollectiveReport], limit: float
) -> int | None:
    """Returns the smallest global batch at which compute could hide the busiest link; None if there is none.

    Collectives of weights and gradients do not depend on the batch; compute and those of activations grow with it.
    """
    paths = [array.array.path for array in plan.sharding.parameters]
    factors = [1.0]
    for kind in dict.fromkeys(each.link for each in collectives):
        on_link = [each for each in collectives if each.link == kind and each.alone_seconds is not None]
        fixed = sum(each.alone_seconds or 0.0 for each in on_link if any(path in each.source for path in paths))
        growing = sum(each.alone_seconds or 0.0 for each in on_link) - fixed
        # fixed + f growing <= f compute + what may be exposed of the step, f compute / (1 - limit) long
        room = compute_seconds / (1 - limit) - growing
        if fixed and room <= 0:
            return None
        factors.append(fixed / room if fixed else 1.0)
    shards = plan.mesh.num_shards(plan.roles.tokens) * plan.spec.num_microbatches
    return math.ceil(max(factors) * plan.spec.global_batch_size / shards) * shards


def _fix(plan: Plan, step: StepReport, collectives: Sequence[CollectiveReport], limit: float, is_searched: bool) -> str:
    compute, alone = step.compute_seconds or 0.0, total(each.alone_seconds for each in collectives)
    batch = least_batch(plan, compute, collectives, limit)
    takes = f"communication takes {human_seconds(alone or 0.0)} by itself and compute {human_seconds(compute)}"
    if batch is None:
        return f"{takes}: no schedule hides it at any batch; shard over fewer devices, or along faster links"
    if batch > plan.spec.global_batch_size:
        return f"{takes}: no schedule hides it; global_batch_size={batch} could"
    choice = "a larger overlap.search.max_candidates, or other compiler_options" if is_searched else "overlap=auto"
    return f"{takes}: a better schedule could hide it; try {choice}"
