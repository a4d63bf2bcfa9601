"""The embedding lookup: how rows of a table reach the tokens.

A table whose columns are split over devices that have different tokens need not be whole anywhere. Each device looks up
its columns for the tokens of all of them, and an all-to-all gives each the rows of its own tokens. Backward, gradients
of rows return, instead of the gradient of the whole table:

    all_gather    all-gather of the table                    reduce-scatter of its gradient
    all_to_all    all-to-all of the rows of local tokens     all-to-all of their gradients
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from ..core.format import human_bytes, human_seconds
from ..core.partition_spec import Axes
from ..core.scopes import rows_scope
from ..sharding.arrays import OpSite
from ..sharding.roles import AxisRoles
from ..sharding.rules import ArrayPlan
from ..sharding.sharding import accumulated_layouts, gathered_bytes
from .operation import Cost, Lowered, OpInputs, OpPlan, ParallelOp, Refusal, Strategy, WeightUse, moved, refused

EMBED = "embed"  # the piece
ALL_GATHER, ALL_TO_ALL = "all_gather", "all_to_all"


class EmbeddingOp(ParallelOp):
    kind = "embedding"
    title = "embedding"
    names = (ALL_GATHER, ALL_TO_ALL)
    fallback = ALL_GATHER

    def strategies(self, site: OpSite, inputs: OpInputs) -> Sequence[Strategy]:
        spec, mesh, roles = inputs.spec, inputs.mesh, inputs.roles
        if not site.operands[0].parameters or site.piece != EMBED:
            refusal = "its table is not a parameter of the embedding"
            whole = Strategy(ALL_GATHER, "table read whole", (), is_trivial=True)
            return Strategy(ALL_TO_ALL, "", refusal=Refusal(refusal)), whole
        table = _layout(inputs.sharding.parameters, site)
        rows, columns = _over_tokens(table, roles)
        refusal = refused(_refusal(site, inputs, rows, columns))
        table_bytes = gathered_bytes(table, mesh, roles)
        itemsize = jnp.dtype(spec.precision.compute).itemsize
        rows_bytes = inputs.batch.tokens_of_device * table.array.shape[1] * itemsize
        axes = rows + columns
        num_shards = mesh.num_shards(columns)
        seconds = (
            mesh.alone_seconds("all-to-all", rows_bytes * num_shards, columns),
            mesh.alone_seconds("all-gather", table_bytes, axes),
        )
        costs, figures = _compared(rows_bytes, table_bytes, *seconds)
        ids_bytes = inputs.batch.tokens_of_device * num_shards * 4  # int32
        exchanged = (
            moved("all-gather", columns, num_shards, ids_bytes, 1, "forward"),
            moved("all-to-all", columns, num_shards, rows_bytes * num_shards, 1, "forward"),
            moved("all-to-all", columns, num_shards, rows_bytes * num_shards, 1, "backward"),
        )
        gathered = (
            moved("all-gather", axes, mesh.num_shards(axes), table_bytes, 1, "forward"),
            moved("reduce-scatter", axes, mesh.num_shards(axes), table_bytes, 1, "backward"),
        )
        over = " and ".join(columns)
        return (
            Strategy(
                ALL_TO_ALL, f"rows exchanged over {over}", columns, exchanged, costs[0], figures, refusal=refusal,
                weights="sharded",
            ),
            Strategy(ALL_GATHER, "table read whole", (), gathered if axes else (), costs[1], figures),
        )  # fmt: skip

    def lower(self, plan: OpPlan) -> Lowered | None:
        if plan.chosen.weights == "gathered":
            return None

        return lambda table, ids: exchange_rows(table, ids, plan.chosen.parameters)

    def weight_use(self, plan: OpPlan, weight: ArrayPlan) -> WeightUse | None:
        return plan.chosen.weights if weight.array.path in plan.site.parameters else None

    def scope(self, plan: OpPlan) -> str | None:
        """Returns the scope of exchanged rows. The collectives of a table that is gathered have the table's name."""
        return None if plan.chosen.weights == "gathered" else rows_scope(plan.site.parameters[0])


def _layout(plans: Sequence[ArrayPlan], site: OpSite) -> ArrayPlan:
    return next(plan for plan in plans if plan.array.path == site.parameters[0])


def _over_tokens(plan: ArrayPlan, roles: AxisRoles) -> tuple[Axes, ...]:
    return tuple(tuple(axis for axis in d.axes if axis in roles.tokens) for d in plan.dimensions)


def _refusal(site: OpSite, inputs: OpInputs, rows: Axes, columns: Axes) -> str | None:
    """Returns why rows cannot be exchanged; None where they can."""
    sharding = inputs.sharding
    accumulated = _over_tokens(_layout(accumulated_layouts(inputs.spec, sharding), site), sharding.roles)
    if not rows and not columns:
        return "no axis that splits the batch splits the table"
    if rows:
        return f"its rows are split over {' and '.join(rows)}"
    if accumulated != (rows, columns):
        return "its gradient is split more than it is"
    if _layout(sharding.parameters, site).array.is_tied:
        return "the head multiplies with all of it"
    if site.operands[1].shape[0] == 1:
        return "its rows are those of positions, the same for every sequence"
    return None


def _compared(
    rows_bytes: int, table_bytes: int, for_rows: float | None, for_table: float | None
) -> tuple[tuple[Cost, Cost], str]:
    """Returns the costs of exchanged rows and of a gathered table: seconds on the links, or bytes where those are not
    known."""
    figures = f"{human_bytes(rows_bytes)} of rows, {human_bytes(table_bytes)} of table"
    if for_rows is None or for_table is None:
        return (Cost(rows_bytes, "bytes"), Cost(table_bytes, "bytes")), figures
    on_links = f"{human_seconds(for_rows)} and {human_seconds(for_table)} on the links"
    return (Cost(for_rows, "seconds"), Cost(for_table, "seconds")), f"{figures}; {on_links}"


def exchange_rows(columns: Array, ids: Array, axes: Axes) -> Array:
    """Returns whole rows (batch, ..., columns) of a table for this device's ids. columns: (rows, columns / n), those
    of this device of n along `axes`. ids: (batch, ...). The gradient of a row that many tokens use is summed in
    float32."""
    every_id = jax.lax.all_gather(ids, axes, axis=0, tiled=True)
    found = columns.astype(jnp.float32)[every_id].astype(columns.dtype)
    return jax.lax.all_to_all(found, axes, split_axis=0, concat_axis=found.ndim - 1, tiled=True)
