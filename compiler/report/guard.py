"""Judges a step by an earlier one, as a pull request by its base: slower, larger, with other communication?

    base   64 all-gathers over fsdp of layers/mlp/up_EM, asynchronous; step 181 ms, 0.4 ms of it exposed
    step   the same, synchronous; 197 ms, 16 ms exposed
    ->     slower         step 181 ms -> 197 ms, +8.8 %, 2 % tolerated
           more-exposed   8.6 % of the base's step, 1 % tolerated
           lost-async     all-gather over fsdp of layers/mlp/up_EM, forward

What differs comes from diff.py. Here is only what of it is worse, and by how much more than is tolerated. A step that
was only estimated has no collectives and no findings; then figures alone are judged.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, get_args

from meshloom.models.record import Record

from ..analysis.program_text import LEAST_BYTES
from ..core.errors import Problem, use_one_of
from ..core.format import counted, human_bytes, human_names, human_seconds, human_share, signed_share
from ..core.known import why_unknown
from ..figures import FIGURES
from ..schema import FALLBACK, LINT_RULES, Report
from ..spec.calibration_spec import Calibration
from .diff import Difference, Leaf, Run, diff_runs, pair_findings, paths_of

GUARD_VERSION = 1
LEAST_PART = 0.02  # the share of the base's step from which a kind of compute is judged by itself
LAYOUT = ("mesh.", "sharding.")  # keys whose change is to have other collectives: their bytes and times are judged
NO_REPORT = "only estimates are compared: collectives and findings are those of a compiled program"
GuardRule = Literal["slower", "slower-part", "more-exposed", "more-memory", "more-traffic", "does-not-fit", "unknown",
               "lost-async", "new-collective", "more-collectives"]  # fmt: skip


RULES = (*get_args(GuardRule), *LINT_RULES)


def problems_of_rules(names: Iterable[str], where: str) -> Iterator[Problem]:
    """Yields a problem for each name that no rule of the guard or the lint has."""
    for name in names:
        if name not in RULES and not name.endswith(FALLBACK):
            yield Problem(where, f"there is no rule '{name}'", use_one_of(name, RULES))


@dataclass(frozen=True)
class Tolerances:
    """The largest increases that are accepted, as fractions. slower: of the step. part: of the time of one kind of
    compute. exposed: of exposed time, as a fraction of the base's step. memory: of the peak. traffic: of the bytes of
    all collectives. allowed: rules, of the guard and of the lint, that are named and accepted."""

    slower: float = 0.02
    part: float = 0.1
    exposed: float = 0.01
    memory: float = 0.01
    traffic: float = 0.01
    allowed: frozenset[str] = frozenset()


class Check(Record):
    """A figure before and after. change: by which fraction it grew, of the base; of exposed time, of the base's step.
    None: not known, or the base has nothing. is_worse: more than is tolerated."""

    rule: str
    what: str  # "step", "exposed time", "compute: attention"
    unit: Literal["seconds", "bytes"]
    base: float | None
    head: float | None
    change: float | None
    tolerated: float
    is_worse: bool


class Concern(Record):
    """Something that the base does not have. rule: of the guard, or of the lint. is_worse: it is not accepted."""

    rule: str
    what: str
    fix: str
    is_worse: bool


class Verdict(Record):
    """The judgement of a step by its base. differences: of the two declarations, "mesh.fsdp: 8 -> 4". notes: what
    else to know, such as other versions of the compiler."""

    schema_version: Literal[1] = GUARD_VERSION
    base: str
    head: str
    program: str  # "llama2_7b (num_layers=4) on v5e-16"
    is_worse: bool
    is_estimated: bool
    checks: tuple[Check, ...]
    concerns: tuple[Concern, ...]
    differences: tuple[str, ...]
    notes: tuple[str, ...]


def problems_of_base(base: Run, head: Run) -> Iterator[Problem]:
    """Yields the ways in which two steps do not do the same work, so that one says nothing about the other."""
    before, after = _work(base), _work(head)
    different = [
        f"{name} {_plain(before[name])} there, {_plain(after[name])} here"
        for name in before
        if None not in (before[name], after.get(name)) and before[name] != after[name]
    ]
    if different:
        fix = "give the artifact of the same model, batch and target, or compare all the same with --across"
        yield Problem(base.name, f"is of another declaration than {head.name}: {'; '.join(different)}", fix)
    there, here = _calibration(base), _calibration(head)
    if there != here:
        what = f"is predicted with another calibration than {head.name}: {there or 'none'} there, {here or 'none'} here"
        fix = "predict both with the same, as by calibration=none, or compare all the same with --across"
        yield Problem(base.name, what, fix)


def judge(base: Run, head: Run, tolerances: Tolerances) -> Verdict:
    """Returns the judgement of a step, by the compiled programs if both runs have one, else by the estimates."""
    found = diff_runs(base, head)
    checks = list(_checks(base, head, tolerances))
    concerns = [*_fits(_figures(base), _figures(head))]
    if base.report and head.report:
        is_layout = any(change.where.startswith(LAYOUT) for change in found.sections["config"])
        grown = set[str]() if is_layout else _grown(base.report, head.report)
        concerns += [each for change in found.sections["collectives"] for each in _collective(change, grown)]
        concerns += _new_findings(base.report, head.report, paths_of(base, head))
    concerns += _unknown(checks)
    judged = [each.model_copy(update={"is_worse": False}) if each.rule in tolerances.allowed else each
              for each in (*checks, *concerns)]  # fmt: skip
    return Verdict(
        base=base.name,
        head=head.name,
        program=_name(head),
        is_worse=any(each.is_worse for each in judged),
        is_estimated=not (base.report and head.report),
        checks=tuple(each for each in judged if isinstance(each, Check)),
        concerns=tuple(each for each in judged if isinstance(each, Concern)),
        differences=tuple(_declared(found.sections["config"])) if base.spec and head.spec else (),
        notes=tuple(_notes(base, head)),
    )


def _work(run: Run) -> dict[str, Any]:
    """Returns what two runs have to share to be compared; None for what is not known."""
    report, plan = run.report, run.plan
    if report:
        target, program = report.target.model_dump(mode="json"), report.program.model_dump(mode="json")
    else:
        target, program = plan["target"], plan["program"]
    return {
        "target": target["name"],
        "chips": target["num_chips"],
        "slices": target["num_slices"],
        "model": program.get("model"),
        "parameters": program["num_parameters"],
        "tokens per step": program["tokens_per_step"],
        "sequence_length": run.spec.get("sequence_length"),
    }


def _model_flops(run: Run) -> int | None:
    """Returns the FLOPs of the model in a step, without recomputation; None if they are not known. A change of the
    model's code changes them, and is judged by the time that it costs."""
    program = run.report.program.model_dump(mode="json") if run.report else run.plan["program"]
    return program["model_flops_per_step"]


def _calibration(run: Run) -> str:
    """Returns what a run's prediction is calibrated by; empty if by nothing."""
    if run.report:
        return run.report.target.calibration
    found = run.plan["target"].get("calibration")
    return Calibration.model_validate(found).describe() if found else ""


def _name(run: Run) -> str:
    if run.report:
        return f"{run.report.program.model} on {run.report.target.name}"
    model = run.spec.get("model")
    family = f"{model['family']} on " if isinstance(model, Mapping) and "family" in model else ""
    return f"{family}{run.plan['target']['name']}"


def _figures(run: Run) -> Mapping[str, Any]:
    """Returns the figures of the compiled step, or else of its estimate."""
    return run.report.compiled.model_dump(mode="json") if run.report else run.plan["estimated"]


def _checks(base: Run, head: Run, tolerances: Tolerances) -> Iterator[Check]:
    was, now = _figures(base), _figures(head)
    step = "step_seconds"
    if was[step] is None and now[step] is None and was.get("least_seconds") is not None:
        step = "least_seconds"  # the sum of all parts whose time is known
    of_step = was[step]
    named = FIGURES["step_seconds"].heading if step == "step_seconds" else "step, at least"
    yield _check("slower", named, "seconds", was[step], now[step], tolerances.slower)
    yield _check("more-exposed", "exposed time", "seconds", was["exposed_seconds"], now["exposed_seconds"],
                 tolerances.exposed, of_step)  # fmt: skip
    yield _check("more-memory", "memory", "bytes", was["peak_bytes"], now["peak_bytes"], tolerances.memory)
    if was["host_bytes"] or now["host_bytes"]:
        yield _check("more-memory", "host memory", "bytes", was["host_bytes"], now["host_bytes"], tolerances.memory)
    if base.report and head.report:
        before, after = (sum(each.bytes for each in report.collectives) for report in (base.report, head.report))
        yield _check("more-traffic", "sent by collectives", "bytes", before, after, tolerances.traffic)
    kinds = [figures.get("compute_seconds_by_kind", {}) for figures in (was, now)]
    for kind in sorted({*kinds[0], *kinds[1]}):
        before, after = (of.get(kind, 0.0) for of in kinds)
        if of_step and max(before, after) >= LEAST_PART * of_step:
            yield _check("slower-part", f"compute: {kind}", "seconds", before, after, tolerances.part)


def _check(
    rule: GuardRule,
    what: str,
    unit: Literal["seconds", "bytes"],
    base: float | None,
    head: float | None,
    tolerated: float,
    whole: float | None = None,
) -> Check:
    """Returns the check of a figure. whole: what its growth is a fraction of; None: of its own value before."""
    change, is_worse = None, False
    if base is not None and head is not None:
        of = base if whole is None else whole
        change = (head - base) / of if of else None
        is_worse = head > base if change is None else change > tolerated
    return Check(rule=rule, what=what, unit=unit, base=base, head=head, change=change, tolerated=tolerated,
                 is_worse=is_worse)  # fmt: skip


def _unknown(checks: Sequence[Check]) -> Iterator[Concern]:
    for each in checks:
        if each.base is not None and each.head is None:
            yield Concern(
                rule="unknown",
                what=f"{each.what}: the base has a figure, and this step has none",
                fix="see the reason under `unknown` in report.json, or of an estimate in plan.json",
                is_worse=True,
            )


def _fits(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Concern]:
    for key, of in (("fits", "the chip"), ("host_fits", "its host")):
        if now[key] is False and was[key] is not False:
            yield Concern(
                rule="does-not-fit",
                what=f"it does not fit into the memory of {of}",
                fix="see `memory.changes` of report.json, or `meshloom explain`, for what saves memory",
                is_worse=True,
            )


def _grown(base: Report, head: Report) -> set[str]:
    """Returns the kinds of collectives of which more is sent, or fewer are asynchronous. Where a source only has
    another name, or another collective has its bytes, neither is so."""

    def sums(report: Report) -> Mapping[str, tuple[int, int]]:
        of: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for each in report.collectives:
            sent, waits = of[each.kind]
            of[each.kind] = sent + each.bytes, waits + each.bytes * (not each.is_async)
        return of

    was, now = sums(base), sums(head)
    return {kind for kind, (sent, waits) in now.items() if sent > was[kind][0] or waits > was[kind][1]}


def _collective(change: Difference, grown: Set[str]) -> Iterator[Concern]:
    """Yields what is worse about collectives of one kind, axes and source. Small ones are named, and accepted, and so
    are those of a kind that has not grown as a whole."""
    was, now = change.before or Leaf(), change.after or Leaf()
    if not now:
        return
    is_large = now["bytes"] // max(1, now["count"]) >= LEAST_BYTES and change.where.partition(" over ")[0] in grown
    exposed = [side.get("exposed_seconds", 0.0) for side in (was, now)]
    waits = "" if None in exposed or exposed[0] == exposed[1] else (
        f", exposed {' → '.join(human_seconds(each or 0.0) for each in exposed)}"
    )  # fmt: skip
    if not was:
        what = f"{change.where}: {counted(now['count'], 'time')}, {human_bytes(now['bytes'])}{waits}"
        fix = "find what asks for it: a layout that changed, or an array that is used in another one"
        yield Concern(rule="new-collective", what=what, fix=fix, is_worse=is_large)
        return
    if now["count"] > was["count"] and now["bytes"] > was["bytes"]:
        sizes = " → ".join(human_bytes(side["bytes"]) for side in (was, now))
        what = f"{change.where}: {was['count']:,} → {now['count']:,} times, {sizes}{waits}"
        fix = "find what runs it again: a value that is gathered twice, recomputation, more microbatches"
        yield Concern(rule="more-collectives", what=what, fix=fix, is_worse=is_large)
    lost = (now["count"] - now["num_async"]) - (was["count"] - was["num_async"])
    if was["num_async"] and lost > 0:
        shares = " → ".join(f"{side['num_async']:,} of {side['count']:,}" for side in (was, now))
        what = f"{change.where}: asynchronous {shares}{waits}"
        fix = "compare the options of the compiler, and what the compute between its start and its end waits for"
        yield Concern(rule="lost-async", what=what, fix=fix, is_worse=is_large)


def _new_findings(base: Report, head: Report, paths: Set[str]) -> Iterator[Concern]:
    _, _, found = pair_findings(base.findings, head.findings, paths)
    for each in found:
        what = f"{each.what}; {each.where}"
        yield Concern(rule=each.rule, what=what, fix=each.fix, is_worse=each.severity == "warning")


def _declared(config: Sequence[Difference]) -> Iterator[str]:
    for each in config:
        before, after = (_plain(value) for value in (each.before, each.after))
        yield f"{each.where}: {before} → {after}"


def _plain(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "nothing" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _notes(base: Run, head: Run) -> Iterator[str]:
    there, here = _calibration(base), _calibration(head)
    if there != here:
        yield "predicted with another calibration of the chip than the base"
    elif here:
        yield f"both are calibrated {here}"
    flops_there, flops_here = _model_flops(base), _model_flops(head)
    if flops_there and flops_here and flops_there != flops_here:
        yield f"the FLOPs of the model changed by {signed_share(flops_here / flops_there - 1)} since the base"
    if not (base.report and head.report):
        yield NO_REPORT
        return
    if not head.report.compiled.step_seconds and not base.report.compiled.step_seconds:
        yield f"the time of a step is not known: {why_unknown(head.report.compiled.step_seconds)}"
    was, now = _versions(base.report), _versions(head.report)
    if was and now and was != now:
        yield f"compiled by {human_names(now)}, and the base by {human_names(was)}"


def _versions(report: Report) -> list[str]:
    """Returns what a program was compiled by: "jax 0.10.2", ...; nothing where the report does not say."""
    build = report.build
    return [f"jax {build.jax}", f"jaxlib {build.jaxlib}", *filter(None, [build.plugin])] if build else []


def human_value(check: Check, value: float | None) -> str:
    """Returns a value of a check as text."""
    if value is None:
        return "unknown"
    return human_bytes(round(value)) if check.unit == "bytes" else human_seconds(value)


def human_change(check: Check) -> str:
    """Returns the growth of a figure as text: "+8.8 %"."""
    if check.change is None:
        return "" if check.base == check.head or None in (check.base, check.head) else "new"
    return "" if abs(check.change) < 5e-4 else signed_share(check.change)


def human_tolerated(check: Check) -> str:
    """Returns the largest growth that is accepted as text."""
    return human_share(check.tolerated) + (" of the step" if check.rule == "more-exposed" else "")
