"""Plans a restore from the metadata of a checkpoint and the plan of a run; it needs no device and reads no array.

restore plan: checkpoint 300 of runs/a: 30 arrays of 12.3 GiB, 1.5 GiB on each device
fsdp=8 -> fsdp=4 x tensor=2: 28 arrays are laid out anew
  params/layers/q_proj_EHD float32[32,4096,32,128]: (1, 8, 1, 1) -> (1, 4, 2, 1) shards
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from meshloom.compiler.core.format import be, counted, human_bytes
from meshloom.compiler.core.partition_spec import axes_of
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.plan import Plan
from meshloom.compiler.sharding.state import bytes_per_device
from meshloom.compiler.target.mesh import describe_mesh
from meshloom.models.adapter import saved_part

from ..core.files import Folder
from ..rundir.folders import CHECKPOINTS
from .differences import described, first_lines, parameters_first
from .find import Checkpoint, saved_tree

Shards = tuple[int, ...]  # the number of shards of an array along each dimension


@dataclass(frozen=True)
class ArrayRestore:
    """One array. saved: its shards in the checkpoint, None if unknown; here: its shards in this run."""

    path: str
    described: str
    num_bytes: int
    saved: Shards | None
    here: Shards

    @property
    def is_resharded(self) -> bool:
        return self.saved != self.here

    def __str__(self) -> str:
        saved = "unknown" if self.saved is None else _shown(self.saved)
        return f"{self.path} {self.described}: {saved} -> {_shown(self.here)} shards"


@dataclass(frozen=True)
class RestorePlan:
    """The arrays of a restore. saved_mesh: sizes above 1 of the mesh axes when it was saved; None if unknown."""

    path: Folder
    arrays: tuple[ArrayRestore, ...]
    saved_mesh: Mapping[str, int] | None
    mesh: str
    bytes_per_device: int

    @property
    def resharded(self) -> tuple[ArrayRestore, ...]:
        return tuple(each for each in self.arrays if each.is_resharded)

    def lines(self) -> list[str]:
        """Returns the plan as lines to show: parameters first, since the optimizer's state follows them."""
        whole = human_bytes(sum(each.num_bytes for each in self.arrays))
        folder = self.path.parent
        run = folder.parent if folder.name == CHECKPOINTS else folder
        head = f"restore plan: checkpoint {self.path.name} of {run}: {counted(len(self.arrays), 'array')} of {whole}"
        lines = [f"{head}, {human_bytes(self.bytes_per_device)} on each device"]
        saved = "an unknown mesh" if self.saved_mesh is None else describe_mesh(self.saved_mesh)
        meshes = self.mesh if saved == self.mesh else f"{saved} -> {self.mesh}"
        if not self.resharded:
            return [*lines, f"{meshes}: all are laid out as they were saved"]
        number = len(self.resharded)
        lines.append(f"{meshes}: {counted(number, 'array')} {be(number)} laid out anew")
        ordered = sorted(self.resharded, key=lambda each: parameters_first(each.path))
        return [*lines, *(f"  {line}" for line in first_lines(list(map(str, ordered))))]


def plan_restore(start: Checkpoint, plan: Plan) -> RestorePlan:
    """Returns the plan of restoring a checkpoint that has the same arrays as the run's state."""
    saved = leaves_by_path(saved_tree(start.path))
    specs = leaves_by_path(plan.specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
    arrays = tuple(
        ArrayRestore(
            path,
            described(here),
            math.prod(here.shape) * here.dtype.itemsize,
            _saved_shards(saved[path]),
            _shards(specs[path], here.shape, plan.mesh.sizes),
        )
        for path, here in leaves_by_path(saved_part(plan.abstract)).items()
        if here.shape
    )
    meshes = [mesh for mesh in map(_saved_mesh, saved.values()) if mesh is not None]
    return RestorePlan(
        path=start.path,
        arrays=arrays,
        saved_mesh=meshes[0] if meshes else None,
        mesh=str(plan.mesh),
        bytes_per_device=bytes_per_device(saved_part(plan.abstract), plan.specs, plan.mesh),
    )


def _saved_mesh(saved: Any) -> dict[str, int] | None:
    """Returns the mesh axes of more than one device; None if the array was saved without a mesh."""
    layout = saved.sharding_metadata
    if getattr(layout, "axis_names", None) is None:
        return None
    sizes = zip(layout.axis_names, map(int, layout.shape), strict=True)
    return {name: size for name, size in sizes if size > 1}


def _saved_shards(saved: Any) -> Shards | None:
    mesh = _saved_mesh(saved)
    return None if mesh is None else _shards(saved.sharding_metadata.partition_spec, saved.shape, mesh)


def _shards(spec: Any, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Shards:
    entries = (*spec, *[None] * (len(shape) - len(spec)))
    return tuple(math.prod(sizes.get(axis, 1) for axis in axes_of(entry)) for entry in entries)


def _shown(shards: Shards) -> str:
    return f"({', '.join(map(str, shards))})"
