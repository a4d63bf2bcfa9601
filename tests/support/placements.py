"""Meshes placed on the links of a named target."""

from functools import cache

from meshloom.compiler.target.placement import Placement, plan_placement
from support.programs import target_of

AXES = ("replica", "data", "fsdp", "stage", "context", "expert", "tensor")
cached_target_of = cache(target_of)


def placed(name: str, num_slices: int = 1, **sizes: int) -> Placement:
    return plan_placement({axis: sizes.get(axis, 1) for axis in AXES}, cached_target_of(name, num_slices=num_slices))
