"""Compares the program of a small declaration with the declared one.

Both are read from plans: the strategy of each operation at each of its sites, the table of a pipeline, what splits each
parameter, and the kinds of collectives with the mesh axes that they cross, of the traced steps. No program of the
declared size is compiled.
"""

from collections.abc import Iterator
from typing import Any

from ..core.partition_spec import axes_of, keep_axes
from ..estimate.communication import plan_communication
from ..estimate.estimate import price_regions, read_step
from ..plan import Plan


def other_operations(declared: Plan[Any], small: Plan[Any]) -> Iterator[str]:
    """Yields the operations that run by another strategy in the small program, and the pipeline if it has another
    table."""
    before, now = _strategies(declared), _strategies(small)
    for site in dict.fromkeys([*before, *now]):
        if before.get(site) != now.get(site):
            yield f"{site}: {now.get(site, 'not there')} instead of {before.get(site, 'nothing')}"
    tables = [plan.pipeline.table.name if plan.pipeline else "no pipeline" for plan in (declared, small)]
    if tables[0] != tables[1]:
        yield f"pipeline: {tables[1]} instead of {tables[0]}"


def _strategies(plan: Plan[Any]) -> dict[str, str]:
    return {f"{each.op.kind} {each.site.path}": each.chosen.name for each in plan.operations}


def split_of(spec: Any) -> str:
    """Returns what splits a parameter: P(None, 'fsdp') -> "dimension 1 over fsdp"; "nothing"."""
    split = ((number, axes_of(entry)) for number, entry in enumerate(spec))
    return ", ".join(f"dimension {number} over {' x '.join(axes)}" for number, axes in split if axes) or "nothing"


def other_layouts(declared: Plan[Any], small: Plan[Any]) -> Iterator[str]:
    """Yields the parameters that other mesh axes split in the small program."""
    before, now = _layouts(declared), _layouts(small)
    for path in dict.fromkeys([*before, *now]):
        if before.get(path) != now.get(path):
            yield f"{path}: {now.get(path, 'not there')} instead of {before.get(path, 'not there')}"


def _layouts(plan: Plan[Any]) -> dict[str, str]:
    sizes = plan.mesh.sizes
    several = tuple(axis for axis, size in sizes.items() if size > 1)
    return {each.array.path: split_of(keep_axes(each.spec, several)) for each in plan.sharding.parameters}


def other_collectives(declared: Plan[Any], small: Plan[Any]) -> Iterator[str]:
    """Yields the kinds of collectives that only one of the two steps has."""
    before, now = _collectives(declared), _collectives(small)
    for one in sorted(before - now):
        yield f"no {one}"
    for one in sorted(now - before):
        yield f"also {one}"


def _collectives(plan: Plan[Any]) -> set[str]:
    step = price_regions(read_step(plan), plan.target.compiler)
    sizes = plan.mesh.sizes
    found = (
        (each.kind, [axis for axis in each.mesh_axes if sizes[axis] > 1]) for each in plan_communication(plan, step)
    )
    return {f"{kind} over {' x '.join(axes)}" for kind, axes in found if axes}
