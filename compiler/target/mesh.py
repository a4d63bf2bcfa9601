"""Plans the mesh: the number of devices along each axis."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshloom.models.config import divisors

from ..core.errors import ConfigError, Problem
from ..core.format import counted
from ..core.traffic import AxisGroups, CollectiveKind
from ..spec.plan_spec import MeshSpec
from .links import collective_seconds
from .placement import Placement, plan_placement
from .target import TargetPlan


@dataclass(frozen=True)
class MeshPlan:
    """Sizes of all mesh axes, the slowest link first; an unused axis has size 1. placement: the links that each axis
    uses. reasons: for each axis whose size was not declared, why it has this size."""

    sizes: Mapping[str, int]
    placement: Placement
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    def num_shards(self, axes: tuple[str, ...]) -> int:
        """Returns the number of shards of a dimension over these axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def alone_seconds(
        self, kind: CollectiveKind, num_bytes: float, axes: tuple[str, ...], groups: AxisGroups | None = None
    ) -> float | None:
        """Returns the time that one collective along these axes takes alone; None if its links are unknown. num_bytes:
        the bytes of the full array (links.collective_seconds). groups: as of `DeviceTraffic`."""
        size = self.num_shards(axes) if groups is None else groups.size
        return collective_seconds(kind, num_bytes, size, self.placement.link_of(axes, groups))

    def abstract(self, axis_type: AxisType = AxisType.Auto) -> AbstractMesh:
        """Returns the mesh without devices, for planning."""
        names = tuple(self.sizes)
        return AbstractMesh(tuple(self.sizes.values()), names, axis_types=(axis_type,) * len(names))

    def of_devices(self, devices: Sequence[Any]) -> Mesh:
        """Returns the mesh over these devices, laid out by the placement; JAX orders devices with unknown links."""
        names = tuple(self.sizes)
        auto = (AxisType.Auto,) * len(names)
        if self.placement.is_known:
            return Mesh(self.placement.ordered(devices), names, axis_types=auto)
        return jax.make_mesh(tuple(self.sizes.values()), names, axis_types=auto, devices=devices)

    def __str__(self) -> str:
        return describe_mesh(self.sizes)


def describe_mesh(sizes: Mapping[str, int]) -> str:
    """Returns the axes of more than one device: {fsdp: 4, tensor: 2, data: 1} -> "fsdp=4 x tensor=2"."""
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"


def plan_mesh(spec: MeshSpec, target: TargetPlan, order: Sequence[str] = ()) -> MeshPlan:
    """Returns the mesh with -1 filled in: {fsdp: -1, tensor: 2} over 8 devices -> {fsdp: 4, tensor: 2}. order: the
    declared order of devices, as in `plan_placement`.

    Raises ConfigError if the product of the axes is not the number of devices, or no axis can cross slices.
    """
    declared: dict[str, int | None] = spec.model_dump()
    reasons = {axis: _why_default(target) for axis, size in declared.items() if size is None}
    sizes = {axis: default_replicas(target) if size is None else size for axis, size in declared.items()}
    free = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "1"
    devices = f"{counted(target.num_devices, 'device')} of target {target.name}"
    if len(free) > 1:
        raise ConfigError([Problem("mesh", f"{' and '.join(free)} are both -1", "leave one of them at -1 and give the others a size")])  # fmt: skip  # noqa: E501
    if free and target.num_devices % fixed:
        raise ConfigError([Problem("mesh", f"{shown}: {fixed} does not divide the {devices}", _fix(sizes, target))])
    if free:
        sizes[free[0]] = target.num_devices // fixed
    elif fixed != target.num_devices:
        raise ConfigError([Problem("mesh", f"{shown} is {fixed}, not the {devices}", _fix(sizes, target))])
    return MeshPlan(MappingProxyType(sizes), plan_placement(sizes, target, order), MappingProxyType(reasons))


def default_replicas(target: TargetPlan) -> int:
    """Returns the number of replicas if none is declared: one for each slice, so that weights are gathered within it;
    two in a single slice."""
    return target.num_slices if target.num_slices > 1 else 2


def _why_default(target: TargetPlan) -> str:
    if target.num_slices > 1:
        return f"one for each of the {target.num_slices} slices: mesh.replica is not set"
    return "two in a single slice: mesh.replica is not set"


def _fix(sizes: Mapping[str, int], target: TargetPlan) -> str:
    """Returns the fix: one axis changed so that the product is right, if possible."""
    options = []
    for axis, size in sizes.items():
        if size in (1, -1):
            continue
        rest = math.prod(other for name, other in sizes.items() if name != axis and other != -1)
        if target.num_devices % rest:
            continue
        largest = target.num_devices // rest
        exact = -1 not in sizes.values()
        fitting = [largest] if exact else divisors(largest)
        options.append(f"mesh.{axis}={nearest(size, fitting)}")
    free = next((axis for axis, size in sizes.items() if size == -1), None) or "data"
    return f"use {' or '.join(options)}" if options else f"set mesh.{free}=-1 and the others to a divisor of {target.num_devices}"  # fmt: skip  # noqa: E501


def nearest(size: int, candidates: list[int]) -> int:
    """Returns the candidate closest to `size`; of two that are equally close the larger one."""
    return min(candidates, key=lambda candidate: (abs(candidate - size), -candidate))
