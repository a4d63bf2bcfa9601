"""The plan in words: what lies where and why, bytes per device, parameters, arithmetic. For people and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from .plan import Plan
from .sharding import ArrayPlan

SCHEMA_VERSION = 1
ACTIVATIONS_UNKNOWN = "what the backward pass keeps is known from the compiled program"


def explain(plan: Plan, console: Console) -> None:
    """Print the plan: mesh, arrays with reasons, memory by class, parameters and FLOPs."""
    spec = plan.spec
    console.print(f"[bold]mesh[/]  {plan.mesh}, {plan.target.num_devices:,} devices of target {plan.target.name}")
    console.print(
        f"[bold]step[/]  {spec.tokens_per_step:,} tokens: {spec.global_batch_size:,} sequences of "
        f"{spec.sequence_length:,}, {spec.num_microbatches} microbatch{'es' if spec.num_microbatches > 1 else ''}; "
        f"the batch is split {plan.mesh.num_shards(plan.sharding.batch_axes):,} ways"
    )
    console.print(f"[bold]model[/] {plan.num_parameters:,} parameters, {plan.model_flops_per_step:.4g} FLOPs per step")
    console.print()
    for title, arrays in (
        ("parameters", plan.sharding.parameters),
        ("optimizer state", plan.optimizer_state),
        ("activations of one microbatch", plan.sharding.activations),
    ):
        console.print(_table(title, arrays))
        console.print()
    console.print(_memory(plan))


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """`plan.json`: the same facts for tools. Unknown is null, with a reason."""
    return {
        "schema_version": SCHEMA_VERSION,
        "target": {
            "name": plan.target.name,
            "num_devices": plan.target.num_devices,
            "hbm_bytes_per_device": plan.target.hbm_bytes_per_device,
        },
        "mesh": dict(plan.mesh.sizes),
        "program": {
            "num_parameters": plan.num_parameters,
            "tokens_per_step": plan.spec.tokens_per_step,
            "model_flops_per_step": plan.model_flops_per_step,
        },
        "memory_bytes_per_device": _memory_rows(plan) | {"activations_reason": ACTIVATIONS_UNKNOWN},
        "arrays": {
            "parameters": [_row(array) for array in plan.sharding.parameters],
            "optimizer": [_row(array) for array in plan.optimizer_state],
            "activations": [_row(array) for array in plan.sharding.activations],
        },
    }


def human_bytes(count: int) -> str:
    """1536 -> '1.5 KiB'."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


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


def _table(title: str, arrays: Sequence[ArrayPlan]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name, justify in (
        ("array", "left"),
        ("shape", "left"),
        ("type", "left"),
        ("spec", "left"),
        ("per device", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("why", overflow="fold")
    for plan in arrays:
        shape = " x ".join(f"{size:,}" for size in plan.array.shape)
        spec = ", ".join(_entry(entry) for entry in plan.spec)
        table.add_row(plan.array.path, shape, plan.array.dtype, spec, human_bytes(plan.bytes_per_device), plan.reason)
    return table


def _entry(entry: Any) -> str:
    return "-" if entry is None else entry if isinstance(entry, str) else "+".join(entry)


def _memory_rows(plan: Plan) -> dict[str, int | None]:
    memory = plan.memory
    return {
        "parameters": memory.parameters,
        "optimizer": memory.optimizer,
        "gradients": memory.gradients,
        "working_parameters": memory.working_parameters,
        "batch": memory.batch,
        "activations": memory.activations,
    }


def _memory(plan: Plan) -> Table:
    table = Table(title="memory per device", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("class", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for name, count in _memory_rows(plan).items():
        shown = human_bytes(count) if count is not None else "unknown"
        table.add_row(name.replace("_", " "), shown, "" if count is not None else ACTIVATIONS_UNKNOWN)
    table.add_row("[bold]known", f"[bold]{human_bytes(plan.memory.known_bytes)}")
    return table
