"""How each weight is stored, gathered, reduced and updated: decided with the plan, done by weights.py."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from ..core.partition_spec import STAGE, Axes, axes_of
from ..core.scopes import weight_scope
from ..formats.block import BlockFormat
from ..formats.element import element_formats
from ..sharding.arrays import EXPERTS
from ..sharding.roles import AxisRoles
from ..sharding.rules import ArrayPlan
from ..sharding.sharding import accumulated_layouts
from .encodings import Encoding
from .operation import OpInputs, OpPlan
from .pipeline_plan import StageGather

Use = Literal["gathered", "hoisted", "held", "chunked", "sharded"]
ShardedDims = tuple[tuple[int, Axes], ...]  # (dimension, the mesh axes that it is split over), for each that is


@dataclass(frozen=True)
class WeightPlan:
    """How one parameter is stored and used, its gradient accumulated, and its update split, over the axes of tokens.

    path: that of the parameter. use: how a piece gets at it:
        gathered  whole, gathered where the piece, or the layer, begins
        hoisted   gathered for all layers of a stack before their loop: a short collective in a layer waits for the
                  long ones that have begun before it, and a pipeline may gather once per step (pipeline_plan.py)
        held      gathered likewise, while its gradient is reduced in each layer, to the layout of the update
        chunked   gathered in chunks along the vocabulary (lm_head.py)
        sharded   as this device's shard: it is whole already, or an operation works on shards (embedding.py)

    gathered: dimensions whose shards are gathered for use. scattered: dimensions over which a gradient is
    reduce-scattered as soon as it is made. Both as a layer sees them; what follows is with the dimension `layers`, the
    first one where `is_stacked`. split_early: what `scattered` splits more than `gathered` gathers.
    split_late: what the update splits more than that, reduce-scattered once per step. reduced: the batch axes over
    which every device updates the same shard: its gradient is summed over them once per step. is_trained: False for a
    frozen parameter, which is gathered as ever, and has no gradient and no update.
    auto_spec, auto_stored_spec: the part of its layout that is over `partitioner`, the axes that XLA's partitioner
    splits, and is XLA's to keep: as a layer sees it, and with the dimension `layers`.
    encoding: how it is stored, gathered and used.
    tile_rows: the rows of the compiler's tiles (CompilerTraits). is_all_reduced: the compiler all-reduces the gradient
    that the step reduce-scatters (`CompilerTraits.all_reduces`).
    over_stages: the dimension that the stages of a pipeline split, with the dimension `layers`; of a head that they
    share its vocabulary (shared_head.py); None for none.
    """

    path: str
    use: Use
    gathered: ShardedDims
    scattered: ShardedDims
    split_early: ShardedDims
    split_late: ShardedDims
    reduced: Axes
    is_stacked: bool
    is_trained: bool
    auto_spec: PartitionSpec
    auto_stored_spec: PartitionSpec
    partitioner: Axes
    encoding: Encoding
    tile_rows: int
    is_all_reduced: bool = False
    over_stages: int | None = None

    @property
    def is_reduced_once(self) -> bool:
        """Returns True where a part of the gradient's reduction is left for once per step."""
        return bool(self.reduced or self.split_late)

    def has_collective_in_backward(self, *, is_last: bool) -> bool:
        """Returns True where a backward pass reduces the gradient over devices. is_last: the pass is the last of a
        step."""
        return bool(self.scattered) or (is_last and self.is_reduced_once)

    @property
    def scope(self) -> Any:
        """Returns a context in which operations carry the parameter's path: the schedule's report reads it off them."""
        return jax.named_scope(weight_scope(self.path))


def plan_weights(inputs: OpInputs, operations: Sequence[OpPlan], gather: StageGather | None) -> dict[str, WeightPlan]:
    """Returns a WeightPlan for every parameter, by path. operations: what the plan chose, which decides how weights are
    used. gather: when stages gather; None without stages."""
    sharding, model = inputs.sharding, inputs.model
    stacks = {stack.name for stack in model.stacks}
    accumulated = accumulated_layouts(inputs.spec, sharding)
    updated = {each.array.path: each for each in sharding.optimizer}
    sent, multiplied, plans = _sent(operations), _multiplied(operations), {}
    for p, g in zip(sharding.parameters, accumulated, strict=True):
        path, is_stacked = p.array.path, p.array.path.split("/")[0] in stacks
        u = updated.get(path, p)
        kept = [index for index, d in enumerate(p.dimensions) if d.logical == EXPERTS]
        made = plan_weight(
            path,
            p.spec,
            g.spec,
            u.spec,
            sharding.roles,
            is_stacked=is_stacked,
            kept=kept,
            encoding=_encoding(p, sent.get(path), sharding.roles, is_multiplied=path in multiplied),
            tile_rows=inputs.target.compiler.tile_rows,
        )
        used = _used(made if p.array.is_trained else frozen(made), p, inputs, operations, gather)
        plans[path] = replace(used, is_all_reduced=_is_all_reduced(used, p, inputs))
    return plans


def _is_all_reduced(weight: WeightPlan, stored: ArrayPlan, inputs: OpInputs) -> bool:
    over, sizes = dict(weight.scattered), stored.array.shape[weight.is_stacked :]
    if not over or weight.use == "chunked":  # chunks are of sizes that are scattered (lm_head.py)
        return False
    whole = [size for dimension, size in enumerate(sizes) if dimension not in over]
    num_devices = math.prod(inputs.mesh.num_shards(axes) for axes in over.values())
    return inputs.target.compiler.all_reduces(num_devices, whole)


def _sent(operations: Sequence[OpPlan]) -> dict[str, BlockFormat]:
    """Returns the formats of the weights that are written in few bits before they are gathered, by path."""
    return {
        path: each.precision.gather.of(len(weight.shape), each.op.summed_dims(each.site))
        for each in operations
        if each.precision and each.precision.gather
        for weight in each.op.multiplied(each.site)
        for path in weight.parameters
    }


def _multiplied(operations: Sequence[OpPlan]) -> set[str]:
    """Returns the paths of weights whose elements are multiplied as they are gathered, at every site."""
    takes = {
        (path, bool(each.precision and each.precision.gather and each.precision.arithmetic))
        for each in operations
        for path in each.site.parameters
    }
    return {path for path, _ in takes} - {path for path, is_taken in takes if not is_taken}


def _encoding(p: ArrayPlan, sent: BlockFormat | None, roles: AxisRoles, *, is_multiplied: bool) -> Encoding:
    array = p.array
    if array.format is not None:
        return Encoding(array.dtype, array.dtype, array.compute_dtype, array.format, array.shape)
    made = Encoding(array.dtype, array.compute_dtype, array.compute_dtype)
    if sent is None:
        return made
    own = p.dimensions[-len(sent.block) :]
    shared = (axis for d, size in zip(own, sent.block, strict=True) if size is None for axis in d.axes)
    shared = tuple(axis for axis in shared if axis in roles.manual)
    travel = element_formats()[sent.element].dtype
    return replace(made, travel=travel, shape=array.shape, sent=sent, shared=shared, is_multiplied=is_multiplied)


def frozen(plan: WeightPlan) -> WeightPlan:
    """Returns the plan for a parameter that is not trained: nothing is reduced, updated or assembled."""
    return replace(plan, scattered=(), split_early=(), split_late=(), reduced=(), is_trained=False)


def _used(
    made: WeightPlan, stored: ArrayPlan, inputs: OpInputs, operations: Sequence[OpPlan], gather: StageGather | None
) -> WeightPlan:
    """Returns the plan of a weight, with how it is used."""
    if not made.gathered:
        return made
    wanted = {each.op.weight_use(each, stored) for each in operations}
    if "sharded" in wanted:
        return replace(made, use="sharded", gathered=(), scattered=())
    if "chunked" in wanted:
        return replace(made, use="chunked")
    is_vector = made.is_stacked and len(stored.array.shape) == 2  # the first dimension is `layers`
    if is_vector and not inputs.target.compiler.unordered_collectives:
        return replace(made, use="hoisted")
    if made.is_stacked and gather is not None and gather.when == "step":
        return replace(made, use="held" if inputs.spec.sharding.gradients == "optimizer" else "hoisted")
    return made


def plan_weight(
    path: str,
    stored: PartitionSpec,
    accumulated: PartitionSpec,
    updated: PartitionSpec,
    roles: AxisRoles,
    *,
    is_stacked: bool,
    encoding: Encoding,
    kept: Sequence[int] = (),
    tile_rows: int = 1,
) -> WeightPlan:
    """All three P(None, 'fsdp', 'tensor') with the batch over (data, fsdp), stacked -> gather and scatter dimension 0
    over fsdp, reduce over data, leave dimension 1 to XLA over tensor.

    Each layout splits every dimension over what the one before it does, and maybe more behind that (sharding.py).
    kept: dimensions that an operation uses in shards (experts.py): tokens are brought to them, so that they are not
    gathered, and a gradient is made of the tokens of all devices that share them.
    """
    manual = [
        [tuple(axis for axis in axes_of(entry) if axis in roles.tokens) for entry in spec]
        for spec in (stored, accumulated, updated)
    ]
    # A dimension over both kinds of axes is left to XLA whole: its chunks interleave. What is of other stages is never
    # brought here: parts of a dimension that stages split come before those of XLA.
    within = [tuple(axis for axis in axes_of(entry) if axis != STAGE) for entry in stored]
    auto_spec = [None if axes else own or None for own, axes in zip(within, manual[2], strict=True)]
    first = 1 if is_stacked else 0
    used = {axis for axes in manual[2] for axis in axes}
    gathered = tuple((d, axes) for d, axes in parts_of(manual[0][first:]) if d + first not in kept)
    return WeightPlan(
        path=path,
        use="gathered" if gathered else "sharded",
        gathered=gathered,
        # One level of a hierarchy after the other: within the shards that are gathered first.
        scattered=_added(manual[0][first:], manual[1][first:]) + gathered,
        split_early=_added(manual[0], manual[1]),
        split_late=_added(manual[1], manual[2]),
        reduced=tuple(axis for axis in roles.tokens if axis not in used),
        is_stacked=is_stacked,
        is_trained=True,
        auto_spec=PartitionSpec(*auto_spec[first:]),
        auto_stored_spec=PartitionSpec(*auto_spec),
        partitioner=roles.partitioner,
        encoding=encoding,
        tile_rows=tile_rows,
        over_stages=next((at for at, entry in enumerate(stored) if STAGE in axes_of(entry)), None),
    )


def parts_of(entries: Sequence[Axes]) -> ShardedDims:
    """Returns the dimensions that mesh axes split. entries: the axes of each dimension."""
    return tuple((dimension, axes) for dimension, axes in enumerate(entries) if axes)


def _added(before: Sequence[Axes], after: Sequence[Axes]) -> ShardedDims:
    return parts_of([longer[len(shorter) :] for shorter, longer in zip(before, after, strict=True)])
