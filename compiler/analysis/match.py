"""Matches a collective whose name the compiler dropped with the planned ones of its kind, axes and size.

    all-reduce over fsdp of f32[1024,4096], three times  ->  layers/mlp/up_EM, backward (inferred from its size)

On TPUs, reduce-scatters over 16 or more devices become synchronous all-reduces of many gradients at once, without
names. A program for several slices has no names at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from ..core.scopes import OperationName
from ..core.traffic import TrafficSource
from ..estimate.communication import PlannedCollective
from ..jaxpr.operation_kinds import LANES
from ..xla.schedule.steps import Collective


@dataclass(frozen=True)
class Match:
    """Arrays of one size in a collective. candidates: the planned arrays that they may be; empty if there are none."""

    num_arrays: int
    candidates: tuple[PlannedCollective, ...]

    @property
    def origins(self) -> tuple[TrafficSource, ...]:
        """Returns what the candidates move, in whichever pass."""
        return tuple(dict.fromkeys(replace(candidate.origin, in_pass="") for candidate in self.candidates))

    @property
    def is_certain(self) -> bool:
        return 0 < len(self.origins) <= self.num_arrays


def match_planned(
    collective: Collective, axes: Sequence[str], count: int, planned: Sequence[PlannedCollective]
) -> tuple[Match, ...]:
    """Returns a match for each size of its arrays, the largest first. count: executions in a step. The count and the
    names of the instructions that compute the operands narrow the candidates down, unless that would leave none."""
    alike = [p for p in planned if p.kind in _kinds(collective) and _is_over(p, collective, axes)]
    alike = [p for p in alike if jnp.issubdtype(p.dtype, jnp.integer) == (collective.dtype[:1] in ("s", "u"))]
    made_by = {OperationName(name).activation for name in collective.made_by}
    sizes = sorted(set(collective.num_elements), reverse=True)
    return tuple(_of_size(size, collective.num_elements.count(size), alike, count, made_by) for size in sizes)


def source_by_size(matches: Sequence[Match]) -> TrafficSource | None:
    """Returns the source: 'head/kernel_EV, backward (inferred from its size)'; 'one of a, b and 2 more (...)' if the
    largest array is a or b, and two more are combined with it; None if nothing matches."""
    found = [match for match in matches if match.candidates]
    if not found:
        return None
    first, *others = found[0].origins
    passes = {candidate.origin.in_pass for match in found for candidate in match.candidates}
    return replace(
        first,
        others=() if found[0].is_certain else tuple(each.name for each in others),
        num_more=sum(match.num_arrays for match in matches) - 1,
        is_inferred=True,
        in_pass=passes.pop() if len(passes) == 1 else "",
    )


def num_elements(planned: PlannedCollective) -> int:
    """Returns the number of elements of the full array of one execution."""
    return planned.bytes_each // jnp.dtype(planned.dtype).itemsize


def _kinds(collective: Collective) -> tuple[str, ...]:
    """Returns the planned kinds that it may implement: a sum of arrays that are each filled in one part only is a
    gather."""
    if collective.kind != "all-reduce":
        return (collective.kind,)
    return ("all-gather",) if collective.is_padded else ("all-reduce", "reduce-scatter")


def _is_over(planned: PlannedCollective, collective: Collective, axes: Sequence[str]) -> bool:
    """Returns whether it runs over these axes. An all-reduce may run over some of them: within slices, then across
    them."""
    over = set(planned.mesh_axes)
    return over == set(axes) or (planned.kind == collective.kind == "all-reduce" and set(axes) < over)


def _of_size(
    size: int, num_arrays: int, alike: Sequence[PlannedCollective], count: int, made_by: set[str | None]
) -> Match:
    by_size: dict[int, list[PlannedCollective]] = {}
    for each in alike:
        by_size.setdefault(num_elements(each), []).append(each)
    found = [each for one, same in by_size.items() if size in (one, -(-one // LANES) * LANES) for each in same]
    if found:
        found = [each for each in found if each.origin.activation in made_by] or found
        counted = [each for each in found if each.count == count]
        return Match(num_arrays, tuple(counted or found))
    for one, same in by_size.items():  # concatenated: all arrays of one size, or some of many scalars
        if size == one * len(same) or (one == 1 and size <= sum(each.count for each in same)):
            return Match(num_arrays * size // one, tuple(same))
    return Match(num_arrays, ())
