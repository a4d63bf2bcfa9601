"""Whether the length of sequences can be cut for the devices that split it, and which lengths and meshes work."""

from meshloom.models.numbers import divisors

from ..core.errors import ConfigError, Problem, raise_if_any
from ..jaxpr.operation_kinds import LANES
from ..spec.spec import RunSpec
from ..target.mesh import MeshPlan, nearest, plan_mesh
from ..target.target import TargetPlan
from .batch import check_batch
from .roles import AxisRoles, plan_roles
from .token_order import plan_token_order


def check_token_order(spec: RunSpec, mesh: MeshPlan, roles: AxisRoles, target: TargetPlan) -> None:
    """Raises ConfigError where the length cannot be cut in equal chunks, with the nearest that can."""
    axes, order = roles.length, plan_token_order(spec.token_order, mesh, roles)
    length, num_chunks = spec.sequence_length, order.num_chunks
    if length % num_chunks == 0:
        return
    over = " x ".join(f"{axis}={mesh.sizes[axis]}" for axis in axes)
    of_each = f", {order.chunks_per_shard} chunks for each shard" if order.chunks_per_shard > 1 else ""
    what = f"{length} tokens cannot be cut in {order.name} order over {over}: they are not divisible by {num_chunks}"
    fixes = [f"use sequence_length={' or '.join(map(str, _lengths(spec, num_chunks, target)))}"]
    if order.chunks_per_shard > 1 and length % order.num_shards == 0:
        fixes.append("token_order=contiguous")
    if len(axes) == 1 and (sizes := _mesh_sizes(spec, mesh, target, axes[0])):
        fixes.append(f"mesh.{axes[0]}={nearest(order.num_shards, sizes)}")
    raise_if_any([Problem("sequence_length", what + of_each, ", or ".join(fixes))])


def _lengths(spec: RunSpec, num_chunks: int, target: TargetPlan) -> list[int]:
    """Returns the nearest below and above; on TPUs those that kernels take."""
    step = num_chunks * LANES if target.platform == "tpu" else num_chunks
    below = spec.sequence_length // step * step
    return [length for length in (below, below + step) if length]


def _mesh_sizes(spec: RunSpec, mesh: MeshPlan, target: TargetPlan, axis: str) -> list[int]:
    """Sizes of the axis with which the length can be cut. Another axis has to take the rest of the devices."""
    free = next((name for name, size in spec.mesh if size == -1 and name != axis), None)
    if free is None:
        return []
    return [size for size in divisors(mesh.sizes[free] * mesh.sizes[axis]) if _works(spec, target, axis, size)]


def _works(spec: RunSpec, target: TargetPlan, axis: str, size: int) -> bool:
    other = spec.model_copy(update={"mesh": spec.mesh.model_copy(update={axis: size})})
    try:
        mesh = plan_mesh(other.mesh, target, other.device_order)
        roles = plan_roles(other.sharding, mesh.sizes)
        check_batch(other, mesh, roles)
    except ConfigError:
        return False
    return spec.sequence_length % plan_token_order(other.token_order, mesh, roles).num_chunks == 0
