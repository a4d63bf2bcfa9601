"""The price of every candidate at once: memory, compute, exposed communication. No candidate is traced for it.

The ticks and the buffers of a pipeline are no products of powers: they are priced by the candidate's own table.
Candidates of one family (families.py) run the same operations in the same form of ticks, with the same layers on each
stage. Their tables differ in length, and so in the slots that buffers have.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.partition_spec import Axes
from ..estimate.estimate import memory_figures, time_figures
from ..estimate.program_costs import Costs, Numbers
from ..estimate.step_time import LinkTimes, StepTime, plan_link_times, plan_rates, time_step
from ..figures import StepFigures
from ..parallel.pipeline_plan import PipelinePlan
from ..pipeline.buffers import COLUMN_OF, lower_table
from ..pipeline.makespan import TickSlot, ticks_of_head
from ..target.accuracy import ProgramKind, kinds_in_types
from .families import Family, Key, family_key
from .space import MeshCandidate


@dataclass(frozen=True)
class Prices:
    """The prices of candidates, in their order: the time of a step, and bytes of a device. kinds: of each program, by
    the types of its matmuls too."""

    candidates: tuple[MeshCandidate, ...]
    kinds: tuple[tuple[ProgramKind, ...], ...]
    peak_bytes: Numbers
    host_bytes: Numbers
    time: StepTime[Numbers]

    def figures(self, place: int, limit_bytes: int) -> StepFigures:
        """Returns the figures of one candidate by its price. limit_bytes: the memory of a device that it may take."""
        target, peak_bytes, host_bytes = self.candidates[place].variant.target(), self.peak_bytes, self.host_bytes
        memory = memory_figures(target, int(peak_bytes[place]), int(host_bytes[place]), limit=limit_bytes)
        return StepFigures(**memory, **time_figures(target, self.kinds[place], self.time.of(place)))


def price_candidates(
    candidates: Sequence[MeshCandidate], families: Mapping[Key, Family], link_speed: float = 1.0
) -> Prices:
    """Returns the prices of candidates that the rules allow, each of which has a family. link_speed: a factor on the
    bandwidth of all links."""
    places: dict[Key, list[int]] = {}
    for place, one in enumerate(candidates):
        key = family_key(one, families)
        assert key is not None
        places.setdefault(key, []).append(place)
    count = len(candidates)
    peak, host, compute, bubble = (np.zeros(count) for _ in range(4))
    exposed: dict[Axes, Numbers] = {}
    for key, own in places.items():
        family, ones = families[key], [candidates[place] for place in own]
        rates = plan_rates(ones[0].variant.target())
        assert rates is not None, "a variant without is refused by the rules"
        tables: dict[int, list[int]] = {}  # candidates that are priced at once: of a pipeline those with one table
        for place, one in enumerate(ones):
            tables.setdefault(one.num_microbatches if one.pipeline else 0, []).append(place)
        for some in tables.values():
            alike, at = [ones[place] for place in some], [own[place] for place in some]
            costs, links, hiding = family.costs(alike), _link_times(alike, family, link_speed), family.hiding_of(alike)
            peak[at], host[at] = costs.peak_bytes(), costs.host_bytes()
            time = time_step(with_table(costs, alike[0].pipeline), rates, links, hiding)
            compute[at], bubble[at] = time.compute_seconds, time.bubble_seconds
            for axes, seconds in time.exposed.items():
                exposed.setdefault(axes, np.zeros(count))[at] += seconds
    types = {place: families[key].shape.matmul_types for key, own in places.items() for place in own}
    kinds = tuple(kinds_in_types(one.kinds, types[place]) for place, one in enumerate(candidates))
    return Prices(tuple(candidates), kinds, peak, host, StepTime(compute, exposed, bubble))


def _link_times(candidates: Sequence[MeshCandidate], family: Family, speed: float) -> LinkTimes:
    """Returns the links of the family's collectives on each candidate's mesh. Each mesh is looked at once."""
    meshes = {(one.sizes, one.device_order): one.mesh for one in candidates}
    place = {mesh: i for i, mesh in enumerate(meshes)}
    candidates_on = defaultdict[int, list[int]](list)
    for number, one in enumerate(candidates):
        candidates_on[place[one.sizes, one.device_order]].append(number)
    links = plan_link_times(list(meshes.values()), family.shape.collective_axes)
    of = {
        over: {link: [each for mesh in own for each in candidates_on[mesh]] for link, own in found.items()}
        for over, found in links.of.items()
    }
    return LinkTimes(of, speed)


def with_table(costs: Costs, pipeline: PipelinePlan | None) -> Costs:
    """Returns the costs of candidates with this pipeline, with the ticks of its table; without one, the costs."""
    loop = costs.shape.ticks
    if loop is None or pipeline is None:
        return costs
    table = pipeline.table
    columns = lower_table(table, pipeline.layers.kind_of).columns
    numbers, parts = costs.numbers.copy(), list(loop.parts)
    numbers[list(costs.shape.regions[loop.region][-1])] = table.num_ticks
    slots = [(place, part) for place, part in enumerate(parts) if isinstance(part, TickSlot)]
    chosen = [columns[COLUMN_OF[op]] for op in sorted(table.ops, key=lambda op: op.place)]
    num_loops = sum(not part.is_shared for _, part in slots) // len(chosen)
    if num_loops > 1:  # of each operation, one for each kind of chunk
        chosen = [column == kind for column in chosen for kind in range(1, 1 + num_loops)]
    of_slots = iter(chosen)
    for place, part in slots:
        of_part = np.array(ticks_of_head(table)) if part.is_shared else next(of_slots).astype(int)
        parts[place] = replace(part, chosen=tuple(map(tuple, of_part.tolist())))
        for number, branch in enumerate(part.branches):
            places, share = list(costs.shape.regions[branch[0]][-1]), (of_part == number).mean(axis=0)
            numbers[places] = share[: len(places), None]
    return Costs(replace(costs.shape, ticks=replace(loop, parts=tuple(parts))), numbers)
