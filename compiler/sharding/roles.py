"""The role of each mesh axis: what it splits, and whether the step or XLA's partitioner splits it."""

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from ..core.partition_spec import STAGE, Axes
from ..spec.sharding_spec import ShardingRules


@dataclass(frozen=True)
class AxisRoles:
    """The mesh axes of more than one device, by role; each axis has one. An axis of one device splits nothing.

    sequence: axes that split the sequences of a batch. length: axes that split the length of each sequence, in chunks.
    stage: axes that split the layers; all stages have the same tokens. partitioner: axes along which XLA's partitioner
    splits matmuls and activations, by the rules.
    """

    sequence: Axes
    length: Axes
    stage: Axes
    partitioner: Axes

    @property
    def tokens(self) -> Axes:
        """Returns the axes that split the tokens of a batch: losses and gradients are summed over them."""
        return (*self.sequence, *self.length)

    @property
    def manual(self) -> Axes:
        """Returns the axes over which the step is a function of local arrays, which writes out its own collectives."""
        return (*self.tokens, *self.stage)

    @property
    def rows_spec(self) -> PartitionSpec:
        """Returns the layout of an array with one entry for each sequence."""
        return PartitionSpec(self.sequence or None)

    @property
    def tokens_spec(self) -> PartitionSpec:
        """Returns the layout of an array (sequences, length)."""
        return PartitionSpec(*self.rows_spec, self.length) if self.length else self.rows_spec


def plan_roles(rules: ShardingRules, sizes: Mapping[str, int]) -> AxisRoles:
    """Returns the role of each mesh axis, by the first rules for activations that name `batch` and `length`.

    sizes: those of all mesh axes. {fsdp: 4, stage: 2, tensor: 2, data: 1} with the batch over (data, fsdp) -> sequence
    (fsdp,), stage (stage,), partitioner (tensor,).
    """

    def axes(logical: str) -> Axes:
        rule = next((rule for rule in rules.activations if logical in rule.logical), None)
        return tuple(axis for axis in rule.mesh if sizes[axis] > 1) if rule else ()

    sequence, length = axes("batch"), axes("length")
    stage = tuple(axis for axis, size in sizes.items() if axis == STAGE and size > 1)
    others = (axis for axis, size in sizes.items() if size > 1 and axis not in (*sequence, *length, *stage))
    return AxisRoles(sequence, length, stage, tuple(others))
