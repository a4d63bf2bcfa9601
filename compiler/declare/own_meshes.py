"""The mesh of a sharding that names none: one of ours, along an axis that its rules split arrays over."""

from collections.abc import Iterable, Mapping
from typing import Any

MESHES = {"fsdp": "fsdp", "data": "ddp", "tensor": "tensor"}  # by mesh axis; the first two have all devices along it
NO_AXIS = "ddp"  # nothing is split but the batch


def mesh_for(sharding: Mapping[Any, Any]) -> str:
    """Returns the mesh of a sharding by its rules: "fsdp" of {"parameters": [{"logical": [..], "mesh": ["fsdp"]}]}.

    Of several axes it is the first one of fsdp, data and tensor; how many devices the others get is the user's choice.
    """
    named = {axis for table in sharding.values() for axis in _axes(table)}
    used = sharding.get("mesh_axes")
    named &= set(used) if isinstance(used, list) else named
    return next((mesh for axis, mesh in MESHES.items() if axis in named), NO_AXIS)


def _axes(table: Any) -> Iterable[str]:
    """Yields the mesh axes of a table of rules, but for those of the batch, which every mesh splits."""
    for rule in table if isinstance(table, list) else ():
        if isinstance(rule, Mapping) and "batch" not in (rule.get("logical") or ()):
            yield from rule.get("mesh") or ()
