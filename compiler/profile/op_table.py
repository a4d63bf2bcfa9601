"""Reads XProf's table of operations (its tool HLO Op Stats), and prices the rows of one that has no program beside it.

    rank,program_id,category,hlo_op_name,hlo_op_expression,...    CSV, by names of columns or by what the page shows
    {"cols": [{"id": "hlo_op_name"}, ...], "rows": [{"c": [{"v": "fusion.1"}, ...]}, ...]}    the tool's JSON

A row has the times of one operation on all devices and in all steps, and the operation's line of text; not the
computation that it calls, nor when it ran. So the row of a fusion is priced by the FLOPs that the profiler counted in
it, or else as a pass over its operands; and what hides a collective is not known.
"""

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..analysis.program_devices import ProgramDevices
from ..analysis.program_text import read_part
from ..analysis.schedule_analysis import NO_CHIP, ScheduleAnalysis, analyse_program, chip_of, nothing_timed
from ..core.known import Unknown, each_known, or_unknown
from ..core.traffic import ComputeKind
from ..spec.cost_model import cost_model
from ..target.target import TargetPlan
from ..xla.hlo import Computation, HloError, Module, parse_module
from ..xla.hlo.types import num_bytes
from ..xla.schedule.prices import instruction_kind, price_instruction
from .prediction import PREDICTION_VERSION, PredictedCollective, PredictedCompute, Prediction, source_of_compute

NO_ORDER = "a table of operations does not say when they ran: give the program's text, too"
_COLUMNS = {
    "program": ("program_id", "program id"),
    "category": ("category", "hlo op category"),
    "name": ("hlo_op_name", "hlo op name"),
    "text": ("hlo_op_expression", "hlo op text"),
    "op_name": ("tf_op_name", "framework op name"),
    "occurrences": ("occurrences", "#occurrences"),
    "microseconds": ("total_self_time", "total self time (us)"),
    "gigaflops_per_second": ("model_flop_rate", "model gflop/s"),
}
_NEEDED = ("name", "occurrences", "microseconds")
NOT_CALLED = "the table does not have the computation that it calls: give the program's text, too"
COMPUTING = frozenset({"fusion", "custom-call"})
PASSES = frozenset({"broadcast", "data formatting", "dynamic-update-slice", "input fusion", "loop fusion",
                    "non-fusion elementwise", "output fusion"})  # fmt: skip
CONTAINERS = frozenset({"while", "conditional", "call"})  # categories of rows whose own time is none
LEAST_SHARE = 0.05  # of a program's operations, which run as often, for it to be the number of its executions


_PARAMETERS = re.compile(r"\[[^\[\]]*\]")  # of a primitive: dot_general[precision=None ...]


class TableError(ValueError):
    """The text is not XProf's table of operations."""


@dataclass(frozen=True)
class OpRow:
    """An operation. text: its line of HLO; empty if the table has none. seconds: of all occurrences, without those of
    operations that it runs. flops: of one occurrence, as the profiler counted them; 0 where it did not."""

    program: str
    category: str
    name: str
    text: str
    op_name: str
    occurrences: int
    seconds: float
    flops: float


def read_op_table(text: str) -> tuple[OpRow, ...]:
    """Returns the rows of a table, in CSV or JSON. Raises TableError for another text."""
    rows = [_row(values) for values in _records(text)]
    found = tuple(row for row in rows if row is not None)
    if not found:
        raise TableError("the table has no operation")
    return found


def is_op_table(text: str) -> bool:
    """Returns whether a text begins as such a table does."""
    head = text.lstrip()[:4000].lower()
    return not head.startswith("hlomodule") and any(name in head for name in _COLUMNS["name"])


def _records(text: str) -> Iterator[Mapping[str, Any]]:
    if text.lstrip()[:1] in ("{", "["):
        try:
            content = json.loads(text)
        except ValueError as error:
            raise TableError(f"its JSON is not whole: {error}") from None
        yield from _of_json(content)
        return
    csv.field_size_limit(2**31 - 1)  # lines of large tuples are longer than the 128 KiB that it allows
    reader = csv.DictReader(io.StringIO(text))
    try:
        yield from ({str(key).strip().lower(): value for key, value in row.items() if key} for row in reader)
    except csv.Error as error:
        raise TableError(f"its CSV is damaged in line {reader.line_num}: {error}") from None


def _of_json(content: Any) -> Iterator[Mapping[str, Any]]:
    tables = content if isinstance(content, list) else [content]
    for table in tables:
        if not isinstance(table, dict):
            raise TableError("its JSON has no columns and rows")
        if "cols" not in table:  # a list of records
            yield {str(key).lower(): value for key, value in table.items()}
            continue
        try:
            names = [str(each.get("id") or each.get("label", "")).lower() for each in table["cols"]]
            rows = [[cell.get("v") if isinstance(cell, dict) else cell for cell in row["c"]] for row in table["rows"]]
        except (AttributeError, KeyError, TypeError):
            raise TableError('its JSON is not {"cols": [{"id": ...}], "rows": [{"c": [{"v": ...}]}]}') from None
        yield from (dict(zip(names, cells, strict=False)) for cells in rows)


def _row(values: Mapping[str, Any]) -> OpRow | None:
    """Returns a row; None for one without a name, as the sum of idle time. Raises TableError if a column is not
    there."""
    found = {key: next((values[name] for name in names if name in values), None) for key, names in _COLUMNS.items()}
    if missing := [_COLUMNS[key][0] for key in _NEEDED if not any(name in values for name in _COLUMNS[key])]:
        raise TableError(f"the table has no column {missing[0]}")
    if not found["name"] or found["occurrences"] is None or found["microseconds"] is None:
        return None
    try:
        occurrences, seconds = round(float(found["occurrences"])), float(found["microseconds"]) * 1e-6
        rate = float(found["gigaflops_per_second"] or 0) * 1e9
    except (ValueError, TypeError, OverflowError):
        raise TableError(f"the row of {found['name']} has a text where a number belongs") from None
    if occurrences < 1 or found["category"] == "IDLE":
        return None
    return OpRow(
        program=str(found["program"] or ""),
        category=str(found["category"] or ""),
        name=str(found["name"]).lstrip("%"),
        text=str(found["text"] or "").strip().removeprefix("ROOT "),
        op_name=_PARAMETERS.sub("", str(found["op_name"] or "")).partition(":")[0],
        occurrences=occurrences,
        seconds=seconds,
        flops=rate * seconds / occurrences,
    )


def seconds_by_program(rows: Sequence[OpRow]) -> dict[str, float]:
    """Returns the seconds of each program, the longest first."""
    found: dict[str, float] = {}
    for row in rows:
        found[row.program] = found.get(row.program, 0.0) + row.seconds
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def num_executions(rows: Sequence[OpRow]) -> int:
    """Returns how often the devices ran the program of these rows: as often as they entered its loops; if it has none,
    the least number of runs that a share of its operations have."""
    loops = [row.occurrences for row in rows if row.category == "while"]
    if loops:
        return min(loops)
    counts = Counter(row.occurrences for row in rows)
    return min(count for count, rows_of_it in counts.items() if rows_of_it >= LEAST_SHARE * len(rows))


def predict_rows(rows: Sequence[OpRow], devices: ProgramDevices, runs: int) -> Prediction:
    """Returns the prediction of each row of a program, alone. runs: the number of its executions."""
    target = devices.target
    compute: list[PredictedCompute] = []
    collectives: list[PredictedCollective] = []
    ends = _ends(rows)
    waits = {name for names in ends.values() for name in names}
    for row in rows:
        if row.category in CONTAINERS or row.name in waits:
            continue
        found = read_part(lambda row=row: _predicted(row, devices, row.occurrences / runs))
        if isinstance(found, PredictedCollective):
            collectives.append(found)
        elif found is not None:
            compute.append(_unpriced(row, found.why) if isinstance(found, Unknown) else found)
    kept = {each.report.name for each in collectives}
    for start, names in ends.items():
        if start not in kept:  # what it waits for is no collective: a copy within the device
            compute += [_unpriced(row, NO_ORDER) for row in rows if row.name in names]
    step = nothing_timed(NO_ORDER if target.chip else NO_CHIP)
    return Prediction(
        schema_version=PREDICTION_VERSION,
        module=rows[0].program or "program",
        model=f"program {rows[0].program}".strip(),
        target=target.name,
        chip=target.chip.name if target.chip else None,
        calibration=target.calibration,
        num_devices=target.num_devices,
        step=step,
        compute=tuple(compute),
        collectives=tuple(_with_ends(each, ends.get(each.report.name, ())) for each in collectives),
        containers=tuple(row.name for row in rows if row.category in CONTAINERS),
        events=(),
    )


_DONE = re.compile(r" [\w\-]+-done\(.*%([\w.\-]+)\)", re.DOTALL)
_FUSED_START, _FUSED_DONE = "async-collective-start", "async-collective-done"  # names of fusions that send and wait
_IN_ONE_CORE = "in_megacore"  # an operation of one core, while the other core runs another one


def _with_ends(collective: PredictedCollective, ends: Sequence[str]) -> PredictedCollective:
    """Returns a collective with the operations that wait for it. How much of it is hidden then depends on their
    order."""
    if not ends:
        return collective
    unknown = Unknown(NO_ORDER)
    report = replace(collective.report, alone_seconds=unknown, hidden_seconds=unknown, exposed_seconds=unknown)
    return collective.model_copy(update={"ends": tuple(ends), "report": report})


def _ends(rows: Sequence[OpRow]) -> dict[str, list[str]]:
    """Returns the operations that wait for another one, by the name of that one."""
    names = {row.name for row in rows}
    ends: dict[str, list[str]] = {}
    for row in rows:
        done = _DONE.search(row.text)
        start = row.name.replace(_FUSED_DONE, _FUSED_START) if row.name.startswith(_FUSED_DONE) else done and done[1]
        if start in names:
            ends.setdefault(start, []).append(row.name)
    return ends


def _predicted(row: OpRow, devices: ProgramDevices, times: float) -> PredictedCompute | PredictedCollective | None:
    """Returns the prediction of an operation that runs this often in a step; None if it takes no time."""
    devices_of_program = devices.target.num_devices
    module = parse_module(line_program(_readable(row, devices_of_program), devices_of_program))
    entry = module.entry_computation
    if entry.root.opcode not in COMPUTING:
        analysis = analyse_program(module, devices)
        if analysis.collectives:
            return _collective(row, analysis, times)
    seconds = _seconds(row, entry, module, devices.target)
    return PredictedCompute(
        name=row.name,
        kind=_kind(row, module),
        source=_source(row),
        seconds=each_known(seconds, lambda each: each * times),
    )


def _collective(row: OpRow, analysis: ScheduleAnalysis, times: float) -> PredictedCollective:
    report = analysis.collectives[0]
    scaled = {
        key: each_known(getattr(report, key), lambda seconds: seconds * times)
        for key in ("alone_seconds", "hidden_seconds", "exposed_seconds")
    }
    latency = analysis.latency_seconds.get(report.name, Unknown(NO_CHIP))
    return PredictedCollective(
        report=replace(report, **scaled, name=row.name, count=max(1, round(times)), bytes=round(report.bytes * times)),
        ends=(),
        latency_seconds=each_known(latency, lambda seconds: seconds * times),
    )


def _seconds(row: OpRow, entry: Computation, module: Module, target: TargetPlan) -> float | Unknown:
    """Returns the time of one execution of an operation."""
    if target.chip is None:
        return Unknown(NO_CHIP)
    chip = chip_of(target)
    if _IN_ONE_CORE in row.name:
        return Unknown("it runs on one core beside another operation")
    if entry.root.opcode == "fusion" and "convolution" in row.category:
        if not row.flops:
            return Unknown(NOT_CALLED)
        peak = chip.peak_flops_per_second.get("bfloat16", math.inf) * chip.matmul_share
        flops = row.flops * target.chip.cores_per_device  # the profiler counts those of one core
        sends = cost_model().sending_matmul if SENDS.search(row.text.partition(" fusion(")[0]) else 1.0
        return (flops / peak + cost_model().matmul_seconds) * sends * chip.factors.get("matmul", 1.0)
    if entry.root.opcode == "fusion" and row.category not in PASSES:
        return Unknown(NOT_CALLED)
    price = price_instruction(entry.root, entry, module, chip)
    return 0.0 if price is None else or_unknown(price.seconds, price.unknown or NOT_CALLED)


def _kind(row: OpRow, module: Module) -> ComputeKind:
    if "convolution" in row.category:
        return "matmul"
    return instruction_kind(module.entry_computation.root, module)


def _source(row: OpRow) -> str:
    """Returns the source of an operation by the name that JAX gave it, else by its category."""
    if not row.op_name:
        return row.category or row.name.split(".")[0]
    named = f"HloModule m\n\nENTRY %e () -> f32[] {{\n  ROOT %{row.name} = f32[] constant(0), metadata={{op_name="
    return source_of_compute(parse_module(f'{named}"{row.op_name}"}}\n}}\n').entry_computation.root)


def _unpriced(row: OpRow, why: str) -> PredictedCompute:
    kind: ComputeKind = "matmul" if "convolution" in row.category else "other"
    return PredictedCompute(name=row.name, kind=kind, source=_source(row), seconds=Unknown(why))


_TYPED = re.compile(r"((?:\w+\[[\d,]*\](?:\{[^}]*\})?))\s+%([\w.\-]+)")
_ARRAY = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")
_PLACE = re.compile(r"s32\[\]\{:T\(128\)(?:S\(6\))?\} %")  # of a layer in a stack, of which the rest is not read
SENDS = re.compile(r"u32\[\]\{:S\(2\)\}")  # the state of a transfer that a matmul goes on with


def _readable(row: OpRow, num_devices: int) -> str:
    """Returns the line of an operation in a form that says what it does without the computation that it calls."""
    if not row.text:
        raise HloError("the table has no text of it")
    head, is_fusion, rest = row.text.partition(" fusion(")
    if is_fusion and row.category == "all-reduce-scatter fusion":
        operands = rest.partition("), kind=")[0]
        groups = ",".join(map(str, range(num_devices)))
        return f"{head} reduce-scatter({operands}), replica_groups={{{{{groups}}}}}, dimensions={{0}}"
    if is_fusion and row.name.startswith(_FUSED_START):
        return _as_collective(row.name, head, rest, num_devices)
    return as_part(row.text) or row.text


def _as_collective(name: str, head: str, rest: str, num_devices: int) -> str:
    """Returns a fusion that starts a transfer as a collective over devices that follow each other: its results are what
    goes in and what comes out."""
    given, made, *_ = _ARRAY.findall(head.partition(" = ")[2])
    sizes = [num_bytes(given), num_bytes(made)]
    size = max(sizes) // min(sizes)
    if max(sizes) % min(sizes) or size < 2 or num_devices % size:
        raise HloError("what it transfers is not in its line")
    kind = "all-gather" if sizes[0] < sizes[1] else "reduce-scatter"
    operand = _TYPED.findall(rest)[0][1]
    groups = f"[{num_devices // size},{size}]<=[{num_devices}]"
    return f"%{name} = {made} {kind}({given} %{operand}), replica_groups={groups}, dimensions={{0}}"


def as_part(text: str) -> str | None:
    """Returns a fusion that only slices a stack or updates it as this slice or update; None for others that read a part
    of a stack, since the text does not say which."""
    head, is_fusion, rest = text.partition(" fusion(")
    if not is_fusion or not _PLACE.search(text):
        return text
    result = head.partition(" = ")[2]
    match _TYPED.findall(rest.partition("), kind=")[0]):
        case [(stack, name), (place, at)] if _rank(stack) == _rank(result):
            return f"{head} dynamic-slice({stack} %{name}, {place} %{at})"
        case [(stack, name), (place, at), (update, new)] if stack == result and _rank(update) == _rank(stack):
            return f"{head} dynamic-update-slice({stack} %{name}, {update} %{new}, {place} %{at})"
        case _:
            return None


def _rank(kind: str) -> tuple[str, int]:
    """Returns the type of an array's elements and the number of its dimensions."""
    return kind.partition("[")[0], kind.partition("]")[0].count(",")


def line_program(text: str, num_devices: int = 4) -> str:
    """Returns a program of one operation, without the computation that it calls: `%a = T op(U %b), calls=%c`."""
    head, _, _ = re.sub(r", (?:calls|to_apply)=%[\w.\-]+|/\*[^*]*\*/", "", text).partition(", metadata=")
    name, _, rest = head.partition(" = ")
    operands = {operand: kind for kind, operand in _TYPED.findall(rest)}
    lines = [f"  %{operand} = {kind} parameter({n})" for n, (operand, kind) in enumerate(operands.items())]
    return "\n".join([f"HloModule m, is_scheduled=true, num_partitions={num_devices}", "",
                      "ENTRY %main () -> f32[] {", *lines, f"  ROOT {name} = {rest}", "}", ""])  # fmt: skip
