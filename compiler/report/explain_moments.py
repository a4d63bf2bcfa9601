"""Explains how the state of the optimizer is stored: its bytes by type, blocks of 8 bits, and what stays in float32."""

from collections.abc import Iterator
from typing import Any

from meshloom.models import Model

from ..core.format import counted, human_bytes, human_seconds
from ..core.traffic import HOST_COPIES
from ..core.trees import leaves_by_path, pick
from ..formats.block import ELEMENTS, SCALES
from ..optim.moments import moment_layouts, moment_of
from ..optim.optimizers import parameter_kinds
from ..sharding.rules import ArrayPlan
from ..sharding.sharding import ShardingPlan
from ..sharding.state import update_layouts
from ..target.mesh import MeshPlan
from ..target.target import TargetPlan


def bytes_by_type(arrays: tuple[ArrayPlan, ...]) -> dict[str, int]:
    """Returns the bytes of the optimizer's state on each device by type: {"int8": .., "scales": .., "float32": ..}."""
    found = dict[str, int]()
    for each in arrays:
        _, part = moment_of(each.array.path)
        name = "scales" if part == SCALES else each.array.dtype
        found[name] = found.get(name, 0) + each.bytes_per_device
    return found


def moment_lines(
    arrays: tuple[ArrayPlan, ...], model: Model, sharding: ShardingPlan, mesh: MeshPlan, declared: int | None
) -> Iterator[str]:
    """Yields lines about the optimizer's state, if a part of it is stored in 8 bits: bytes by type, then the blocks.
    arrays: of the state. declared: the length of a block."""
    if not any(moment_of(each.array.path)[1] == ELEMENTS for each in arrays):
        return
    yield ", ".join(f"{human_bytes(size)} of {name}" for name, size in bytes_by_type(arrays).items())
    trained, kinds = (pick(tree, sharding.trained) for tree in (model.abstract(), parameter_kinds(model)))
    layouts: Any = moment_layouts(trained, kinds, update_layouts(model, sharding), mesh.sizes, declared)
    blocks: dict[str, list[str]] = {}
    for path, layout in leaves_by_path(layouts).items():
        how = f"in blocks of {layout.block} ({layout.reason})" if layout.block else f"in float32 ({layout.reason})"
        blocks.setdefault(how, []).append(path)
    for how, paths in blocks.items():
        yield f"{paths[0] if len(paths) == 1 else counted(len(paths), 'parameter')} {how}"


def host_lines(num_bytes: int, target: TargetPlan) -> Iterator[str]:
    """Yields a line about moments in the memory of the host, if there are some. num_bytes: of a device."""
    if not num_bytes:
        return
    rates = [target.host_bytes_per_second(kind) for kind in HOST_COPIES]
    seconds = max(num_bytes / rate for rate in rates if rate) if all(rates) else None
    link = f"; its link takes {human_seconds(seconds)} for all of them, each way" if seconds else ""
    yield (
        f"{human_bytes(num_bytes)} of moments lie in the host's memory; layers are updated one after the "
        f"other, so that the device holds the moments of one{link}"
    )
