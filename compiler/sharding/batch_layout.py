"""Over which mesh axes the arrays of a batch are split: sequences, and the tokens of a sequence."""

from dataclasses import dataclass

from jax.sharding import PartitionSpec

from ..config.spec import ShardingSpec
from ..core.partition_spec import Axes
from ..target.mesh import MeshPlan


@dataclass(frozen=True)
class BatchLayout:
    """Mesh axes of size > 1. sequence_axes: split the sequences of a batch. length_axes: split each sequence's length,
    in contiguous chunks. The step is manual over both, and sums losses and gradients over both."""

    sequence_axes: Axes
    length_axes: Axes

    @property
    def axes(self) -> Axes:
        return (*self.sequence_axes, *self.length_axes)

    @property
    def rows_spec(self) -> PartitionSpec:
        """The layout of an array with one entry per sequence."""
        return PartitionSpec(self.sequence_axes or None)

    @property
    def spec(self) -> PartitionSpec:
        """The layout of an array (sequences, length)."""
        return PartitionSpec(*self.rows_spec, self.length_axes) if self.length_axes else self.rows_spec


def plan_batch_layout(rules: ShardingSpec, mesh: MeshPlan) -> BatchLayout:
    """Returns the layout by the first rules for activations that name `batch` and `length`."""

    def axes(logical: str) -> Axes:
        rule = next((rule for rule in rules.activations if logical in rule.logical), None)
        return tuple(axis for axis in rule.mesh if mesh.sizes[axis] > 1) if rule else ()

    return BatchLayout(axes("batch"), axes("length"))
