"""Explains the plan, for people and as JSON: layouts with reasons, bytes per device, parameters, arithmetic.

A terminal shows the table of a pipeline as a line for each stage:

    stage 0  F0 F1 F2+BW0 F3+BW1 .. 2 more ticks
    stage 1     F0 F1+BW0 F2+BW1
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ..core.console import Column, Console, Line, Table
from ..core.format import counted, human_bytes, human_names
from ..core.known import as_json, or_unknown
from ..core.partition_spec import Axes
from ..estimate.estimate import StepEstimate, estimate_step
from ..estimate.stage_buffers import WHAT, StageBuffer, bytes_in_use
from ..optim.moments import moment_of, owner_of
from ..parallel.operation import OpPlan
from ..parallel.pipeline_plan import PipelinePlan, StageGather
from ..parallel.quantized import SitePrecision
from ..pipeline.table import PipelineOp, PipelineTable, Slot, microbatches
from ..plan import Plan
from ..schema import SCHEMA_VERSION
from ..sharding.arrays import Array
from ..sharding.base_formats import describe_format
from ..sharding.rules import ArrayPlan, rules_as_text
from ..spec.kernel_rates import grouped_kernels
from ..target.placement import Placement
from ..target.target import TargetPlan
from .explain_estimate import estimate_as_json, print_estimate, traffic_as_json, unknown_primitives
from .explain_moments import bytes_by_type, host_lines, moment_lines

COLUMNS = (
    Column("array"),
    Column("dimensions: logical axis, size, mesh axes [rule]", overflow="fold"),
    Column("per device", justify="right"),
)
Row = tuple[str, str | Line, str]  # the cells of COLUMNS
# Figures of a target that count where a run has several slices.
BETWEEN_SLICES = ("network.host_bytes_per_second", "network.host_seconds", "network.slice_wait")


def explain(plan: Plan, console: Console, estimate: StepEstimate | None = None) -> None:
    """Prints the plan: mesh, arrays with reasons, parameters and FLOPs; memory, communication and bounds of a step.
    estimate: the plan's estimate, if it has been made."""
    spec, estimate = plan.spec, estimate or estimate_step(plan)  # work that may fail comes before the first line
    devices = f"{counted(plan.target.num_devices, 'device')} of target {plan.target.described}"
    console.wrapped(("mesh", "bold"), f"  {plan.mesh}, {devices}")
    for axis, where in plan.mesh.placement.describe().items():
        if plan.mesh.placement.is_known:
            speed = plan.mesh.placement.link_of([axis]).bytes_per_second
            bandwidth = f": {speed / 1e9:,.4g} GB/s per device" if speed else ""
            console.wrapped("      ", (axis, "bold cyan"), f" {where}{bandwidth}")
    for axis, why in plan.mesh.reasons.items():
        console.wrapped("      ", (f"{axis}={plan.mesh.sizes[axis]}", "bold cyan"), f" {why}")
    if plan.target.calibration:
        console.wrapped(("calibrated", "bold"), f" {plan.target.calibration.describe()}")
    for text in assumptions(plan.target, spec.precision.compute, plan.mesh.placement, estimate):
        console.wrapped(("assumed", "bold"), f" {text}")
    console.wrapped(
        ("step", "bold"),
        f"  {counted(spec.tokens_per_step, 'token')}: {counted(spec.global_batch_size, 'sequence')} of "
        f"{spec.sequence_length:,}, {counted(spec.num_microbatches, 'microbatch', 'microbatches')}; "
        f"the batch is split {counted(plan.mesh.num_shards(plan.roles.tokens), 'way')}",
    )
    flops = plan.model_flops_per_step
    told = "an unknown number of FLOPs" if flops is None else f"{flops:.4g} FLOPs"
    console.wrapped(("model", "bold"), f" {plan.num_parameters:,} parameters, {told} per step")
    if plan.adapter:
        console.wrapped(("adapter", "bold"), f" {plan.adapter}; the others are frozen")
    for text in base_lines(plan.sharding.parameters):
        console.wrapped(("base", "bold"), f" {text}")
    for one in unknown_primitives(plan, estimate):
        console.wrapped(("unknown", "yellow"), f" {one}")
    for title, how in _operation_lines(plan):
        console.wrapped((title, "bold"), how)
    for text in precision_lines(plan.operations):
        console.wrapped(("precision", "bold"), f" {text}")
    if plan.pipeline:
        console.wrapped(("pipeline", "bold"), f" {plan.pipeline.how}")
        table, counts = plan.pipeline.table, ", ".join(map(str, plan.pipeline.in_flight))
        in_chunks = f" in {table.placement.num_chunks} chunks" if table.placement.num_chunks > 1 else ""
        console.wrapped("  ", f"in flight by stage: {counts} of {microbatches(table.num_microbatches)}{in_chunks}")
        console.wrapped("  ", f"head {plan.pipeline.head.how}")
        if plan.gather:
            console.wrapped("  ", plan.gather.how)
        for text in memory_lines(estimate.stage_buffers):
            console.wrapped("  ", text)
        for line in pipeline_lines(table, console.width):
            console.line(*line)
    if plan.flag_presets:
        console.wrapped(("flags", "bold"), f" {plan.flag_presets}")
    for warning in plan.warnings:
        for line in warning.as_warning().split("\n"):
            console.wrapped((line, "yellow"))
    for title, rules, rows in (
        ("parameters", spec.sharding.parameters, map(_array_row, plan.sharding.parameters)),
        ("optimizer state", spec.sharding.optimizer, _state_rows(plan)),
        ("activations of one microbatch", spec.sharding.activations, map(_array_row, plan.sharding.activations)),
    ):
        console.line()
        console.wrapped((title, "bold"), f"  {rules_as_text(rules)}")
        console.table(Table(COLUMNS, list(rows)))
        if title == "optimizer state":
            declared: int | None = getattr(spec.optimizer, "moment_block", None)
            for text in moment_lines(plan.optimizer_state, plan.model, plan.sharding, plan.mesh, declared):
                console.wrapped("  ", text)
            for text in host_lines(plan.memory.on_host, plan.target):
                console.wrapped("  ", text)
    console.line()
    print_estimate(plan, estimate, console)


def assumptions(target: TargetPlan, dtype: str, placement: Placement, estimate: StepEstimate) -> Iterator[str]:
    """Yields what the prices of a step assume: figures of the target and of kernels that nobody measured, matmuls and
    collectives beyond those that were measured. dtype: the type of its matmuls."""
    grouped = sorted(of for of in estimate.kernels if isinstance(of, str))
    has_attention = len(grouped) < len(estimate.kernels)
    used = {
        "chip.host_link": estimate.memory.host_bytes > 0,
        "chip.attention": has_attention,
        "network.across": target.platform == "gpu" and bool(target.shape) and target.shape[0] > 1,
        **dict.fromkeys(BETWEEN_SLICES, target.num_slices > 1),
    }
    yield from (f"{name}: {what}" for name, what in target.assumed.items() if used.get(name, True))
    if has_attention and target.chip and (what := target.chip.attention.source.assumed):
        yield f"attention as {target.chip.attention.title}: {what}"
    for name in grouped:
        if what := grouped_kernels()[name].source.assumed:
            yield f"grouped matmuls by {name}: {what}"
    matmuls = target.matmul_times()
    if target.platform == "gpu" and target.chip and not (matmuls and matmuls.knows(dtype)):
        yield f"matmuls in {dtype}: {target.chip.kernels.matmul:g} of the peak at every size; none was measured"
    scattered, summed = (
        {one.origin.parameter for one in estimate.communication if one.kind == kind and one.origin} - {""}
        for kind in ("reduce-scatter", "all-reduce")
    )
    source = target.compiler.sources.get("exposed_second_sums")
    if scattered & summed and source and source.assumed:
        yield f"exposed_second_sums: {source.assumed}"
    beyond: dict[tuple[Axes, str], dict[str, None]] = {}
    for one in estimate.communication:
        times = placement.link_of(one.mesh_axes, one.groups).times
        if times and (how := times.beyond_measured(one.kind, one.bytes_each)):
            beyond.setdefault((one.mesh_axes, how), {})[one.kind] = None
    for (axes, how), kinds in beyond.items():
        yield f"{', '.join(kinds)} over {'+'.join(axes)}, from what was measured: {how}"


def base_lines(parameters: Sequence[ArrayPlan]) -> Iterator[str]:
    """Yields how an encoded base of adapters is stored, a line for each format and one for what is not encoded."""
    groups: dict[str, list[ArrayPlan]] = {}
    for each in parameters:
        if each.array.format is not None:
            groups.setdefault(describe_format(each.array.format, each.array.shape), []).append(each)
    for how, plans in groups.items():
        numbers, stored = (sum(f(each.array) for each in plans) for f in (lambda a: math.prod(a.shape), _num_bytes))
        on_device = human_bytes(sum(each.bytes_per_device for each in plans))
        names = human_names([each.array.path for each in plans], 2)
        yield f"{how}: {names}; {on_device} on each device, {stored / numbers:.3f} bytes a number (adapter.base)"
    plain = [each for each in parameters if groups and each.array.updated_by == "nothing" and not each.array.format]
    if not plain:
        return
    types = human_names(sorted({each.array.dtype for each in plain}))
    on_device = human_bytes(sum(each.bytes_per_device for each in plain))
    names = human_names([each.array.path for each in plain], 2)
    yield f"{types}: {names}; {on_device} on each device; no matrices of layers, so they are not encoded"


def _num_bytes(array: Array) -> int:
    return array.num_bytes


def _operation_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields each operation and how it runs at each site. Sites of one name in several pieces share a line if they run
    alike."""
    shown = [each for each in plan.operations if not each.chosen.is_trivial]
    ways: dict[tuple[str, str], set[str]] = {}
    for each in shown:
        ways.setdefault((each.op.kind, each.site.name), set()).add(each.how)
    for op, site, how in dict.fromkeys((each.op, each.site.name, each.how) for each in shown):
        pieces = ", ".join(x.site.piece for x in shown if (x.op, x.site.name, x.how) == (op, site, how))
        where = f" in {pieces}" if len(ways[op.kind, site]) > 1 else ""
        name = "" if site in (op.kind, op.title) else f" {site}"
        yield op.title, f"{name}{where} {how}"


def precision_lines(plans: Sequence[OpPlan]) -> Iterator[str]:
    """Yields each way in which sites multiply, with the sites and the reason; nothing where no rule says one."""
    sites: dict[SitePrecision, list[str]] = {}
    for each in plans:
        if each.precision:
            sites.setdefault(each.precision, []).append(each.site.path)
    for precision, paths in sites.items():
        yield f"{', '.join(paths)}: {precision.how}: {precision.reason}"


def plan_as_json(plan: Plan, *, chosen_here: str | None = None) -> dict[str, Any]:
    """Returns `plan.json`: the same facts for tools. An unknown value is null, with a reason. chosen_here: the line
    that says what was chosen for this machine."""
    target, estimate, flops = plan.target, estimate_step(plan), plan.model_flops
    return as_json(
        {
            "schema_version": SCHEMA_VERSION,
            "target": {
                "name": target.name,
                "chip": target.chip.name if target.chip else None,
                "num_chips": target.num_chips,
                "num_devices": target.num_devices,
                "num_slices": target.num_slices,
                "shape": list(target.shape) if target.shape else None,
                "peak_flops_per_second_per_device": target.peak_flops_per_second,
                "hbm_bytes_per_device": target.hbm_bytes_per_device,
                "calibration": target.calibration.model_dump(mode="json") if target.calibration else None,
            },
            "chosen_here": chosen_here,
            "mesh": dict(plan.mesh.sizes),
            "mesh_reasons": dict(plan.mesh.reasons),
            "flag_presets": list(plan.spec.overlap.flag_presets),
            "placement": {axis: _placed(plan.mesh.placement, axis) for axis in plan.mesh.placement.describe()},
            "assumed": [*assumptions(target, plan.spec.precision.compute, plan.mesh.placement, estimate)],
            "warnings": [{"where": each.where, "what": each.what, "fix": each.fix} for each in plan.warnings],
            "program": {
                "num_parameters": plan.num_parameters,
                "tokens_per_step": plan.spec.tokens_per_step,
                "model_flops_per_step": or_unknown(flops.per_step, flops.why_unknown),
                "saved_seconds": plan.work.saved_seconds,
                "auxiliary": list(plan.auxiliary),
            },
            "pipeline": _pipeline(estimate, plan.pipeline, plan.gather) if plan.pipeline and plan.gather else None,
            "operations": [_operation(each) for each in plan.operations],
            "memory_bytes_per_device": asdict(plan.memory),
            "optimizer_bytes_by_type": bytes_by_type(plan.optimizer_state),
            "estimated": estimate.figures,
            "estimate": estimate_as_json(plan, estimate),
            "arrays": {
                "parameters": [
                    _row(each) | {"is_trained": each.array.is_trained, "updated_by": each.array.updated_by}
                    for each in plan.sharding.parameters
                ],
                "optimizer": [_row(array) for array in plan.optimizer_state],
                "activations": [_row(array) for array in plan.sharding.activations],
            },
        }
    )


def _pipeline(estimate: StepEstimate, plan: PipelinePlan, gather: StageGather) -> dict[str, Any]:
    table = plan.table
    return {
        "schedule": table.name,
        "num_stages": table.placement.num_stages,
        "num_chunks": table.placement.num_chunks,
        "num_microbatches": table.num_microbatches,
        "layers_per_virtual_stage": list(plan.layers.totals),
        "in_flight_by_stage": list(plan.in_flight),
        "buffers": [asdict(each) for each in estimate.stage_buffers],
        "buffer_bytes_in_use_by_stage": list(bytes_in_use(estimate.stage_buffers)),
        "table_bubble_fraction": plan.bubble,
        "ticks": [["+".join(map(slot_text, slots)) for slots in row] for row in table.rows],
        "reason": plan.reason,
        "gather": {"when": gather.when, "reason": gather.reason},
        "head": {"place": plan.head.place, "reason": plan.head.reason},
    }


def _operation(plan: OpPlan) -> dict[str, Any]:
    cost = plan.chosen.cost
    return {
        "operation": plan.op.kind,
        "site": plan.site.name,
        "piece": plan.site.piece,
        "parameters": list(plan.site.parameters),
        "strategy": plan.chosen.name,
        "what": plan.chosen.what,
        "reason": plan.reason,
        "cost": asdict(cost) if cost else None,
        "precision": _precision(plan.precision) if plan.precision else None,
        "collectives": [traffic_as_json(each) for each in plan.chosen.collectives],
        "rejected": [
            {"strategy": each.name, "cost": asdict(each.cost) if each.cost else None, "why_not": each.why_not}
            for each in plan.rejected
        ],
    }


def _precision(precision: SitePrecision) -> dict[str, Any]:
    used = precision.arithmetic
    return {
        "forward": used.forward.name if used else None,
        "gradients": used.gradients.name if used and used.gradients else None,
        "emulated": used.emulated if used else False,
        "gather": precision.gather.name if precision.gather else None,
        "reason": precision.reason,
    }


def _placed(placement: Placement, axis: str) -> dict[str, Any]:
    link = placement.link_of([axis])
    return {
        "where": placement.describe()[axis],
        "parts": [asdict(part) for part in placement.parts.get(axis, ())],
        "link": link.kind,
        "bytes_per_second_per_device": link.bytes_per_second,
        "latency_seconds": link.latency_seconds if link.levels else None,
        **({} if link.levels else {"reason": link.note}),
    }


def _row(plan: ArrayPlan) -> dict[str, Any]:
    array = plan.array
    return {
        "path": array.path,
        "shape": list(array.shape),
        "dtype": array.dtype,
        "format": array.format and describe_format(array.format, array.shape),
        "logical_axes": list(array.logical_axes),
        "spec": [list(entry) if isinstance(entry, tuple) else entry for entry in plan.spec],
        "reason": plan.reason,
        "bytes_per_device": plan.bytes_per_device,
    }


def _shortened(arrays: Sequence[ArrayPlan], alike: Sequence[ArrayPlan], how: str) -> list[Row]:
    """Returns the rows of the table. A set of optimizer state that lies as the arrays `alike` do is one row."""
    rows: list[Row] = []
    paths = {plan.array.path: plan.spec for plan in alike}
    sets: dict[str, list[ArrayPlan]] = {}
    for plan in arrays:
        whole, part = moment_of(plan.array.path)
        owner = owner_of(plan.array.path, paths)
        if owner and plan.spec == paths[owner]:
            name = f"{whole.removesuffix(owner)}*" + (f"/{part}" if part else "")
            sets.setdefault(name, []).append(plan)
        else:
            rows.append(_array_row(plan))
    return rows + [
        (name, f"{len(plans)} arrays, {how}", human_bytes(sum(p.bytes_per_device for p in plans)))
        for name, plans in sets.items()
    ]


def _state_rows(plan: Plan) -> list[Row]:
    """Returns the rows of the optimizer's state. If its rules are not those of the parameters, the rows of one set
    follow."""
    if plan.spec.sharding.optimizer == plan.spec.sharding.parameters:
        return _shortened(plan.optimizer_state, plan.sharding.parameters, "as the parameters")
    rows = _shortened(plan.optimizer_state, plan.sharding.optimizer, "each as its parameter below")
    return rows + [(name, text, "") for name, text, _ in map(_array_row, plan.sharding.optimizer)]


def _array_row(plan: ArrayPlan) -> Row:
    return plan.array.path, _dimensions(plan), human_bytes(plan.bytes_per_device)


def _dimensions(plan: ArrayPlan) -> Line:
    """Returns the layout of an array, 'layers 4 [1] embed 128 fsdp [0]': logical axis, size, mesh axes, rule."""
    line: Line = []
    notes = {d.note for d in plan.dimensions}
    shared = notes.pop() if len(notes) == 1 else ""  # printed once, after all dimensions
    for d in plan.dimensions:
        line += ["  " * bool(line), f"{d.logical or ''} {d.size:,}".strip()]
        if d.axes:
            line += [" ", ("+".join(d.axes), "bold cyan")]
        if d.rule is not None:
            line += [" ", (f"[{d.rule}]", "dim")]
        if d.note and not shared:
            line.append(f" ({d.note})")
    line += [f"  ({shared})"] if shared else []
    by = {"optimizer": [], "rule": ["  updated by a rule"], "nothing": ["  ", ("frozen", "yellow")]}
    line += by[plan.array.updated_by]
    return [*line, f"  {plan.array.format.element}"] if plan.array.format else line


MOST_STAGES = 16
STYLES = {
    PipelineOp.FORWARD: "blue",
    PipelineOp.RECOMPUTE: "dim",
    PipelineOp.INPUT_GRADIENT: "cyan",
    PipelineOp.BACKWARD: "cyan",
    PipelineOp.WEIGHT_GRADIENT: "green",
}


def pipeline_lines(table: PipelineTable, width: int) -> list[Line]:
    """Returns the lines of a table, with as many ticks as the width has room for. A later chunk is behind a dot."""
    stages = range(min(table.placement.num_stages, MOST_STAGES))
    names = [f"  stage {stage}" for stage in stages]
    room = width - len(names[-1]) - len(_more(table.num_ticks))
    lines: list[Line] = [[name.ljust(len(names[-1]))] for name in names]
    for tick, row in enumerate(table.rows):
        cells = [[(slot_text(slot), STYLES[slot.op]) for slot in row[stage]] for stage in stages]
        lengths = [sum(len(text) for text, _ in cell) + len(cell) - 1 if cell else 0 for cell in cells]
        room -= 1 + max(lengths)
        if room < 0:
            lines[0].append((_more(table.num_ticks - tick), "dim"))
            break
        for line, cell, length in zip(lines, cells, lengths, strict=True):
            line.append(" ")
            for number, part in enumerate(cell):
                line += ["+", part] if number else [part]
            line.append(" " * (max(lengths) - length))
    for line in lines:
        while isinstance(line[-1], str) and not line[-1].strip():
            line.pop()
    if (left := table.placement.num_stages - MOST_STAGES) > 0:
        lines.append([(f"  .. {counted(left, 'more stage')}", "dim")])
    return lines


def memory_lines(buffers: tuple[StageBuffer, ...]) -> Iterator[str]:
    """Yields what each buffer of the stages holds and takes, and what each stage uses of them."""
    for each in buffers:
        slots, of_one = counted(each.num_slots, "slot"), human_bytes(each.slot_bytes)
        used = ", ".join(map(str, each.in_use))
        yield f"{each.name}, {WHAT[each.name]}: {slots} of {of_one} on each stage; in use by stage: {used}"
    if buffers:
        allocated = human_bytes(sum(each.allocated_bytes for each in buffers))
        used = ", ".join(map(human_bytes, bytes_in_use(buffers)))
        yield f"buffers: {allocated} on each stage; in use at most, by stage: {used}"


def slot_text(slot: Slot) -> str:
    """Returns a slot as `F0`, or as `F0.1` for the second chunk."""
    return f"{slot.op}{slot.microbatch}" + (f".{slot.chunk}" if slot.chunk else "")


def _more(count: int) -> str:
    return f" .. {counted(count, 'more tick')}"
