"""The plan in words: what lies where and why, bytes per device, parameters, arithmetic. For people and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from .array_layout import ArrayPlan
from .estimate import estimate_step
from .explain_estimate import estimate_as_json, print_estimate
from .plan import Plan
from .report import SCHEMA_VERSION
from .spec import Rule
from .units import human_bytes


def explain(plan: Plan, console: Console) -> None:
    """Print the plan: mesh, arrays with reasons, parameters and FLOPs; memory, communication and bounds of a step."""
    spec = plan.spec
    console.print(f"[bold]mesh[/]  {plan.mesh}, {plan.target.num_devices:,} devices of target {plan.target.name}")
    for axis, where in plan.mesh.placement.describe().items():
        if plan.mesh.placement.is_known:
            console.print(f"      [bold cyan]{axis}[/] {where}{_bandwidth(plan, axis)}", highlight=False)
    console.print(
        f"[bold]step[/]  {spec.tokens_per_step:,} tokens: {spec.global_batch_size:,} sequences of "
        f"{spec.sequence_length:,}, {spec.num_microbatches} microbatch{'es' if spec.num_microbatches > 1 else ''}; "
        f"the batch is split {plan.mesh.num_shards(plan.sharding.batch_axes):,} ways"
    )
    console.print(f"[bold]model[/] {plan.num_parameters:,} parameters, {plan.model_flops_per_step:.4g} FLOPs per step")
    blocks = f"in {plan.num_loss_blocks} blocks of tokens" if plan.num_loss_blocks > 1 else "of all tokens at once"
    console.print(f"[bold]attention[/] by {plan.attention.implementation}: {plan.attention.reason}; logits {blocks}")
    for each in plan.look_ups:
        console.print(f"[bold]embedding[/] {each.name} {each.how}", highlight=False)
    for each in plan.projections:
        if each.split_over:
            console.print(f"[bold]matmul[/] {each.how}", highlight=False)
    console.print(f"[bold]head[/] {plan.head.how}", highlight=False)
    for warning in plan.sharding.warnings:
        console.print(warning.as_warning(), style="yellow", markup=False, highlight=False, soft_wrap=True)
    for title, rules, rows in (
        ("parameters", spec.sharding.parameters, map(_array_row, plan.sharding.parameters)),
        ("optimizer state", spec.sharding.optimizer, _state_rows(plan)),
        ("activations of one microbatch", spec.sharding.activations, map(_array_row, plan.sharding.activations)),
    ):
        console.print()
        console.print(f"[bold]{title}[/]  {_rules(rules)}", highlight=False)
        console.print(_table(list(rows)))
    console.print()
    print_estimate(plan, estimate_step(plan), console)


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """`plan.json`: the same facts for tools. Unknown is null, with a reason."""
    target = plan.target
    return {
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
        },
        "mesh": dict(plan.mesh.sizes),
        "placement": {axis: _placed(plan, axis) for axis in plan.mesh.placement.describe()},
        "warnings": [asdict(warning) for warning in plan.sharding.warnings],
        "program": {
            "num_parameters": plan.num_parameters,
            "tokens_per_step": plan.spec.tokens_per_step,
            "model_flops_per_step": plan.model_flops_per_step,
            "attention": asdict(plan.attention),
            "look_ups": [asdict(each) for each in plan.look_ups],
            "projections": [asdict(each) for each in plan.projections],
            "head": asdict(plan.head),
            "num_loss_blocks": plan.num_loss_blocks,
        },
        "memory_bytes_per_device": asdict(plan.memory),
        "estimate": estimate_as_json(estimate_step(plan)),
        "arrays": {
            "parameters": [_row(array) for array in plan.sharding.parameters],
            "optimizer": [_row(array) for array in plan.optimizer_state],
            "activations": [_row(array) for array in plan.sharding.activations],
        },
    }


def _bandwidth(plan: Plan, axis: str) -> str:
    link = plan.mesh.placement.link_of([axis])
    return f": {link.bytes_per_second / 1e9:,.4g} GB/s per device" if link.bytes_per_second else ""


def _placed(plan: Plan, axis: str) -> dict[str, Any]:
    placement = plan.mesh.placement
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
        "logical_axes": list(array.logical_axes),
        "spec": [list(entry) if isinstance(entry, tuple) else entry for entry in plan.spec],
        "reason": plan.reason,
        "bytes_per_device": plan.bytes_per_device,
    }


def _rules(rules: Sequence[Rule]) -> str:
    """The rules that the numbers in the table stand for."""
    parts = (f"{', '.join(rule.logical)} -> {', '.join(rule.mesh) or 'whole'}" for rule in rules)
    return "; ".join(f"\\[{index}] {part}" for index, part in enumerate(parts))


def _shortened(arrays: Sequence[ArrayPlan], alike: Sequence[ArrayPlan]) -> list[tuple[str, str, str]]:
    """Rows of the table. A set of optimizer state that lies as the arrays `alike` do is one row."""
    rows, paths = [], {plan.array.path: plan.spec for plan in alike}
    sets: dict[str, list[ArrayPlan]] = {}
    for plan in arrays:
        owner = next((path for path in paths if plan.array.path.endswith(f"/{path}")), None)
        if owner and plan.spec == paths[owner]:
            sets.setdefault(plan.array.path.removesuffix(owner), []).append(plan)
        else:
            rows.append(_array_row(plan))
    return rows + [
        (f"{prefix}*", f"{len(plans)} arrays, as the parameters", human_bytes(sum(p.bytes_per_device for p in plans)))
        for prefix, plans in sets.items()
    ]


def _state_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """The optimizer's state. Where its rules are not those of the parameters, one set shows what they say."""
    if plan.spec.sharding.optimizer == plan.spec.sharding.parameters:
        return _shortened(plan.optimizer_state, plan.sharding.parameters)
    rows = _shortened(plan.optimizer_state, plan.sharding.optimizer)
    rows = [(name, text.replace("as the parameters", "each as its parameter below"), size) for name, text, size in rows]
    return rows + [(name, text, "") for name, text, _ in map(_array_row, plan.sharding.optimizer)]


def _array_row(plan: ArrayPlan) -> tuple[str, str, str]:
    return plan.array.path, _dimensions(plan), human_bytes(plan.bytes_per_device)


def _dimensions(plan: ArrayPlan) -> str:
    """'layers 4 [1]  embed 128 fsdp [0]': logical axis, size, mesh axes, rule."""
    parts = []
    notes = {d.note for d in plan.dimensions}
    shared = notes.pop() if len(notes) == 1 else ""  # said once, behind all dimensions
    for d in plan.dimensions:
        axes = f" [bold cyan]{'+'.join(d.axes)}[/]" if d.axes else ""
        rule = f" [dim]\\[{d.rule}][/]" if d.rule is not None else ""
        parts.append(f"{d.logical or ''} {d.size:,}{axes}{rule}" + (f" ({d.note})" if d.note and not shared else ""))
    return "  ".join(part.strip() for part in parts) + (f"  ({shared})" if shared else "")


def _table(rows: Sequence[tuple[str, str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("array", no_wrap=True)
    table.add_column("dimensions: logical axis, size, mesh axes \\[rule]", overflow="fold")
    table.add_column("per device", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
