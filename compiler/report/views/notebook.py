"""A plan and a report as a notebook shows them: HTML that is part of another page."""

from ...core.format import counted, human_bytes, human_count, human_parameters, human_seconds
from ...estimate.bound import least_step_seconds
from ...estimate.estimate import StepEstimate
from ...estimate.roofline import roofline_seconds
from ...plan import Plan
from .page import array_tables, template_environment


def plan_table(plan: Plan, estimate: StepEstimate) -> str:
    """Returns the facts of a plan, its warnings and its arrays with reasons, as tables."""
    template = template_environment().get_template("plan.html.jinja")
    return template.render(facts=_facts(plan, estimate), warnings=plan.warnings, tables=array_tables(plan))


def page_in_frame(page: str, title: str) -> str:
    """Returns a whole page as a frame of another one, which it can do nothing to."""
    return template_environment().get_template("frame.html.jinja").render(page=page, title=title)


def _facts(plan: Plan, estimate: StepEstimate) -> list[tuple[str, str]]:
    spec, memory = plan.spec, estimate.memory
    roofline, least = roofline_seconds(estimate.roofline), least_step_seconds(plan)
    verdict = {True: "fits", False: "does not fit", None: "limit unknown"}[memory.fits]
    limit = f", {verdict} in {human_bytes(memory.limit_bytes)}" if memory.limit_bytes else f", {verdict}"
    return [
        ("mesh", f"{plan.mesh}, {counted(plan.target.num_devices, 'device')} of target {plan.target.name}"),
        ("model", f"{human_parameters(plan.num_parameters)} parameters"),
        ("step", f"{counted(spec.tokens_per_step, 'token')}, {_flops(plan)}"),
        ("memory, estimated", f"{human_bytes(memory.peak_bytes)} per device{limit}"),
        ("roofline of this program", "unknown" if roofline is None else human_seconds(roofline)),
        ("no program takes less than", "unknown" if least is None else f"{human_seconds(least)} a step"),
    ]


def _flops(plan: Plan) -> str:
    flops = plan.model_flops_per_step
    return f"FLOPs unknown: {plan.model_flops.why_unknown}" if flops is None else human_count(flops, "FLOPs")
