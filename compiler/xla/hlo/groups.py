"""Reads replica groups as lists of devices, in each form that XLA writes.

{{0,1},{2,3}}                          listed
[2,4]<=[8]                             eight devices in order, two groups of four
[4,2]<=[2,4]T(1,0)                     the devices 0..7 as a 2 x 4 array, transposed, then four groups of two
mesh['a'=2,'b'=4] {'b'}                over an axis of a mesh of the devices in order
mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}    in another order, of numbers or as above
"""

import itertools
import math
import re
from functools import cache

from .parse import HloError, Instruction

ReplicaGroups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(.*?)\](?:, device_ids=\((.*?)\))?\s+\{(.*?)\}")
_AXIS_NAME = re.compile(r"'([^']+)'")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_TRANSPOSED = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")


def groups_of(collective: Instruction, num_devices: int) -> ReplicaGroups | None:
    """Returns the groups of a collective, or the pairs of a permute; None where it names neither. A permute between
    slices leaves one of no pairs within each. Raises HloError as `parse_groups` does."""
    pairs = collective.attribute("source_target_pairs")
    if pairs is not None and not any(map(str.isdigit, pairs)):
        return ()
    text = collective.attribute("replica_groups") or pairs
    return parse_groups(text, num_devices) if text else None


@cache
def parse_groups(text: str, num_devices: int) -> ReplicaGroups:
    """Returns the groups of a `replica_groups` or `source_target_pairs` attribute. Empty braces: all devices in one
    group.

    Raises HloError for a form that is not known, an axis that the mesh does not have, and devices beyond the program's.
    """
    groups = _parsed(text.strip(), num_devices)
    if beyond := [device for group in groups for device in group if device >= num_devices]:
        raise HloError(f"its groups name device {max(beyond)}, and the program has {num_devices}, from 0")
    return groups


def _parsed(text: str, num_devices: int) -> ReplicaGroups:
    if iota := _IOTA.match(text):
        return _of_iota(_numbers(iota[1]), _numbers(iota[2]), _numbers(iota[3]) if iota[3] else None)
    if mesh := _MESH.match(text):
        axes = [(name, int(size)) for name, size in _MESH_AXIS.findall(mesh[1])]
        order = _order(mesh[2]) if mesh[2] else range(math.prod(size for _, size in axes))
        if unknown := set(_AXIS_NAME.findall(mesh[3])) - {name for name, _ in axes}:
            named, there = ", ".join(sorted(unknown)), ", ".join(name for name, _ in axes)
            raise HloError(f"its groups lie along {named}, and the axes of the mesh are {there}")
        if len(order) != math.prod(size for _, size in axes):
            raise HloError(
                f"the mesh of its groups has {len(order)} devices in place of {math.prod(size for _, size in axes)}"
            )
        return tuple(tuple(order[place] for place in group) for group in _of_mesh(axes, _AXIS_NAME.findall(mesh[3])))
    if text.startswith("{"):
        inner = re.findall(r"\{([\d,\s]+)\}", text[1:-1])
        return tuple(_numbers(group) for group in inner) or (tuple(range(num_devices)),)
    raise HloError(f"replica groups of an unknown form: {text[:60]}")


def _of_iota(shape: tuple[int, ...], dimensions: tuple[int, ...], order: tuple[int, ...] | None) -> ReplicaGroups:
    order = order or tuple(range(len(dimensions)))
    strides = [math.prod(dimensions[d + 1 :]) for d in range(len(dimensions))]
    ranges = [range(dimensions[d]) for d in order]
    devices = [sum(i * strides[d] for i, d in zip(index, order, strict=True)) for index in itertools.product(*ranges)]
    size = shape[-1]
    return tuple(tuple(devices[start : start + size]) for start in range(0, len(devices), size))


def _order(text: str) -> tuple[int, ...]:
    """Returns the devices in the order of a mesh: listed, or those in order as an array that is transposed."""
    transposed = _TRANSPOSED.fullmatch(text)
    if not transposed:
        return _numbers(text)
    dimensions = _numbers(transposed[1])
    order = _numbers(transposed[2]) if transposed[2] else None
    return _of_iota((math.prod(dimensions),), dimensions, order)[0]


def _of_mesh(axes: list[tuple[str, int]], over: list[str]) -> ReplicaGroups:
    kept = [d for d, (name, _) in enumerate(axes) if name not in over]
    inner = [next(d for d, (axis, _) in enumerate(axes) if axis == name) for name in over]
    sizes = tuple(size for _, size in axes)
    return _of_iota((math.prod(sizes[d] for d in inner),), sizes, (*kept, *inner))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())
