"""How the parts of a matmul's result are added up where a mesh axis splits what it contracts: behind it, or in a ring.

Each device has a part of what is contracted, and keeps a shard of the result's length. Behind the matmul that is a
reduce-scatter, which waits for all of it and has nothing beside it. In a ring a device multiplies for one shard after
another, its own last, and adds what has arrived of the shard from the neighbour behind it:

    device 2 of 4    part for shard 1   +  part for shard 0   +  part for shard 3   +  part for shard 2
                              |            ^        |            ^        |            ^
                              to 3         from 1   to 3         from 1   to 3         from 1

So a transfer runs beside the next matmul. One half of each shard goes this way around, the other half the other way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from meshloom.models.contract import project

from ..config.spec import RunSpec
from ..core.errors import Problem, raise_if_any, use_one_of
from ..core.format import human_seconds
from ..core.scopes import OperationName, ring_scope
from ..sharding.arrays import Projected
from ..sharding.batch import sequences_of_device, tokens_of_device
from ..sharding.sharding import ShardingPlan
from ..target.compiler_options import why_permutes_wait
from ..target.mesh import MeshPlan
from ..target.target import TargetPlan

LENGTH = 1  # the dimension of an activation (batch, length, ...)
# Over a shard for each sum, as compiled programs have it: 0.22 ms of 67 MB on v5p (libtpu 0.0.42.1). Nothing is
# fused with a matmul: what is multiplied is cut out, what arrived is added, halves are put together.
NUM_PASSES = 9


@dataclass(frozen=True)
class ProjectionPlan:
    """name: of the activation that the matmul makes. split_over: mesh axes that split what it contracts; of no axis it
    has no parts. ring: the one around which its parts are added up while they are made; None: they are added up behind
    it. both_ways: half of them go each way around."""

    name: str
    split_over: tuple[str, ...]
    ring: str | None
    both_ways: bool
    reason: str

    @property
    def how(self) -> str:
        """In words: how its parts are added up, and why."""
        way = f"in a ring over {self.ring}" if self.ring else "behind the matmul"
        return f"parts of {self.name} are added up {way}: {self.reason}"


def plan_projections(
    spec: RunSpec, projected: Sequence[Projected], sharding: ShardingPlan, mesh: MeshPlan, target: TargetPlan
) -> tuple[ProjectionPlan, ...]:
    """For each matmul that the model makes by its context. Raises ConfigError where `overlap.rings` names what cannot
    be added up in a ring."""
    declared, known, problems = spec.overlap.rings, [each.name for each in projected], list[Problem]()
    made = tuple(_plan_projection(spec, each, sharding, mesh, target) for each in projected)
    for index, name in enumerate(() if declared == "auto" else declared):
        if name not in known:
            fix = use_one_of(name, known) if known else "leave it out"
            problems.append(Problem(f"overlap.rings[{index}]", f"the model makes no '{name}' by its context", fix))
        elif (plan := made[known.index(name)]).ring is None:
            fix = "leave it out, or set overlap.rings=auto"
            what = f"'{name}' cannot be added up in a ring: {plan.reason}"
            problems.append(Problem(f"overlap.rings[{index}]", what, fix))
    raise_if_any(problems)
    return made


def _plan_projection(
    spec: RunSpec, made: Projected, sharding: ShardingPlan, mesh: MeshPlan, target: TargetPlan
) -> ProjectionPlan:
    declared = spec.overlap.rings
    layouts = {plan.array.path: plan for plan in sharding.activations}
    split_over = layouts[made.of].dimensions[LENGTH + 1].axes if made.of else ()

    def behind(reason: str) -> ProjectionPlan:
        return ProjectionPlan(made.name, split_over, None, False, reason)

    if not split_over:
        what = f"'{made.of}'" if made.of else "an array without a name"
        return behind(f"no mesh axis splits what {what} is contracted over")
    if declared != "auto" and made.name not in declared:
        return behind("overlap.rings leaves it out")
    axis, *others = split_over
    kept = layouts[made.name].dimensions[LENGTH].axes
    if kept != split_over or others or axis in sharding.batch_axes:
        where = f"over {' and '.join(kept)}" if kept else "whole"
        return behind(f"they are over {' and '.join(split_over)}, and its length is {where}")
    both_ways = not target.compiler.unordered_collectives
    sequences = sequences_of_device(spec, mesh) // spec.overlap.layers.batch_parts
    length = spec.sequence_length // mesh.sizes[axis]
    if both_ways and sequences % 2 and length % 2:
        return behind(f"neither {sequences} (sequences) nor {length} (tokens of each in a shard) is even")
    if declared != "auto":
        return ProjectionPlan(made.name, split_over, axis, both_ways, "overlap.rings names it")
    if why_not := why_permutes_wait(target):
        return behind(why_not)
    is_shorter, figures = _compared(spec, made, axis, mesh, target)
    return ProjectionPlan(made.name, split_over, axis, both_ways, figures) if is_shorter else behind(figures)


def _compared(spec: RunSpec, made: Projected, axis: str, mesh: MeshPlan, target: TargetPlan) -> tuple[bool, str]:
    """Whether a ring takes less of a step than a reduce-scatter behind the matmul, and the figures. Of several parts of
    the batch only one's reduce-scatter has nothing beside it."""
    n, itemsize = mesh.sizes[axis], jnp.dtype(spec.precision.compute).itemsize
    num_parts = spec.overlap.layers.batch_parts
    tokens = tokens_of_device(spec, mesh) // num_parts
    result_bytes = tokens * made.width * itemsize
    scatter = mesh.alone_seconds("reduce-scatter", result_bytes, (axis,))
    transfer = mesh.alone_seconds("collective-permute", result_bytes / n / 2, (axis,))
    peak, bandwidth = target.peak_flops_per_second, target.hbm_bytes_per_second_per_device
    if scatter is None or transfer is None or peak is None or bandwidth is None:
        return False, "how long its parts take on the links is not known"
    matmul = 2 * (tokens / n) * (made.depth / n) * made.width / peak
    sums = NUM_PASSES * result_bytes / n / bandwidth
    ring = num_parts * (n - 1) * (max(0.0, transfer - matmul) + sums)
    figures = f"{human_seconds(ring)} not beside matmuls, {human_seconds(scatter)} behind it"
    return ring < scatter, figures


def build_project(plans: Sequence[ProjectionPlan]) -> Callable[[str, Array, Array], Array]:
    """`Context.project` of a step that is automatic over the axes of its rings."""
    rings = {each.name: (each.ring, each.both_ways) for each in plans if each.ring}

    def project_by_plan(name: str, x: Array, weight: Array) -> Array:
        if name not in rings:
            return project(name, x, weight)
        with jax.named_scope(ring_scope(name)):
            return _project_in_ring(x, weight, *rings[name])

    return project_by_plan


def _project_in_ring(x: Array, weight: Array, axis: str, both_ways: bool) -> Array:
    """The result in shards of its length. Backward it is a plain matmul: its gradient arrives whole."""
    ring = jax.shard_map(
        lambda x, weight: add_up_in_ring(x, weight, axis, both_ways=both_ways),
        in_specs=(PartitionSpec(None, None, axis), PartitionSpec(axis)),
        out_specs=PartitionSpec(None, axis),
        axis_names={axis},
        check_vma=False,
    )

    @jax.custom_vjp
    def use(x: Array, weight: Array) -> Array:
        return ring(x, weight)

    def backward(operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
        return jax.vjp(partial(project, ""), *operands)[1](gradient)

    use.defvjp(lambda *operands: (ring(*operands), operands), backward)
    return use(x, weight)


def ring_of(name: OperationName) -> str | None:
    """'mlp_output, in a ring', for an operation within one by its name; else None."""
    return f"{name.ring}, in a ring" if name.ring else None


def add_up_in_ring(x: Array, weight: Array, axis: str, *, both_ways: bool) -> Array:
    """What `project` gives of this device's shard of the length, summed over the devices of a mesh axis.

    x: (B, T, *K), weight: (*K, E), this device's part of what is contracted. Returns (B, T / n, E) of n devices.
    both_ways: halves of each shard, of its sequences or else of its tokens, go around in opposite ways at once.
    """
    n, here, length = jax.lax.axis_size(axis), jax.lax.axis_index(axis), x.shape[LENGTH] // jax.lax.axis_size(axis)
    halved = LENGTH if x.shape[0] % 2 else 0

    def part(shard: Array, half: int | None) -> Array:
        of_shard = jax.lax.dynamic_slice_in_dim(x, shard % n * length, length, LENGTH)
        of_shard = of_shard if half is None else jnp.split(of_shard, 2, halved)[half]
        return project("", of_shard, weight)

    def around(way: int, half: int | None) -> Array:
        neighbours = [(device, (device + way) % n) for device in range(n)]
        total = part(here - way, half)
        for step in range(2, n + 1):
            total = jax.lax.ppermute(total, axis, neighbours) + part(here - step * way, half)
        return total

    if not both_ways:
        return around(1, None)
    return jnp.concatenate([around(1, 0), around(-1, 1)], halved)
