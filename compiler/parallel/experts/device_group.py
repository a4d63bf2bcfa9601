"""The devices among which tokens are exchanged: all along some mesh axes, or equal groups of them.

    AxisGroups(4, 1)    those of a node                {0, 1, 2, 3}, {4, 5, 6, 7}
    AxisGroups(2, 4)    one of each node, on one rail  {0, 4}, {1, 5}, {2, 6}, {3, 7}

are the groups of 8 devices in 2 nodes of 4.
"""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from ...core.partition_spec import Axes
from ...core.traffic import AxisGroups


@dataclass(frozen=True)
class DeviceGroup:
    """The devices along mesh axes, within a `shard_map` over these. groups: those of them that exchange with one
    another; None: all."""

    axes: Axes
    groups: AxisGroups | None = None

    @property
    def axis(self) -> Any:
        return self.axes[0] if len(self.axes) == 1 else self.axes

    @property
    def index(self) -> Array:
        """Returns the place of this device in its group."""
        along = jax.lax.axis_index(self.axis)
        return along if self.groups is None else along // self.groups.stride % self.groups.size

    def swap(self, x: Array) -> Array:
        """Returns the parts that the devices have for this one. x: a part for each device, one after another."""
        return jax.lax.all_to_all(x, self.axis, 0, 0, axis_index_groups=self._members, tiled=True)

    def gather(self, x: Array) -> Array:
        """Returns the rows of all devices."""
        return jax.lax.all_gather(x, self.axis, axis_index_groups=self._members, tiled=True)

    def sum_parts(self, x: Array) -> Array:
        """Returns this device's part of the sum of all devices' arrays: the transpose of `gather`."""
        return jax.lax.psum_scatter(x, self.axis, scatter_dimension=0, axis_index_groups=self._members, tiled=True)

    @property
    def _members(self) -> list[list[int]] | None:
        return self.groups and self.groups.members(jax.lax.axis_size(self.axis))
