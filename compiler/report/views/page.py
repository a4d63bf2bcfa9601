"""Renders `report.html`, one page that needs nothing else, and the HTML that notebooks show.

The report is embedded as JSON. Scripts and styles are our own, written into the page; its policy allows these by their
hash and nothing else, from nowhere, so text from a config can do nothing there.
"""

import base64
import hashlib
import math
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jinja2
import yaml

from ...core.format import (
    counted,
    human_bytes,
    human_count,
    human_names,
    human_parameters,
    human_range,
    human_seconds,
    human_share,
    human_slowdown,
)
from ...core.known import Unknown, text_of
from ...estimate.estimate import StepEstimate
from ...estimate.roofline import least_step_seconds, roofline_seconds
from ...figures import text_of_figure
from ...plan import Plan
from ...schema import CollectiveReport, Event, Report, by_exposed, or_infinity
from ...sharding.rules import ArrayPlan, rules_as_text
from ...spec.step_spec import StepSpec
from ...xla.schedule.stage_clocks import SHOWN_STAGES, middle
from . import charts
from .facts import lines_of_rest, sums, unknown_values, verdict, why_exposed
from .pictures import PIPELINE_STYLE, mesh_picture, pipeline_picture
from .timeline import by_stage, hidden_behind, lay_out, layer_views, left_out

NUM_EVENTS = 4000  # the longest events; timeline.json has all
FOLDED_ROWS = 24  # a longer table of arrays is closed at first
TOO_SMALL = "it is zero, or too small to be shown"


def render_page(
    report: Report, events: Sequence[Event], plan: Plan | None = None, measured: Mapping[str, Any] | None = None
) -> str:
    """Returns the whole page as text. plan: None for a program without a declaration; then the page has neither arrays
    nor config. measured: what the page shows of a profile of the program (`measured_part`), if there is one."""
    reasons = list(dict.fromkeys(reason for _, reason in unknown_values(report)))
    numbers = {reason: number for number, reason in enumerate(reasons, start=1)}

    def unknown(value: Unknown | str | float) -> dict[str, Any]:
        """Returns the text in place of an unknown value, or of one that is unknown for this reason. A number is known,
        and too small to be shown."""
        reason = value.why if isinstance(value, Unknown) else value if isinstance(value, str) else TOO_SMALL
        return {"reason": reason, "number": numbers.get(reason)}

    shown = measured["timeline"] if measured else None
    if not shown or not shown["rows"]:  # a table of operations has no times of day
        shown = compact_timeline(*by_stage(events))
    environment = template_environment()
    script, style = (template_source(environment, name) for name in ("page.js", "page.css"))
    num_stages = report.pipeline.num_stages if report.pipeline else 0
    pipeline, unseen = _pipeline(plan, has_style=False) if plan else None, middle(num_stages, SHOWN_STAGES)
    if pipeline:
        style += PIPELINE_STYLE
    is_staged, missing = any(event.stage is not None for event in events), left_out(events)
    return environment.get_template("report.html.jinja").render(
        report=report,
        title=f"{report.program.model} on {report.target.name}",
        mesh=str(plan.mesh) if plan else None,
        command=shlex.join(["meshloom", "compile", *report.overrides]),
        check=shlex.join(["meshloom", "check", *report.overrides]) if plan else None,
        verdict=verdict(report),
        memory=charts.memory_bar(report),
        step=charts.step_bar(report),
        communication=charts.communication_bar(report),
        pipeline=pipeline,
        measured=measured,
        timeline=shown,
        stages=(f"each stage but {missing[0]} to {missing[-1]}" if missing else "each stage") if is_staged else None,
        left_out=unseen,
        shown_stages=[stage for stage in range(num_stages) if stage not in unseen],
        collectives=collective_groups(report),
        roofline=charts.roofline_plot(report),
        search=_search(report),
        search_rest=tuple(lines_of_rest(report.search)) if report.search else (),
        alternatives=_alternatives(report),
        findings=sorted(report.findings, key=lambda finding: finding.severity != "warning"),
        tables=array_tables(plan) if plan else [],
        picture=mesh_picture(plan.mesh.placement) if plan else None,
        config=_config(plan.spec) if plan else [],
        notes=reasons,
        unknown=unknown,
        report_json=report.model_dump(mode="json", exclude={"collectives": {"__all__": {"origin"}}}),  # it has the text
        script=script,
        style=style,
        script_hash=policy_hash(script),
        style_hash=policy_hash(style),
    )


def compact_timeline(*timelines: Sequence[Event]) -> dict[str, Any]:
    """Returns events as rows of numbers, with each text once: [lane, start ns, ns, name, instruction, kind, arguments,
    hidden ns or -1, bytes of memory or -1]; and the views that the page shows at first. Several timelines share only
    the time axis; they are opened on the whole step."""
    laid_out = [lay_out(events) for events in timelines]
    slices = [s for each in laid_out for s in each]
    kept = sorted(range(len(slices)), key=lambda i: slices[i].start_ns - slices[i].end_ns)[:NUM_EVENTS]
    hidden = [by for each in laid_out for by in hidden_behind(each)]
    texts: dict[str, dict[str, int]] = {"lanes": {}, "names": {}, "hlo": {}, "kinds": {}, "arguments": {}}

    def number(table: str, text: str) -> int:
        return texts[table].setdefault(text, len(texts[table]))

    rows = []
    for index in sorted(kept):
        s, by = slices[index], hidden[index]
        arguments = dict(s.event.arguments)
        if by and by.behind:
            arguments["hidden behind"] = human_names(list(dict.fromkeys(s.event.name for s in by.behind)), most=3)
        told = " · ".join(f"{key} {f'{v:,}' if isinstance(v, int) else v}" for key, v in arguments.items())
        lane = s.lane if s.event.stage is None else f"stage {s.event.stage} {s.lane}"
        rows.append([number("lanes", lane), s.start_ns, s.end_ns - s.start_ns, number("names", s.event.name),
                     number("hlo", s.event.instruction or s.event.name), number("kinds", s.event.kind),
                     number("arguments", told), by.hidden_ns if by else -1,
                     -1 if s.event.live_bytes is None else s.event.live_bytes])  # fmt: skip
    views = layer_views(timelines[0]) if len(timelines) == 1 else ()
    shown = [{"name": view.name, "from": view.start_ns, "to": view.end_ns} for view in views]
    return {name: list(table) for name, table in texts.items()} | {
        "rows": rows, "num_events": len(slices), "views": shown,
    }  # fmt: skip


def _search(report: Report) -> list[dict[str, Any]]:
    """Returns the compiled programs of a search, the shortest step first, with bars on one scale; empty if there was no
    search."""
    tried = report.search.tried if report.search else ()
    longest = max((one.figures.step_seconds or 0 for one in tried), default=0) or 1
    rows = []
    for place, one in enumerate(tried):
        width = 100 * (one.figures.step_seconds or 0) / longest
        exposed = width * (one.figures.exposed_fraction or 0)
        is_chosen = report.search is not None and place == report.search.chosen
        rows.append({"tried": one, "name": one.name, "is_chosen": is_chosen, "compute_width": width - exposed,
                     "exposed_width": exposed})  # fmt: skip
    return sorted(rows, key=lambda row: (not row["is_chosen"], row["tried"].figures.step_seconds or math.inf))


def _alternatives(report: Report) -> list[dict[str, Any]]:
    """Returns the declared step and others, with bars on one scale for steps and one for memory."""
    shown = [
        (one, one.figures.step_seconds or 0.0, one.figures.exposed_seconds or 0.0, one.figures.peak_bytes or 0)
        for one in report.alternatives
    ]
    longest = max((seconds for _, seconds, _, _ in shown), default=0) or 1
    limit = report.compiled.limit_bytes or 0
    most = max((limit, *(count for *_, count in shown))) or 1
    return [
        {
            "one": one,
            "name": shlex.join(one.overrides) or "as declared",
            "compute_width": 100 * max(0.0, seconds - exposed) / longest,
            "exposed_width": 100 * min(seconds, exposed) / longest,
            "memory_width": 100 * count / most,
            "limit_place": 100 * limit / most if limit else None,
        }
        for one, seconds, exposed, count in shown
    ]


def collective_groups(report: Report) -> list[dict[str, Any]]:
    """Returns collectives by kind, mesh axes, link and pass, the most exposed first. The bars of groups and those of
    places each have their own scale."""
    groups: dict[tuple[Any, ...], list[CollectiveReport]] = {}
    for c in by_exposed(report.collectives):
        groups.setdefault((c.kind, c.mesh_axes, c.link, c.origin.in_pass), []).append(c)
    summed = [(in_pass, found, sums(found)[0]) for (*_, in_pass), found in groups.items()]
    summed.sort(key=lambda group: (-or_infinity(group[2].exposed_seconds), -group[2].bytes))
    longest = max((group.alone_seconds or 0 for *_, group in summed), default=0) or 1
    longest_place = max((c.alone_seconds or 0 for c in report.collectives), default=0) or 1
    return [
        {
            "title": in_pass or "all",
            "sum": group,
            "rows": [_collective(c, longest_place) for c in found],
            "hidden_width": 100 * (group.hidden_seconds or 0) / longest,
            "exposed_width": 100 * (group.exposed_seconds or 0) / longest,
        }
        for in_pass, found, group in summed
    ]


def _collective(c: CollectiveReport, longest: float) -> dict[str, Any]:
    return {
        "c": c,
        "axes": " + ".join(c.mesh_axes),
        "why": why_exposed(c),
        "hidden_width": 100 * (c.hidden_seconds or 0) / longest,
        "exposed_width": 100 * (c.exposed_seconds or 0) / longest,
        "search": " ".join((c.kind, *c.mesh_axes, c.link, c.source, c.line, c.where, c.name, c.form)).lower(),
    }


def array_tables(plan: Plan) -> list[dict[str, Any]]:
    """Returns the arrays of the plan, a table for each kind."""
    tables = (("parameters", plan.sharding.parameters), ("optimizer state", plan.optimizer_state),
              ("activations of one microbatch", plan.sharding.activations))  # fmt: skip
    rules = plan.spec.sharding
    of_tables = (rules.parameters, rules.optimizer, rules.activations)
    return [
        {
            "name": name,
            "rules": rules_as_text(used),
            "rows": [_array(array) for array in arrays],
            "bytes": human_bytes(sum(array.bytes_per_device for array in arrays)),
            "is_open": name == "parameters" and len(arrays) <= FOLDED_ROWS,
        }
        for (name, arrays), used in zip(tables, of_tables, strict=True)
    ]


def _array(plan: ArrayPlan) -> dict[str, Any]:
    return {
        "path": plan.array.path,
        "dtype": plan.array.dtype,
        "dimensions": [(d.logical or "", d.size, d.axes) for d in plan.dimensions],
        "reason": plan.reason,
        "bytes": plan.bytes_per_device,
        "is_whole": not any(d.axes for d in plan.dimensions),
    }


def _pipeline(plan: Plan, *, has_style: bool) -> dict[str, Any] | None:
    """Returns how the pipeline of a plan runs, in words and as a picture; None without one."""
    if plan.pipeline is None:
        return None
    time = plan.pipeline.time if plan.target.peak_flops_per_second else None
    picture = pipeline_picture(plan.pipeline.table, time, has_style=has_style)
    return {"how": plan.pipeline.how, "picture": picture, "is_timed": time is not None}


def _config(spec: StepSpec) -> list[tuple[str, str]]:
    """Returns the declaration by group, as YAML; single keys come together, first."""
    written = spec.as_written()
    single = {key: value for key, value in written.items() if not isinstance(value, dict)}
    groups = {"keys": single} | {key: value for key, value in written.items() if isinstance(value, dict)}
    return [(name, yaml.safe_dump(value, sort_keys=False)) for name, value in groups.items()]


@cache
def template_environment() -> jinja2.Environment:
    """Returns the environment of all templates, which escape every value."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("meshloom.compiler.report.views"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "separators": (",", ":"), "allow_nan": False}
    environment.filters |= {
        "counted": counted,
        "human_bytes": human_bytes,
        "human_seconds": human_seconds,
        "human_share": human_share,
        "human_slowdown": human_slowdown,
        "human_count": human_count,
        "human_parameters": human_parameters,
        "percent": lambda value: f"{value:.3f}%",
    }
    environment.tests["unknown"] = lambda value: isinstance(value, Unknown)
    return environment


def template_source(environment: jinja2.Environment, name: str) -> str:
    """Returns the text of a style or a script for a page."""
    assert environment.loader
    return environment.loader.get_source(environment, name)[0]


def policy_hash(text: str) -> str:
    """Returns the hash by which a Content-Security-Policy allows a text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def plan_table(plan: Plan, estimate: StepEstimate) -> str:
    """Returns the facts of a plan, its warnings and its arrays with reasons, as HTML tables for a notebook."""
    template = template_environment().get_template("plan.html.jinja")
    pipeline = _pipeline(plan, has_style=True)
    return template.render(
        facts=_facts(plan, estimate), pipeline=pipeline, warnings=plan.warnings, tables=array_tables(plan)
    )


def page_in_frame(page: str, title: str) -> str:
    """Returns a whole page as a frame of another page, which it cannot act on."""
    return template_environment().get_template("frame.html.jinja").render(page=page, title=title)


def _facts(plan: Plan, estimate: StepEstimate) -> list[tuple[str, str]]:
    spec, figures = plan.spec, estimate.figures
    roofline, least = roofline_seconds(estimate.roofline), least_step_seconds(plan)
    limit = "limit unknown" if isinstance(figures.fits, Unknown) else "fits" if figures.fits else "does not fit"
    limit += f" in {human_bytes(figures.limit_bytes)}" if figures.limit_bytes else ""
    between = text_of(figures.range_of(figures.step_seconds), lambda ends: f" ({human_range(ends)})", "")
    count, why = plan.model_flops_per_step, plan.model_flops.why_unknown
    flops = f"FLOPs unknown: {why}" if count is None else human_count(count, "FLOPs")
    return [
        ("mesh", f"{plan.mesh}, {counted(plan.target.num_devices, 'device')} of target {plan.target.name}"),
        ("model", f"{human_parameters(plan.num_parameters)} parameters"),
        ("step", f"{counted(spec.tokens_per_step, 'token')}, {flops}"),
        ("estimated step", f"{text_of_figure(figures, 'step_seconds')}{between}"),
        ("MFU", text_of_figure(figures, "mfu")),
        ("exposed communication", text_of_figure(figures, "exposed_fraction")),
        ("memory, estimated", f"{text_of_figure(figures, 'peak_bytes')} per chip, {limit}"),
        ("roofline of this program", text_of(roofline, human_seconds)),
        ("no program takes less than", text_of(least, lambda seconds: f"{human_seconds(seconds)} a step")),
    ]
