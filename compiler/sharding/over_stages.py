"""Lays out the weights of a pipeline's layers over its stages, and their optimizer state alike.

layers_over_stages    each stage holds the layers that it runs: their dimension is split
parts_over_stages     each stage holds a part of every layer, and gets its own layers once per step: where stages run
                      different numbers of layers, and where the model has several stacks
"""

from dataclasses import replace

from ..core.partition_spec import Axes
from ..target.mesh import MeshPlan
from .arrays import Array
from .roles import AxisRoles
from .rules import ArrayPlan, DimensionPlan

Plans = tuple[ArrayPlan, ...]


def layers_over_stages(parameters: Plans, optimizer: Plans, mesh: MeshPlan, roles: AxisRoles) -> tuple[Plans, Plans]:
    """Returns the layouts of parameters and of their optimizer state, with layers over the stages."""

    def split(plan: ArrayPlan) -> ArrayPlan:
        at = _layers_dimension(plan.array)
        if at is None:
            return plan
        return _over(plan, at, roles.stage, mesh, "each stage holds its layers")

    return tuple(map(split, parameters)), tuple(map(split, optimizer))


def parts_over_stages(parameters: Plans, optimizer: Plans, mesh: MeshPlan, roles: AxisRoles) -> tuple[Plans, Plans]:
    """Returns the layouts of parameters and of their optimizer state, with a part of each layer on each stage.

    A parameter of layers is stored as it is updated. With the stages behind the axes of tokens, what a stage gets of a
    layer are the shards of it that these axes make. A parameter without a dimension for them is whole on every stage.
    """
    updated = {plan.array.path: plan for plan in optimizer}

    def split(plan: ArrayPlan) -> ArrayPlan:
        if _layers_dimension(plan.array) is None:
            return plan
        stored = replace(updated.get(plan.array.path, plan), table=plan.table)
        at = _dimension_of_stages(stored, mesh, roles)
        if at is None:
            return stored
        return _over(stored, at, roles.stage, mesh, "a part of each layer on each stage")

    return tuple(map(split, parameters)), tuple(map(split, optimizer))


def _layers_dimension(array: Array) -> int | None:
    return array.logical_axes.index("layers") if "layers" in array.logical_axes else None


def _over(plan: ArrayPlan, at: int, stage: Axes, mesh: MeshPlan, note: str) -> ArrayPlan:
    """Returns a layout with a dimension split over the stages behind what it is over."""
    d = plan.dimensions[at]
    split = replace(d, axes=(*d.axes, *stage), rule=d.rule if d.axes else None, note=note)
    dimensions = (*plan.dimensions[:at], split, *plan.dimensions[at + 1 :])
    return replace(plan, dimensions=dimensions, bytes_per_device=plan.bytes_per_device // mesh.num_shards(stage))


def _dimension_of_stages(plan: ArrayPlan, mesh: MeshPlan, roles: AxisRoles) -> int | None:
    """Returns the dimension whose shards the stages divide: one over axes of tokens, else the largest; none that XLA's
    partitioner splits."""

    def shard(d: DimensionPlan) -> int:
        return d.size // mesh.num_shards(d.axes)

    layers, num_stages = _layers_dimension(plan.array), mesh.num_shards(roles.stage)
    fits = [
        at
        for at, d in enumerate(plan.dimensions)
        if at != layers and not set(d.axes) & set(roles.partitioner) and shard(d) % num_stages == 0
    ]
    return max(fits, key=lambda at: (bool(plan.dimensions[at].axes), shard(plan.dimensions[at])), default=None)
