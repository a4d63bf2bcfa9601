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
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..core.collectives import CollectiveKind
from ..core.known import Unknown, known
from ..core.traffic import Crossing, TrafficSource
from ..schema import CollectiveReport, Finding, Report, total

DIFF_VERSION = 1
SAME_WITHIN = 1e-3  # the fraction of the larger of two times
NOT_OF_THE_STEP = {"lower_seconds", "compile_seconds", "cache", "fingerprint"}  # facts of this build alone
TOLD_BY_REPORT = ("target", "program", "memory", "estimate")  # keys of plan.json that the report has, more exactly
Way = Literal["appeared", "gone", "changed"]
Grown = Literal["appeared", "gone", "grown", "shrunk", "changed"]
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
    """A difference at a path. before, after: the values; None also if the path is missing, as `way` says."""

    where: str
    way: Way
    before: Any
    after: Any


@dataclass(frozen=True, kw_only=True)
class SummedCollectives:
    """All collectives of one kind over the same mesh axes for the same source. num_async: how many of `count` are
    asynchronous."""

    count: int
    num_async: int
    bytes: int
    alone_seconds: float | None
    hidden_seconds: float | None
    exposed_seconds: float | None
    group_sizes: tuple[int, ...]
    links: tuple[str, ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class CollectiveChange(Crossing):
    """A change of such collectives. way: grown or shrunk by the first of bytes, count, exposed and alone seconds that
    differs."""

    source: str
    way: Grown
    before: SummedCollectives | None
    after: SummedCollectives | None


@dataclass(frozen=True)
class Diff:
    """All differences of two runs. notes: the parts that could not be compared, and why."""

    schema_version: int
    runs: tuple[str, str]
    notes: tuple[str, ...]
    step: tuple[Difference, ...]
    compute: tuple[Difference, ...]
    memory: tuple[Difference, ...]
    collectives: tuple[CollectiveChange, ...]
    findings: tuple[Difference, ...]
    config: tuple[Difference, ...]
    program: tuple[Difference, ...]
    plan: tuple[Difference, ...]
    shardings: tuple[Difference, ...]
    build: tuple[Difference, ...]

    @property
    def is_empty(self) -> bool:
        """Returns True if both runs do the same."""
        return not any((self.step, self.compute, self.memory, self.collectives, self.findings, self.config,
                        self.program, self.plan, self.shardings, self.build))  # fmt: skip


def diff_runs(a: Run, b: Run) -> Diff:
    """Returns the changes from a to b, in the parts that both have."""
    both = (a.report, b.report) if a.report and b.report else None
    declared = (a, b) if a.is_declared and b.is_declared else None

    def of_reports(values: Callable[[Report], Any]) -> tuple[Difference, ...]:
        return changes(values(both[0]), values(both[1])) if both else ()

    told = {"schema_version", "arrays", "unknown"}
    if both:
        told |= {key for key in (*a.plan, *b.plan) if key.startswith(TOLD_BY_REPORT)}
    return Diff(
        schema_version=DIFF_VERSION,
        runs=(a.name, b.name),
        notes=(
            *(f"{run.name} has no report.json: plans are compared alone" for run in (a, b) if not run.report),
            *(f"{run.name} has no declaration: programs are compared alone" for run in (a, b) if not run.is_declared),
        ),
        step=of_reports(_step),
        compute=of_reports(lambda report: report.compiled.compute_seconds_by_kind),
        memory=of_reports(lambda report: report.memory.model_dump(mode="json", exclude={"changes"})),
        collectives=_collectives(both[0].collectives, both[1].collectives) if both else (),
        findings=_findings(*both, _parameters(a.plan) | _parameters(b.plan)) if both else (),
        config=changes(a.spec, b.spec, rows=in_order) if declared else (),
        program=of_reports(lambda report: {"target": report.target.model_dump(mode="json"),
                                           "program": report.program.model_dump(mode="json")}),
        plan=changes(_without(a.plan, told), _without(b.plan, told)) if declared else (),
        shardings=changes(_layouts(a.plan), _layouts(b.plan), is_leaf=lambda node: "spec" in node) if declared else (),
        build=of_reports(lambda report: _without(report.build.model_dump(mode="json"), NOT_OF_THE_STEP)
                         if not isinstance(report.build, Unknown) else {}),
    )  # fmt: skip


def _step(report: Report) -> dict[str, Any]:
    """Returns the figures of a step, with the least time only if it is not the whole step."""
    step, parts = report.compiled, {"compute_seconds_by_kind"}
    is_whole = step.least_seconds == step.step_seconds
    return step.model_dump(mode="json", exclude=parts | ({"least_seconds"} if is_whole else set()))


def _findings(a: Report, b: Report, paths: set[str]) -> tuple[Difference, ...]:
    before, after = ([_renamed(finding) for finding in report.findings] for report in (a, b))
    pairs, gone, appeared = pair_findings(before, after, paths)
    found = [
        *(Difference(f"{each.rule} at {each.where}", "gone", each.what, None) for each in gone),
        *(Difference(f"{each.rule} at {each.where}", "appeared", None, each.what) for each in appeared),
        *(change for pair in pairs for change in _finding_changes(*pair)),
    ]
    return tuple(sorted(found, key=lambda c: (c.where, *sorted(filter(None, (c.before, c.after))))))


def _finding_changes(before: Finding, after: Finding) -> list[Difference]:
    """Returns the changes of a finding that both reports have: in its words, in its places, or none."""
    name = f"{before.rule} at {min(first_place(before), first_place(after))}"
    told = ((name, before.what, after.what), (f"{name}: places", before.where, after.where))
    return [Difference(path, "changed", *values) for path, *values in told if values[0] != values[1]]


def _renamed(finding: Finding) -> Finding:
    """Returns the finding without the compiler's numbers."""
    names = {"what": without_numbers(finding.what), "where": without_numbers(finding.where)}
    return finding.model_copy(update=names)


def _parameters(plan: Mapping[str, Any]) -> set[str]:
    return {row["path"] for row in plan.get("arrays", {}).get("parameters", ())}


def _layouts(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the layout of each array, by table and path, without reasons: rules may be in another order."""
    kept = ("shape", "dtype", "spec", "bytes_per_device")
    tables = plan.get("arrays", {})
    return {table: {row["path"]: {key: row[key] for key in kept} for row in rows} for table, rows in tables.items()}


def _without(node: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in keys}


Rows = Callable[[Sequence[Mapping[str, Any]], str], Iterator[tuple[str, Any]]]


def by_words(rows: Sequence[Mapping[str, Any]], path: str) -> Iterator[tuple[str, Any]]:
    """Yields the rows of a table in any order: their words identify them, and their numbers are added up."""
    totals: dict[str, Any] = {}
    for row in rows:
        numbers = {key: v for key, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        words = without_numbers(", ".join(_words(v) for key, v in row.items() if key not in numbers and v))
        for key, value in numbers.items() or {"count": 1}.items():
            at = f"{path}[{words}].{key}"
            totals[at] = totals.get(at, 0) + value
    yield from totals.items()


def in_order(rows: Sequence[Mapping[str, Any]], path: str) -> Iterator[tuple[str, Any]]:
    """Yields the rows of a table whose order matters, such as sharding rules."""
    for index, row in enumerate(rows):
        yield from _leaves(row, f"{path}[{index}]", in_order, _is_no_leaf)


def _is_no_leaf(node: Any) -> bool:  # noqa: ARG001
    return False


def changes(
    a: Mapping[str, Any], b: Mapping[str, Any], *, rows: Rows = by_words, is_leaf: Callable[[Any], bool] = _is_no_leaf
) -> tuple[Difference, ...]:
    """Returns the leaves that differ, by dotted path. Lists of plain values are leaves. rows: how to read lists of
    mappings."""
    before, after = (dict(_leaves(node, "", rows, is_leaf)) for node in (a, b))
    found = []
    for path in sorted(before.keys() | after.keys()):
        if path not in before:
            found.append(Difference(path, "appeared", None, after[path]))
        elif path not in after:
            found.append(Difference(path, "gone", before[path], None))
        elif not is_same(before[path], after[path]):
            found.append(Difference(path, "changed", before[path], after[path]))
    return tuple(found)


def _leaves(node: Any, path: str, rows: Rows, is_leaf: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and not is_leaf(node):
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key), rows, is_leaf)
    elif isinstance(node, list) and node and all(isinstance(item, Mapping) for item in node):
        yield from rows(node, path)
    else:
        yield path, node


def _words(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


def without_numbers(text: str) -> str:
    """Returns text without the numbers of instructions and lines, which vary: 'fusion.123 of all-gather-start.4,
    train.py:42' -> 'fusion of all-gather-start, train.py'."""
    return re.sub(r"\b([A-Za-z_][\w\-]*)\.\d+\b", r"\1", re.sub(r"(\.py):\d+\b", r"\1", text))


def is_same(a: Any, b: Any) -> bool:
    """Returns True if the values are equal; floats may differ by the fraction SAME_WITHIN."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=SAME_WITHIN)
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _collectives(a: Iterable[CollectiveReport], b: Iterable[CollectiveReport]) -> tuple[CollectiveChange, ...]:
    """Returns the changes of collectives, the largest difference in exposed time first, then in bytes."""
    before, after = _sums(a), _sums(b)
    found = [
        CollectiveChange(kind, mesh_axes, str(origin), way, before.get(key), after.get(key))
        for key in {**before, **after}
        if (way := _way(before.get(key), after.get(key)))
        for kind, mesh_axes, origin in (key,)
    ]
    return tuple(sorted(found, key=lambda c: (-_difference(c, "exposed_seconds"), -_difference(c, "bytes"),
                                              c.kind, c.mesh_axes, c.source)))  # fmt: skip


Compares = tuple[CollectiveKind, tuple[str, ...], TrafficSource]  # what collectives of two steps have to have in common


def _sums(collectives: Iterable[CollectiveReport]) -> dict[Compares, SummedCollectives]:
    groups: dict[Compares, list[CollectiveReport]] = {}
    for c in collectives:
        origin = replace(c.origin, activation=without_numbers(c.origin.activation))
        groups.setdefault((c.kind, tuple(sorted(c.mesh_axes)), origin), []).append(c)
    return {
        key: SummedCollectives(
            count=sum(c.count for c in group),
            num_async=sum(c.count for c in group if c.is_async),
            bytes=sum(c.bytes for c in group),
            alone_seconds=known(total(c.alone_seconds for c in group)),
            hidden_seconds=known(total(c.hidden_seconds for c in group)),
            exposed_seconds=known(total(c.exposed_seconds for c in group)),
            group_sizes=tuple(sorted({c.group_size for c in group})),
            links=tuple(sorted({c.link for c in group})),
            dtypes=tuple(sorted({c.dtype for c in group})),
        )
        for key, group in groups.items()
    }


def _way(a: SummedCollectives | None, b: SummedCollectives | None) -> Grown | None:
    if a is None or b is None:
        return "appeared" if b else "gone"
    for name in ("bytes", "count", "exposed_seconds", "alone_seconds"):
        before, after = getattr(a, name), getattr(b, name)
        if before is not None and after is not None and not is_same(before, after):
            return "grown" if after > before else "shrunk"
    return None if all(is_same(v, getattr(b, name)) for name, v in vars(a).items()) else "changed"


def _difference(change: CollectiveChange, name: str) -> float:
    before, after = (getattr(side, name) if side else 0 for side in (change.before, change.after))
    return abs((after or 0) - (before or 0))


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
        lambda f: (f.rule, _without_figures(f.what), parameter_of(f, paths)),
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


def _without_figures(text: str) -> str:
    return re.sub(r"\d[\d.,]*", "#", text)
