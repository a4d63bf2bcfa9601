"""The devices of a peer's declaration, and the mesh over them: ours has one axis for what theirs has inside of slices
and over them."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..core.errors import Problem
from ..spec import target_names
from .reading import PeerReading

_GPUS = re.compile(r"(a100|h100|h200|b200|gb200|gb300)(?:-(?:mega|[\dgb]*))*-(\d+)")
_TORUS = re.compile(r"([a-z]\w*?)-(\d+(?:x\d+)+)")


@dataclass(frozen=True)
class Devices:
    """The devices of a target. inner: those of a slice, or of a node of GPUs; outer: the number of these."""

    name: str
    inner: int
    outer: int
    num_slices: int
    is_gpu: bool

    @property
    def total(self) -> int:
        return self.inner * self.outer


@dataclass(frozen=True)
class PeerAxes:
    """The sizes of a peer's mesh axes. inner: inside of a slice or node; outer: over these. 0: not known."""

    inner: Mapping[str, int]
    outer: Mapping[str, int]

    def total(self, axis: str) -> int:
        return self.inner[axis] * self.outer[axis]


def target_of(name: str, num_nodes: int) -> str:
    """Returns our name of a target: tpu7x-4x4x4 is tpu7x:4x4x4, two nodes of h100-mega-80gb-8 are h100-16."""
    if found := _TORUS.fullmatch(name):
        return f"{found[1]}:{found[2]}"
    if found := _GPUS.fullmatch(name):
        return (
            f"{found[1]}-{int(found[2]) * num_nodes}"
            if int(found[2]) <= 8 and num_nodes > 1
            else f"{found[1]}-{found[2]}"
        )
    return name


def known_devices(reading: PeerReading, topology: str, key: str, num_slices: int) -> Devices | None:
    """Puts the target and returns its devices; None where nothing names it. topology: what the peer's key says."""
    name = reading.target or (target_of(topology, num_slices) if topology else None)
    if name is None:
        return None
    because = "target=" if reading.target else reading.said(key)
    sized = target_names.sized_devices(name)
    if sized is None:
        problem = target_names.problem_of(name, ())
        place = problem.where if reading.target else f"{reading.given.place}: {key}"
        reading.problems.append(Problem(place, problem.what, problem.fix))
        return None
    slices = num_slices if sized.platform == "tpu" else 1
    devices = Devices(name, sized.inner, sized.num_nodes * slices, slices, is_gpu=sized.platform == "gpu")
    reading.put(f"target={name}", because)
    if devices.num_slices > 1:
        reading.put(f"target.num_slices={num_slices}", f"{num_slices} slices")
    return devices


def refuse_without_chips(reading: PeerReading, axes: PeerAxes) -> None:
    """Refuses a declaration that names no chips."""
    sizes = math.prod(axes.inner.values()) * math.prod(axes.outer.values())
    size = f": its mesh has {sizes} devices" if sizes else ""
    reading.refuse("", f"nothing names the chips{size}", "add target=NAME, such as target=v5p-128 or target=h100-64")


def put_mesh(
    reading: PeerReading,
    devices: Devices | None,
    *,
    replica: int = 1,
    data: int = 1,
    fsdp: int = 1,
    transposed: int = 1,
    context: int = 1,
    expert: int = 1,
    tensor: int = 1,
    stage: int = 1,
    said: Callable[[str], str],
) -> None:
    """Puts the sharding and the sizes of the mesh axes. transposed: the second axis over which weights are split, along
    another dimension. said: the peer's keys of an axis."""
    if devices is None or 0 in (replica, data, fsdp, transposed, context, expert, tensor, stage):
        return
    others = {"context": context, "expert": expert, "tensor": tensor}
    if transposed > 1:
        for axis, size in others.items():
            if size > 1:
                what = f"Meshloom has no weights split over two axes with {axis} parallelism"
                reading.refuse(said("transposed").partition("=")[0], what, "set it to 1; fsdp takes its devices")
        replica, data = replica * data, transposed  # ours splits them over `data`
    if expert > 1:
        option, because = "fsdp_expert", said("expert")
    elif context > 1:
        option, because = "fsdp_context", said("context")
    elif transposed > 1:
        option, because = "fsdp_2d", said("transposed")
    elif tensor > 1:
        option, because = ("fsdp_tensor" if fsdp > 1 else "tensor"), said("tensor")
    elif fsdp == 1 and data * replica > 1:
        option, because = "ddp", said("fsdp")
    elif replica > 1 and data == 1:
        option, because = "hsdp", said("replica")
    else:
        option, because = "fsdp", said("fsdp")
    reading.put(f"sharding={option}", because)
    if option == "hsdp" and replica == devices.num_slices:
        replica = 1  # its mesh has as many as slices
    sizes = {"replica": replica, "stage": stage, "data": data, **others}
    if option in ("ddp", "tensor"):
        del sizes["data"]  # its mesh has all other devices along data
    for axis, size in sizes.items():
        if size > 1:
            reading.put(f"mesh.{axis}={size}", said("transposed" if axis == "data" and transposed > 1 else axis))
    if devices.is_gpu and replica > 1 and stage == 1:
        reading.put("overlap.layers.reduce_in_backward=true", "gradients are summed over replicas layer by layer")
