"""The plan of a run: everything that is decided before a compiler is called. No XLA, no devices, in a second or two."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from meshloom.models import Model

from .arrays import Array
from .attention import AttentionPlan
from .gather import axes_of
from .mesh import MeshPlan
from .sharding import ArrayPlan, DimensionPlan, ShardingPlan
from .spec import RunSpec
from .target import TargetPlan
from .trees import leaves_by_path


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per device of each class of arrays. None: not known before compiling."""

    parameters: int
    optimizer: int
    gradients: int  # accumulated in float32
    working_parameters: int  # the copy in the compute type, where that is another type
    batch: int
    activations: None = None

    @property
    def known_bytes(self) -> int:
        return self.parameters + self.optimizer + self.gradients + self.working_parameters + self.batch


@dataclass(frozen=True)
class Plan:
    """abstract, specs: the state {step, params, optimizer} as trees of ShapeDtypeStruct and of PartitionSpec."""

    spec: RunSpec
    target: TargetPlan
    mesh: MeshPlan
    model: Model
    optimizer: optax.GradientTransformation
    sharding: ShardingPlan
    optimizer_state: tuple[ArrayPlan, ...]  # every leaf that is no scalar
    abstract: dict[str, Any]
    specs: dict[str, Any]
    attention: AttentionPlan
    num_loss_blocks: int  # parts that a microbatch's tokens are run through the head in
    memory: MemoryPlan
    model_flops_per_step: int

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(plan.array.shape) for plan in self.sharding.parameters)


def plan_memory(
    spec: RunSpec, mesh: MeshPlan, sharding: ShardingPlan, optimizer_state: tuple[ArrayPlan, ...]
) -> MemoryPlan:
    """Bytes per device, from the shards of every array."""
    elements = [plan.bytes_per_device // jnp.dtype(spec.precision.parameters).itemsize for plan in sharding.parameters]
    compute = jnp.dtype(spec.precision.compute)
    is_cast = spec.precision.compute != spec.precision.parameters
    return MemoryPlan(
        parameters=sum(plan.bytes_per_device for plan in sharding.parameters),
        optimizer=sum(plan.bytes_per_device for plan in optimizer_state),
        gradients=sum(elements) * jnp.dtype(jnp.float32).itemsize,
        working_parameters=sum(elements) * compute.itemsize if is_cast else 0,
        batch=2 * spec.tokens_per_step * jnp.dtype(jnp.int32).itemsize // mesh.num_shards(sharding.batch_axes),
    )


def plan_state_arrays(
    abstract: Any, specs: Any, parameters: tuple[ArrayPlan, ...], mesh: MeshPlan
) -> tuple[ArrayPlan, ...]:
    """A row for each array of the optimizer's state. One that is shaped as a parameter lies as that parameter's state
    was planned; any other where the optimizer's own computation puts it."""
    layouts = leaves_by_path(specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
    rows = []
    for path, x in leaves_by_path(abstract).items():
        if not x.shape:
            continue
        owner = next((plan for plan in parameters if path.endswith(f"/{plan.array.path}")), None)
        if owner and owner.array.shape == x.shape and owner.spec == layouts[path]:
            dimensions, table = owner.dimensions, owner.table
        else:
            entries = (*layouts[path], *[None] * (len(x.shape) - len(layouts[path])))
            table = None
            dimensions = tuple(
                DimensionPlan(None, size, axes_of(entry), None, "by the optimizer's own computation")
                for size, entry in zip(x.shape, entries, strict=True)
            )
        array = Array(path, x.shape, str(x.dtype), tuple(d.logical for d in dimensions))
        shards = mesh.num_shards(tuple(axis for d in dimensions for axis in d.axes))
        rows.append(ArrayPlan(array, table, dimensions, array.num_bytes // shards))
    return tuple(rows)
