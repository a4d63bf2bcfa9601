"""How rows of a table reach the tokens: the whole table is gathered, or rows are exchanged.

A table whose columns are split over devices that have different tokens need not be whole anywhere. Each device looks up
its columns for the tokens of all of them, and an all-to-all gives each the rows of its own tokens. Back go gradients of
rows, instead of the gradient of the whole table:

    gathered     all-gather of the table                     reduce-scatter of its gradient
    exchanged    all-to-all of the rows of local tokens      all-to-all of their gradients
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.models import Model

from ..config.spec import RunSpec
from ..core.errors import ConfigError, Problem
from ..core.format import human_bytes, human_seconds
from ..core.scopes import rows_scope
from ..sharding.batch import tokens_of_device
from ..sharding.gradients import accumulated_layouts
from ..sharding.rules import ArrayPlan
from ..sharding.sharding import ShardingPlan, gathered_bytes
from ..target.mesh import MeshPlan

Axes = tuple[str, ...]


@dataclass(frozen=True)
class LookUpPlan:
    """name: of the embedding's parameter that is the table. exchanged_over: mesh axes; none where it is gathered."""

    name: str
    exchanged_over: Axes
    reason: str

    @property
    def how(self) -> str:
        """In words: what reaches the tokens, and why."""
        what = f"rows exchanged over {' and '.join(self.exchanged_over)}" if self.exchanged_over else "read whole"
        return f"{what}: {self.reason}"


def plan_look_ups(
    spec: RunSpec, model: Model, names: Sequence[str], sharding: ShardingPlan, mesh: MeshPlan
) -> tuple[LookUpPlan, ...]:
    """For each table that the embedding looks up. Raises ConfigError where `sharding.look_up=exchange` cannot be."""
    made = tuple(_plan_look_up(spec, model, name, sharding, mesh) for name in names)
    if spec.sharding.look_up == "exchange" and not any(each.exchanged_over for each in made):
        whys = [f"'embed/{each.name}': {each.reason}" for each in made] or ["the model looks nothing up by its context"]
        fix = "set sharding.look_up=auto, or gather"
        raise ConfigError([Problem("sharding.look_up", f"no rows can be exchanged: {'; '.join(whys)}", fix)])
    return made


def _plan_look_up(spec: RunSpec, model: Model, name: str, sharding: ShardingPlan, mesh: MeshPlan) -> LookUpPlan:
    path = f"embed/{name}"
    stored, accumulated = (
        next(plan for plan in plans if plan.array.path == path)
        for plans in (sharding.parameters, accumulated_layouts(spec, sharding))
    )
    (rows, columns), (of_rows, of_columns) = (_manual(plan, sharding.batch_axes) for plan in (stored, accumulated))
    if not rows and not columns:
        return LookUpPlan(name, (), "no axis that splits the batch splits it")
    if spec.sharding.look_up == "gather":
        return LookUpPlan(name, (), "sharding.look_up=gather")
    if rows:
        return LookUpPlan(name, (), f"its rows are split over {' and '.join(rows)}")
    if (of_rows, of_columns) != (rows, columns):
        return LookUpPlan(name, (), "its gradient is split more than it is")
    if name in model.tied.values():
        return LookUpPlan(name, (), "the head multiplies with all of it")
    is_shorter, reason = _compared(spec, stored, columns, mesh)
    is_exchanged = is_shorter or spec.sharding.look_up == "exchange"
    return LookUpPlan(name, columns if is_exchanged else (), reason)


def _manual(plan: ArrayPlan, batch_axes: Axes) -> tuple[Axes, ...]:
    return tuple(tuple(axis for axis in d.axes if axis in batch_axes) for d in plan.dimensions)


def _compared(spec: RunSpec, table: ArrayPlan, axes: Axes, mesh: MeshPlan) -> tuple[bool, str]:
    """Whether rows take less than the table, and the figures: seconds on the links, bytes where those are not known."""
    itemsize = jnp.dtype(spec.precision.compute).itemsize
    table_bytes = gathered_bytes(table, spec, mesh)
    rows_bytes = tokens_of_device(spec, mesh) * table.array.shape[1] * itemsize
    reason = f"{human_bytes(rows_bytes)} of rows, {human_bytes(table_bytes)} of table"
    for_rows = mesh.alone_seconds("all-to-all", rows_bytes * mesh.num_shards(axes), axes)
    for_table = mesh.alone_seconds("all-gather", table_bytes, axes)
    if for_rows is None or for_table is None:
        return rows_bytes < table_bytes, reason
    return for_rows < for_table, f"{reason}; {human_seconds(for_rows)} and {human_seconds(for_table)} on the links"


def build_look_up(plans: Sequence[LookUpPlan]) -> Callable[[str, Array, Array], Array]:
    """`Context.look_up` of a step that is manual over the batch axes."""
    axes = {each.name: each.exchanged_over for each in plans if each.exchanged_over}

    def look_up(name: str, table: Array, ids: Array) -> Array:
        if name not in axes:
            return table[ids]
        with jax.named_scope(rows_scope(f"embed/{name}")):
            return exchange_rows(table, ids, axes[name])

    return look_up


def exchange_rows(columns: Array, ids: Array, axes: Axes) -> Array:
    """Whole rows of a table for this device's ids. columns: (rows, columns / n), this device's of n along `axes`. ids:
    (batch, ...). Returns (batch, ..., columns). The gradient of a row that many tokens use is summed in float32."""
    every_id = jax.lax.all_gather(ids, axes, axis=0, tiled=True)
    found = columns.astype(jnp.float32)[every_id].astype(columns.dtype)
    return jax.lax.all_to_all(found, axes, split_axis=0, concat_axis=found.ndim - 1, tiled=True)
