"""Lays out the weights of a pipeline's layers over its stages, and their optimizer state alike.

layers_over_stages    each stage holds the layers that it runs: their dimension is split
parts_over_stages     each stage holds a part of every layer, and gets its own layers once per step: where stages run
                      different numbers of layers, and where the model has several stacks
"""

from dataclasses import replace
from typing import Any

from ..core.partition_spec import STAGE
from ..target.mesh import MeshPlan
from .arrays import Array
from .roles import AxisRoles
from .rules import ArrayPlan, DimensionPlan

Plans = tuple[ArrayPlan, ...]


def layers_over_stages(parameters: Plans, optimizer: Plans, mesh: MeshPlan) -> tuple[Plans, Plans]:
    """Returns the layouts of parameters and of their optimizer state, with layers over the stages."""

    def split(plan: ArrayPlan) -> ArrayPlan:
        at = _layers_dimension(plan.array)
        if at is None:
            return plan
        return over_stages(plan, at, mesh, rule=None, note="each stage holds its layers")

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
        rule = stored.dimensions[at].rule if stored.dimensions[at].axes else None
        return over_stages(stored, at, mesh, rule=rule, note="a part of each layer on each stage")

    return tuple(map(split, parameters)), tuple(map(split, optimizer))


def _layers_dimension(array: Array) -> int | None:
    return array.logical_axes.index("layers") if "layers" in array.logical_axes else None


def over_stages(plan: ArrayPlan, at: int, mesh: MeshPlan, *, place: int | None = None, **told: Any) -> ArrayPlan:
    """Returns a layout with a dimension split over the stages, too.

    at: the dimension. place: that of the stages among its mesh axes; None: behind all. told: other fields of its
    DimensionPlan.
    """
    d = plan.dimensions[at]
    place = len(d.axes) if place is None else place
    split = replace(d, axes=(*d.axes[:place], STAGE, *d.axes[place:]), **told)
    dimensions = (*plan.dimensions[:at], split, *plan.dimensions[at + 1 :])
    return replace(plan, dimensions=dimensions, bytes_per_device=plan.bytes_per_device // mesh.sizes[STAGE])


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
