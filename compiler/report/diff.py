"""Compares two runs: declaration, plan, layouts, memory, collectives, compute, predicted time.

    a  sharding=fsdp, 64 all-gathers over fsdp of layers/mlp/up_EM, forward, 16 ms of them exposed
    b  sharding=hsdp, the same behind compute
    -> config   mesh.fsdp 256 -> 16, mesh.replica 1 -> 16
       shrunk   all-gather over fsdp of layers/mlp/up_EM, forward: exposed 16 ms -> 0

It compares what steps do, not how a compiler wrote them down: neither names nor numbers of instructions, nor their
order. Collectives are summed by kind, mesh axes and source. Times that differ by less than SAME_WITHIN count as equal.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from meshloom.models.record import Record

from ..core.known import known
from ..core.traffic import TimedTraffic
from ..figures import FIGURES
from ..schema import CollectiveReport, Finding, Report

DIFF_VERSION = 2
SAME_WITHIN = 1e-3  # the fraction of the larger of two times
NOT_OF_THE_STEP = {"lower_seconds", "compile_seconds", "cache", "fingerprint"}  # facts of this build alone
TOLD_BY_REPORT = ("target", "program", "memory", "estimate")  # keys of plan.json that the report has, more exactly
Way = Literal["appeared", "gone", "grown", "shrunk", "changed"]
BetterOrWorse = Literal["better", "worse"]
Pair = tuple[Finding, Finding]


@dataclass(frozen=True)
class Run:
    """The contents of a run directory. spec, plan: empty for a program that was inspected by itself. report: None if
    there is none."""

    name: str
    spec: Mapping[str, Any]
    plan: Mapping[str, Any]
    report: Report | None

    @property
    def is_declared(self) -> bool:
        return bool(self.plan)


@dataclass(frozen=True)
class Difference:
    """A difference at a path. before, after: the values; None also if the path is missing, as `way` says. verdict:
    whether the step got better or worse by it; None where that does not follow."""

    where: str
    way: Way
    before: Any
    after: Any
    verdict: BetterOrWorse | None = None


class Leaf(dict[str, Any]):
    """A mapping that is compared as a whole: the layout of an array, or the sum of collectives."""


@dataclass(frozen=True)
class Diff:
    """All differences of two runs, by section. notes: the parts that could not be compared, and why."""

    runs: tuple[str, str]
    notes: tuple[str, ...]
    sections: Mapping[str, tuple[Difference, ...]]

    @property
    def is_empty(self) -> bool:
        """Returns True if both runs do the same."""
        return not any(self.sections.values())

    def as_json(self) -> dict[str, Any]:
        sections = {name: [asdict(change) for change in found] for name, found in self.sections.items()}
        return {"schema_version": DIFF_VERSION, "runs": self.runs, "notes": self.notes} | sections


class DiffRow(Record):
    """A difference, as `meshloom diff --json` prints it."""

    where: str
    way: Way
    before: Any
    after: Any
    verdict: BetterOrWorse | None


class DiffFile(Record):
    """What `meshloom diff --json` prints: for each section the differences, and an empty list where there are none."""

    schema_version: int
    runs: tuple[str, str]
    notes: tuple[str, ...]
    step: list[DiffRow]
    compute: list[DiffRow]
    memory: list[DiffRow]
    collectives: list[DiffRow]
    config: list[DiffRow]
    program: list[DiffRow]
    plan: list[DiffRow]
    shardings: list[DiffRow]
    build: list[DiffRow]
    findings: list[DiffRow]


SECTIONS = ("step", "compute", "memory", "collectives", "config", "program", "plan", "shardings", "build")


def diff_runs(a: Run, b: Run) -> Diff:
    """Returns the changes from a to b, in the parts that both have."""
    told = {"schema_version", "arrays", "unknown"}
    if a.report and b.report:
        told |= {key for key in (*a.plan, *b.plan) if key.startswith(TOLD_BY_REPORT)}
    before, after = (_sections(run, told) for run in (a, b))
    found: dict[str, tuple[Difference, ...]] = dict.fromkeys(SECTIONS, ())
    for name in (name for name in SECTIONS if name in before and name in after):
        found[name] = changes(before[name], after[name], rows=in_order if name == "config" else by_words)
    found["collectives"] = tuple(sorted(map(_with_way, found["collectives"]), key=_by_exposed))
    found = {name: tuple(replace(one, verdict=_verdict(name, one)) for one in each) for name, each in found.items()}
    found["findings"] = _findings(a.report, b.report, paths_of(a, b)) if a.report and b.report else ()
    return Diff(
        runs=(a.name, b.name),
        notes=(
            *(f"{run.name} has no report.json: plans are compared alone" for run in (a, b) if not run.report),
            *(f"{run.name} has no declaration: programs are compared alone" for run in (a, b) if not run.is_declared),
        ),
        sections=found,
    )


def paths_of(*runs: Run) -> set[str]:
    """Returns the paths of all parameters of these runs."""
    return {row["path"] for run in runs for row in run.plan.get("arrays", {}).get("parameters", ())}


def _sections(run: Run, told: Collection[str]) -> dict[str, Any]:
    """Returns what is compared of a run. told: keys of plan.json that are left out."""
    found: dict[str, Any] = {}
    if run.is_declared:
        plan = {key: value for key, value in run.plan.items() if key not in told}
        plan |= {"operations": _operations(run.plan)} if "operations" in plan else {}
        found = {"config": run.spec, "plan": plan, "shardings": _layouts(run.plan)}
    if report := run.report:
        step = report.compiled.model_dump(mode="json")
        if report.compiled.least_seconds == report.compiled.step_seconds:
            del step["least_seconds"]
        names = {"estimate_bytes_per_chip": "peak_bytes", "host_estimate_bytes_per_chip": "host_bytes"}
        estimated = {key: known(getattr(report.estimated, name, None)) for key, name in names.items()}
        build = report.build.model_dump(mode="json", exclude=NOT_OF_THE_STEP) if report.build else {}
        found |= {
            "compute": step.pop("compute_seconds_by_kind"),
            "step": step,
            "memory": report.memory.model_dump(mode="json", exclude={"changes"}) | estimated,
            "collectives": _sums(report.collectives),
            "program": {name: getattr(report, name).model_dump(mode="json") for name in ("target", "program")},
            "build": build,
        }
    return found


def _findings(a: Report, b: Report, paths: set[str]) -> tuple[Difference, ...]:
    before, after = (
        [
            f.model_copy(update={key: without_numbers(getattr(f, key)) for key in ("what", "where")})
            for f in each.findings
        ]
        for each in (a, b)
    )
    pairs, gone, appeared = pair_findings(before, after, paths)
    found = [
        *(Difference(_place(each), "gone", each.what, None, _if_warning(each, "better")) for each in gone),
        *(Difference(_place(each), "appeared", None, each.what, _if_warning(each, "worse")) for each in appeared),
    ]
    for one, other in pairs:
        name = f"{one.rule} at {min(first_place(one), first_place(other))}"
        both = ((name, one.what, other.what), (f"{name}: places", one.where, other.where))
        found += [Difference(path, "changed", before, after) for path, before, after in both if before != after]
    return tuple(sorted(found, key=lambda c: (c.where, *sorted(filter(None, (c.before, c.after))))))


def _place(finding: Finding) -> str:
    return f"{finding.rule} at {finding.where}"


def _if_warning(finding: Finding, verdict: BetterOrWorse) -> BetterOrWorse | None:
    return verdict if finding.severity == "warning" else None


def _verdict(section: str, change: Difference) -> BetterOrWorse | None:
    """Returns whether the step got better or worse by a change. Less is better for most values, and more for a few."""
    before, after, name = change.before, change.after, change.where
    if section == "collectives":
        return _verdict_of_collective(before or {}, after or {})
    if section == "plan" and name.startswith("estimated."):
        section, name = "step", name.removeprefix("estimated.")
    if section not in ("step", "memory", "compute") or "limit" in name or name.startswith("range_"):
        return None
    if section == "compute" or name.startswith(("breakdown.", "exposed_by_axes.")):  # what is missing takes nothing
        before, after = (0 if value is None else value for value in (before, after))
    if not all(isinstance(value, int | float) for value in (before, after)) or before == after:
        return None
    figure = FIGURES.get(name)
    is_more_better = figure.better == "more" if figure else name in ("fits", "host_fits")
    return "better" if (after > before) == is_more_better else "worse"


def _verdict_of_collective(before: Mapping[str, Any], after: Mapping[str, Any]) -> BetterOrWorse | None:
    """Returns whether compute waits longer for collectives; where it does not, whether they send more."""
    for name in ("exposed_seconds", "bytes"):
        values = before.get(name, 0), after.get(name, 0)  # what is missing takes nothing
        if None not in values and not is_same(*map(float, values)):
            return "worse" if values[1] > values[0] else "better"
    return None


def _operations(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how each operation runs, and what that costs, by its name: "matmul attention_output in layers"."""
    found: dict[str, Any] = {}
    for row in plan["operations"]:
        kind, site, cost = row["operation"], row["site"], row["cost"]
        name = f"{kind if site == kind else f'{kind} {site}'} in {row['piece']}"
        name = name if name not in found else f"{name} ({sum(other.startswith(name) for other in found) + 1})"
        found[name] = {"strategy": f"{row['strategy']}: {row['what']}"}
        found[name] |= {f"cost_{cost['unit']}": cost["value"]} if cost else {}
    return found


def _layouts(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the layout of each array, by table and path, without reasons: rules may be in another order."""
    kept = ("shape", "dtype", "spec", "bytes_per_device")
    tables = plan.get("arrays", {})
    return {
        table: {row["path"]: Leaf({key: row[key] for key in kept}) for row in rows} for table, rows in tables.items()
    }


Rows = Callable[[Sequence[Mapping[str, Any]], str], Iterator[tuple[str, Any]]]


def by_words(rows: Sequence[Mapping[str, Any]], path: str) -> Iterator[tuple[str, Any]]:
    """Yields the rows of a table in any order: their words identify them, and their numbers are added up."""
    totals: dict[str, Any] = {}
    for row in rows:
        numbers = {key: v for key, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        others = (value for key, value in row.items() if key not in numbers and value)
        told = ("+".join(map(str, value)) if isinstance(value, list) else str(value) for value in others)
        words = without_numbers(", ".join(told))
        for key, value in numbers.items() or {"count": 1}.items():
            at = f"{path}[{words}].{key}"
            totals[at] = totals.get(at, 0) + value
    yield from totals.items()


def in_order(rows: Sequence[Mapping[str, Any]], path: str) -> Iterator[tuple[str, Any]]:
    """Yields the rows of a table whose order matters, such as sharding rules."""
    for index, row in enumerate(rows):
        yield from _leaves(row, f"{path}[{index}]", in_order)


def changes(a: Mapping[str, Any], b: Mapping[str, Any], *, rows: Rows = by_words) -> tuple[Difference, ...]:
    """Returns the leaves that differ, by dotted path. Lists of plain values are leaves. rows: how to read lists of
    mappings."""
    before, after = (dict(_leaves(node, "", rows)) for node in (a, b))
    found = []
    for path in sorted(before.keys() | after.keys()):
        if path not in before:
            found.append(Difference(path, "appeared", None, after[path]))
        elif path not in after:
            found.append(Difference(path, "gone", before[path], None))
        elif not is_same(before[path], after[path]):
            found.append(Difference(path, "changed", before[path], after[path]))
    return tuple(found)


def _leaves(node: Any, path: str, rows: Rows) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and not isinstance(node, Leaf):
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key), rows)
    elif isinstance(node, list) and node and all(isinstance(item, Mapping) for item in node):
        yield from rows(node, path)
    else:
        yield path, node


def without_numbers(text: str) -> str:
    """Returns text without the numbers of instructions and lines, which vary: 'fusion.123 of all-gather-start.4,
    train.py:42' -> 'fusion of all-gather-start, train.py'."""
    return re.sub(r"\b([A-Za-z_][\w\-]*)\.\d+\b", r"\1", re.sub(r"(\.py):\d+\b", r"\1", text))


def is_same(a: Any, b: Any) -> bool:
    """Returns True if the values are equal; floats may differ by the fraction SAME_WITHIN."""
    if isinstance(a, Leaf) and isinstance(b, Leaf):
        return a.keys() == b.keys() and all(is_same(value, b[key]) for key, value in a.items())
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=SAME_WITHIN)
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _sums(collectives: Iterable[CollectiveReport]) -> dict[str, Leaf]:
    """Returns the sums of collectives of one kind over the same mesh axes for the same source. num_async: how many of
    `count` are asynchronous."""
    groups: dict[Any, list[CollectiveReport]] = {}
    for c in collectives:
        origin = replace(c.origin, activation=without_numbers(c.origin.activation))
        groups.setdefault((c.kind, tuple(sorted(c.mesh_axes)), origin), []).append(c)
    named: dict[str, Leaf] = {}
    for (kind, axes, origin), group in groups.items():
        name = f"{kind} over {'+'.join(axes)}, {origin}"
        named[name if name not in named else f"{name} (of an activation)"] = _sum(group)
    return named


def _sum(group: Sequence[CollectiveReport]) -> Leaf:
    whole: TimedTraffic = sum(group[1:], start=group[0])
    return Leaf(
        count=whole.count,
        num_async=sum(c.count for c in group if c.is_async),
        bytes=whole.bytes,
        alone_seconds=known(whole.alone_seconds),
        hidden_seconds=known(whole.hidden_seconds),
        exposed_seconds=known(whole.exposed_seconds),
        group_sizes=sorted({c.group_size for c in group}),
        links=sorted({c.link for c in group}),
        dtypes=sorted({c.dtype for c in group}),
    )


def _with_way(change: Difference) -> Difference:
    """Returns a change of collectives as grown or shrunk, by the first figure that differs."""
    for name in ("bytes", "count", "exposed_seconds", "alone_seconds") if change.way == "changed" else ():
        before, after = change.before[name], change.after[name]
        if before is not None and after is not None and not is_same(before, after):
            return replace(change, way="grown" if after > before else "shrunk")
    return change


def _by_exposed(change: Difference) -> tuple[float, int, str]:
    """Returns the key that puts the largest difference in exposed time first, then in bytes."""
    exposed, size = (
        abs(((change.after or {}).get(name) or 0) - ((change.before or {}).get(name) or 0))
        for name in ("exposed_seconds", "bytes")
    )
    return -exposed, -size, change.where


def pair_findings(
    a: Sequence[Finding], b: Sequence[Finding], paths: Collection[str]
) -> tuple[list[Pair], list[Finding], list[Finding]]:
    """Returns pairs of matching findings, the findings of a without a match, and those of b. paths: the paths of all
    parameters.

    Identical findings are paired first, then those that differ only in their places, then those of the same rule about
    the same parameter (or about none) that differ in their figures.
    """
    keys: tuple[Callable[[Finding], Any], ...] = (
        lambda f: f,
        lambda f: (f.rule, f.what),
        lambda f: (f.rule, re.sub(r"\d[\d.,]*", "#", f.what), parameter_of(f, paths)),
    )
    left, right = (sorted(side, key=lambda f: (f.rule, f.what, f.where)) for side in (a, b))
    pairs: list[Pair] = []
    for key in keys:
        for one in list(left):
            if (other := next((f for f in right if key(f) == key(one)), None)) is not None:
                pairs.append((one, other))
                left.remove(one)
                right.remove(other)
    return pairs, left, right


def parameter_of(finding: Finding, paths: Collection[str]) -> str | None:
    """Returns the parameter that a finding's words name, or else its first place: '9 places: layers/mlp/up_EM and 8
    more, backward; ...'."""
    words = [*re.findall(r"[\w/]+", finding.what), *re.findall(r"^(?:one of )?([\w/]+)", first_place(finding))]
    return next((word for word in words if word in paths), None)


def first_place(finding: Finding) -> str:
    """Returns the most costly place of a finding."""
    return re.sub(r"^\d+ places: ", "", finding.where).split("; ")[0]
