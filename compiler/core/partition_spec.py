"""Mesh axes in a PartitionSpec."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a declaration is read without JAX
    from jax.sharding import PartitionSpec

Axes = tuple[str, ...]
STAGE = "stage"  # the mesh axis whose devices have different layers


def axes_of(entry: Any) -> Axes:
    """Returns the mesh axes of one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def axes_in(spec: "PartitionSpec") -> Axes:
    """Returns the mesh axes of all entries."""
    return tuple(axis for entry in spec for axis in axes_of(entry))


def keep_axes(spec: "PartitionSpec", axes: Axes) -> "PartitionSpec":
    """Returns the part of a PartitionSpec that is over these mesh axes."""
    kept = (tuple(axis for axis in axes_of(entry) if axis in axes) for entry in spec)
    return type(spec)(*(entry or None for entry in kept))


def without(spec: "PartitionSpec", dimensions: Collection[int]) -> "PartitionSpec":
    """Returns a layout with dimensions whole. dimensions: counted from the end, so below 0."""
    return type(spec)(*(None if at - len(spec) in dimensions else entry for at, entry in enumerate(spec)))
