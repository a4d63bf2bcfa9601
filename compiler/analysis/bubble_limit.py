"""Judges the bubble of a compiled pipeline: the share of the step that its stages wait for each other."""

from ..core.format import human_seconds, human_share
from ..core.known import Unknown
from ..plan import Plan
from ..schema import Finding, StepReport

TOO_MUCH_BUBBLE = "too-much-bubble"


def find_too_much_bubble(plan: Plan, step: StepReport) -> Finding | None:
    """Returns the finding that stages wait longer than `pipeline.max_bubble` allows; None without a limit or without
    stages, or if the schedule meets it. An unknown bubble does not meet it."""
    limit, share = plan.spec.pipeline.max_bubble, step.bubble_fraction
    if limit is None or plan.pipeline is None:
        return None
    allowed = f"pipeline.max_bubble allows {human_share(limit)} of the step"
    where = "step.bubble_fraction"
    if isinstance(share, Unknown):
        fix = "see the reason in `unknown` of report.json; choose another target, or set pipeline.max_bubble=null"
        what = f"{allowed}, and the bubble is not known"
        return Finding(rule=TOO_MUCH_BUBBLE, severity="warning", what=what, where=where, fix=fix)
    if share <= limit:
        return None
    table = plan.pipeline.table
    waits = human_seconds(step.bubble_seconds or 0.0)
    what = f"stages wait {human_share(share)} of the step for each other, {waits} of {table.name}, and {allowed}"
    fix = f"use more than num_microbatches={table.num_microbatches}, fewer stages, or another schedule: pipeline=zb_h1"
    if table.name.startswith(("zb", "dualpipe")):
        fix = f"use more than num_microbatches={table.num_microbatches}, or fewer stages"
    return Finding(rule=TOO_MUCH_BUBBLE, severity="warning", what=what, where=where, fix=fix)
