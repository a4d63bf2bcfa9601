"""What a collective is for whose name the compiler dropped: what the plan has of its kind, its axes and its size.

    all-reduce over fsdp of f32[1024,4096], three times  ->  layers/mlp/up_EM, backward (matched by size)

TPUs reduce-scatter over 16 devices and more as synchronous all-reduces, of many gradients at once, without names; a
program for several slices has no names at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from ..estimate.communication import PlannedCollective
from ..xla.schedule.steps import Collective

NUM_NAMED = 4
LANES = 128  # TPUs pad small arrays to a row of these


@dataclass(frozen=True)
class Match:
    """Arrays of one size in a collective. candidates: those of the plan that they may be; none where it has no such."""

    num_arrays: int
    candidates: tuple[PlannedCollective, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(candidate.source for candidate in self.candidates))

    @property
    def is_certain(self) -> bool:
        return 0 < len(self.sources) <= self.num_arrays


def match_planned(
    collective: Collective, axes: Sequence[str], count: int, planned: Sequence[PlannedCollective]
) -> tuple[Match, ...]:
    """For each size of its arrays, the largest first. count: executions in a step, by which candidates are told apart
    where that leaves any."""
    alike = [p for p in planned if p.kind in _kinds(collective) and _is_over(p, collective, axes)]
    alike = [p for p in alike if jnp.issubdtype(p.dtype, jnp.integer) == (collective.dtype[:1] in ("s", "u"))]
    sizes = sorted(set(collective.num_elements), reverse=True)
    return tuple(_of_size(size, collective.num_elements.count(size), alike, count) for size in sizes)


def source_by_size(matches: Sequence[Match]) -> str | None:
    """'head/kernel_EV, backward (matched by size)'; 'one of a, b and 2 more (matched by size)' where the largest array
    is a or b, and two are joined with it; None where none fits."""
    found = [match for match in matches if match.candidates]
    if not found:
        return None
    first = found[0]
    named = first.sources[0] if first.is_certain else _one_of(first.sources)
    num_more = sum(match.num_arrays for match in matches) - 1
    directions = {candidate.direction for match in found for candidate in match.candidates}
    more = f" and {num_more} more" if num_more else ""
    return f"{named}{more}{f', {directions.pop()}' if len(directions) == 1 else ''} (matched by size)"


def num_elements(planned: PlannedCollective) -> int:
    """Of the full array of one execution."""
    return planned.bytes_each // jnp.dtype(planned.dtype).itemsize


def _kinds(collective: Collective) -> tuple[str, ...]:
    """What it may stand for: a sum of arrays of which each device fills its part is a gather."""
    if collective.kind != "all-reduce":
        return (collective.kind,)
    return ("all-gather",) if collective.is_padded else ("all-reduce", "reduce-scatter")


def _is_over(planned: PlannedCollective, collective: Collective, axes: Sequence[str]) -> bool:
    """Of an all-reduce also a part: over slices it is one within each, and then one across."""
    over = set(planned.mesh_axes)
    return over == set(axes) or (planned.kind == collective.kind == "all-reduce" and set(axes) < over)


def _of_size(size: int, num_arrays: int, alike: Sequence[PlannedCollective], count: int) -> Match:
    by_size: dict[int, list[PlannedCollective]] = {}
    for each in alike:
        by_size.setdefault(num_elements(each), []).append(each)
    found = [each for one, same in by_size.items() if size in (one, -(-one // LANES) * LANES) for each in same]
    if found:
        counted = [each for each in found if each.count == count]
        return Match(num_arrays, tuple(counted or found))
    for one, same in by_size.items():  # joined end to end: all that are of one size, or some of many scalars
        if size == one * len(same) or (one == 1 and size <= sum(each.count for each in same)):
            return Match(num_arrays * size // one, tuple(same))
    return Match(num_arrays, ())


def _one_of(sources: Sequence[str]) -> str:
    others = f" or {len(sources) - NUM_NAMED} others" if len(sources) > NUM_NAMED else ""
    return f"one of {', '.join(sources[:NUM_NAMED])}{others}"
