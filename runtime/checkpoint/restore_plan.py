"""Plans a restore from the metadata of a checkpoint and the plan of a run; it needs no device and reads no array.

restore plan: checkpoint 300 of runs/a: 30 arrays of 12.3 GiB, 1.5 GiB on each device
fsdp=8 -> fsdp=4 x tensor=2: 28 arrays are laid out anew
  params/layers/q_proj_EHD float32[32,4096,32,128]: (1, 8, 1, 1) -> (1, 4, 2, 1) shards

A checkpoint may differ from the run that continues from it, in its arrays or in its schedule: both are described.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from meshloom.compiler.core.format import be, counted, human_bytes
from meshloom.compiler.core.partition_spec import axes_of
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.formats.block import ELEMENTS
from meshloom.compiler.optim.moments import moment_of
from meshloom.compiler.plan import Plan
from meshloom.compiler.sharding.state import build_schedule, bytes_per_device
from meshloom.compiler.target.mesh import describe_mesh
from meshloom.models.adapter import saved_part

from ..core.files import Folder
from ..rundir.folders import CHECKPOINTS
from .find import Checkpoint, saved_tree
from .moments import converted_moments, describe_conversion

Shards = tuple[int, ...]  # the number of shards of an array along each dimension
MOST_SHOWN = 6


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
    """The arrays of a restore. saved_mesh: sizes above 1 of the mesh axes when it was saved; None if unknown.
    conversion: a line about moments that are stored otherwise; None if there are none."""

    path: Folder
    arrays: tuple[ArrayRestore, ...]
    saved_mesh: Mapping[str, int] | None
    mesh: str
    bytes_per_device: int
    conversion: str | None = None

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
        lines += [self.conversion] if self.conversion else []
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
            _saved_shards(_counterpart(saved, path)),
            _shards(specs[path], here.shape, plan.mesh.sizes),
        )
        for path, here in leaves_by_path(saved_part(plan.abstract)).items()
        if here.shape
    )
    converted = converted_moments(saved_tree(start.path), saved_part(plan.abstract))
    meshes = [mesh for mesh in map(_saved_mesh, saved.values()) if mesh is not None]
    return RestorePlan(
        path=start.path,
        arrays=arrays,
        saved_mesh=meshes[0] if meshes else None,
        mesh=str(plan.mesh),
        bytes_per_device=bytes_per_device(saved_part(plan.abstract), plan.specs, plan.mesh),
        conversion=describe_conversion(converted),
    )


def _counterpart(saved: Mapping[str, Any], path: str) -> Any:
    """Returns the saved array of a path; of a moment that is stored otherwise, the array that it is made from."""
    whole, _ = moment_of(path)
    return next(saved[name] for name in (path, whole, f"{path}/{ELEMENTS}") if name in saved)


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


def tree_differences(there: Any, here: Any) -> list[str]:
    """Returns a line for each array that differs, parameters first, since the optimizer's state follows them.

    there, here: trees whose leaves have a shape and a dtype.
    """
    a, b = ({path: described(x) for path, x in leaves_by_path(tree).items()} for tree in (there, here))
    lines = []
    for path in sorted((path for path in a.keys() | b.keys() if a.get(path) != b.get(path)), key=parameters_first):
        if path in a and path in b:
            lines.append(f"{path} is {a[path]} there, {b[path]} here")
        else:
            is_there = f"{a[path]} is there, not here" if path in a else f"{b[path]} is not there, but here"
            lines.append(f"{path} {is_there}")
    return lines


def parameters_first(path: str) -> tuple[bool, str]:
    """Returns the key that sorts paths of a state for display."""
    return not path.startswith("params/"), path


def first_lines(lines: list[str]) -> list[str]:
    """Returns the first lines, and the number of those that are left out."""
    more = [f"and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else []
    return lines[:MOST_SHOWN] + more


def listed(differences: list[str]) -> str:
    """Returns the first differences as indented lines, and the number of those that are left out."""
    return "".join(f"\n    {line}" for line in first_lines(differences))


def described(array: Any) -> str:
    """Returns the type and shape of an array: float32[264,32]."""
    return f"{array.dtype}{list(array.shape)}".replace(" ", "")


SAME_WITHIN = 1e-6  # relative difference of equal rates: float32 rounds


def schedule_record(spec: RunSpec, num_updates: int) -> dict[str, Any]:
    """Returns the schedule's record for a checkpoint after `num_updates`: its keys, and the rate of the next update."""
    keys = {f"schedule.{key}": value for key, value in spec.schedule.model_dump(mode="json").items()}
    keys = {"num_steps": spec.num_steps, "optimizer.learning_rate": spec.optimizer.learning_rate, **keys}
    rate: Any = build_schedule(spec)(num_updates)
    return {"keys": keys, "next_learning_rate": float(rate)}


def describe_change(saved: dict[str, Any], here: dict[str, Any]) -> str | None:
    """Returns a line about the change of the learning rate; None if the schedule is that of the checkpoint.

    saved, here: the `schedule_record` of the checkpoint, and of this run.
    """
    before, now = saved["keys"], here["keys"]
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if not changed:
        return None
    keys = ", ".join(f"{key} {before.get(key, '(none)')} -> {now.get(key, '(none)')}" for key in changed)
    old, new = saved["next_learning_rate"], here["next_learning_rate"]
    if abs(new - old) <= SAME_WITHIN * max(abs(old), abs(new)):
        return f"another schedule than the checkpoint's ({keys}); the learning rate of the next step stays {new:.4g}"
    return f"warning: the learning rate of the next step is {new:.4g}, not {old:.4g}: another schedule than the checkpoint's ({keys})"  # noqa: E501
