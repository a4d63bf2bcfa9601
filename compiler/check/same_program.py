"""Compares the program of a small declaration with the declared one.

Both are read from plans: the strategy of each operation at each of its sites, the table of a pipeline, what splits each
parameter, and the kinds of collectives with the mesh axes that they cross, of the traced steps. No program of the
declared size is compiled.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..core.partition_spec import axes_of, keep_axes
from ..estimate.communication import plan_communication
from ..estimate.estimate import price_regions, read_step
from ..plan import Plan


def split_of(spec: Any) -> str:
    """Returns what splits a parameter: P(None, 'fsdp') -> "dimension 1 over fsdp"; "nothing"."""
    split = ((number, axes_of(entry)) for number, entry in enumerate(spec))
    return ", ".join(f"dimension {number} over {' x '.join(axes)}" for number, axes in split if axes) or "nothing"


@dataclass(frozen=True)
class SameProgram:
    """Two plans, of a declaration and of a small one like it."""

    declared: Plan[Any]
    small: Plan[Any]

    def differences(self) -> Iterator[str]:
        """Yields what only one of both programs has."""
        yield from self.other_operations()
        yield from self.other_layouts()
        yield from self._other_collectives()

    def other_operations(self) -> Iterator[str]:
        """Yields the operations that run by another strategy in the small program, and the pipeline if it has another
        table."""
        yield from self._other(lambda plan: {f"{e.op.kind} {e.site.path}": e.chosen.name for e in plan.operations})
        yield from self._other(lambda plan: {"pipeline": plan.pipeline.table.name} if plan.pipeline else {})

    def other_layouts(self) -> Iterator[str]:
        """Yields the parameters that other mesh axes split in the small program."""

        def layouts(plan: Any) -> dict[str, str]:
            several = tuple(axis for axis, size in plan.mesh.sizes.items() if size > 1)
            return {each.array.path: split_of(keep_axes(each.spec, several)) for each in plan.sharding.parameters}

        yield from self._other(layouts)

    def _other(self, facts_of: Callable[[Any], dict[str, str]]) -> Iterator[str]:
        before, now = facts_of(self.declared), facts_of(self.small)
        for name in dict.fromkeys([*before, *now]):
            if before.get(name) != now.get(name):
                yield f"{name}: {now.get(name, 'not there')} instead of {before.get(name, 'nothing')}"

    def _other_collectives(self) -> Iterator[str]:
        """Yields the kinds of collectives that only one of the two steps has."""

        def kinds(plan: Any) -> set[str]:
            step, sizes = price_regions(read_step(plan), plan.target.compiler), plan.mesh.sizes
            each = ((c.kind, [axis for axis in c.mesh_axes if sizes[axis] > 1]) for c in plan_communication(plan, step))
            return {f"{kind} over {' x '.join(axes)}" for kind, axes in each if axes}

        before, now = kinds(self.declared), kinds(self.small)
        yield from (f"no {one}" for one in sorted(before - now))
        yield from (f"also {one}" for one in sorted(now - before))
