"""Estimates the time of a step from its operations alone and the communication that can hide, without a compiler.

compute    FLOPs and memory traffic at the shares of the chip's peaks that compiled programs reach
           (`target.chip.efficiency`); a matmul or kernel takes the longer of its two, and streams its operands at the
           rate of a single large kernel (`target.chip.kernels.memory`), which pointwise passes do not reach
exposed    collectives that the compiler overlaps hide behind the arithmetic of their own loop, as far as their order
           leaves it to them (latency_hiding.py); the others are waited for
host       copies to the host and back run beside all that their loop does; what outlasts that is waited for, and on
           TPUs an array that has not left when the next trip makes it anew

docs/estimate.md compares it with compiled schedules.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Generic, TypeVar

import numpy as np

from ..core.float_types import PeakType, peak_name
from ..core.kernels import RatedBy
from ..core.partition_spec import STAGE, Axes
from ..core.traffic import HOST, HOST_COPIES, MOVING, AxisGroups, CollectiveKind, HostCopyKind
from ..core.trees import leaves_by_path
from ..figures import SLICES
from ..parallel.operation import Exposed, exposed_by_source, runs_beside_compute
from ..pipeline.makespan import TickLoop, TickPart, TickPermute, TickSlot, time_ticks
from ..plan import Plan
from ..spec.compiler_traits import ExpectedAcross, ExpectedKernels
from ..spec.cost_model import cost_model
from ..spec.flag_presets import begin_early, sent_at_once
from ..spec.target_spec import ChipSpec
from ..target.compiler_options import (
    hidden_kinds,
    kinds_from_matmuls,
    options_with,
    why_permutes_wait,
)
from ..target.links import Link, collective_seconds
from ..target.matmul_times import MatmulTimes
from ..target.mesh import MeshPlan
from ..target.target import TargetPlan
from .estimated_step import assume_overlap, exposed_of_parts
from .latency_hiding import Flight, Stall, exposed_as_ready, exposed_in_order
from .program_costs import Costs, Numbers, RegionCosts, Transfer, WorkCosts, WorkKind, read_costs
from .regions import Region

Seconds = TypeVar("Seconds", float, Numbers)


@dataclass(frozen=True)
class Rates:
    """The speeds that programs reach on a device. hbm: for pointwise passes. stream: for a matmul or kernel, which
    reads ahead. of_type: the FLOP/s of matmuls in types of few bits. merged: for the sums of ring attention. large: for
    large passes, over the rows of experts and slices that are copied. kernel: the FLOP/s of a kernel in 16 bits.
    faster: by how much the peak is higher in each type of few bits, in which kernels reach as much of it. matmuls:
    measured times; for a type without, and where None, the FLOP/s count after matmul_seconds. slice_wait: the share of
    a step for which slices wait for one another. host: the bytes per second of copies to the host and back."""

    matmul_flops_per_second: float
    kernel: Callable[[RatedBy], float]
    hbm_bytes_per_second: float
    stream_bytes_per_second: float
    merged_bytes_per_second: float
    large_bytes_per_second: float
    matmuls: MatmulTimes | None = None
    matmul_seconds: float = 0.0
    slice_wait: float = 0.0
    of_type: Mapping[str, float] = field(default_factory=dict[str, float])
    faster: Mapping[str, float] = field(default_factory=dict[str, float])
    host: Mapping[HostCopyKind, float] = field(default_factory=dict[HostCopyKind, float])


@dataclass(frozen=True)
class Hiding:
    """The collectives that the compiler overlaps with compute.

    weights: the kinds of collectives of weights that it overlaps. is_doubled: a gradient that is not reduced beside
    compute is all-reduced, which takes twice the time of a reduce-scatter, except over groups of up to `scattered`
    devices. activations_exposed: the exposed share of
    activations' collectives, for all declarations or for each. of_operations: the exposed time of the collectives of
    operations that state it themselves, by source. exposed_second_sums: the exposed share of a gradient's all-reduce
    that follows its reduce-scatter in a trip of a loop. from_matmuls: the kinds of weights' collectives of which chunks
    are sent from within matmuls. at_once: how many collectives of weights are on their way at once. by_prices: whether
    the scheduler has the times of a PGLE file, which are taken to be right. most_combined_bytes: the size up to which
    sums that end together are combined; None: they are not. as_ready: whether each begins as soon as it may, and a trip
    waits for what the one before it copies to the host.
    all_reduced: the parameters whose gradients the compiler all-reduces where the step reduce-scatters them.
    """

    weights: frozenset[CollectiveKind]
    activations_exposed: float | Numbers
    is_doubled: bool
    of_operations: Mapping[str, Exposed] = field(default_factory=dict[str, Exposed])
    exposed_second_sums: float = 0.0
    from_matmuls: frozenset[CollectiveKind] = frozenset()
    in_order: ExpectedAcross | None = None
    expected_kernels: ExpectedKernels | None = None
    begins_early: bool = False
    at_once: int = 1
    by_prices: bool = False
    most_combined_bytes: int | None = None
    scattered: int = 0
    as_ready: bool = False
    all_reduced: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StepTime(Generic[Seconds]):
    """The seconds of a step: of one declaration, or of each of many. exposed: seconds by the mesh axes that the
    collectives run over. bubble: those in which the stages of a pipeline wait for others; None without one. Of a
    pipeline all are means over the stages, as in the report of a compiled step."""

    compute_seconds: Seconds
    exposed: Mapping[Axes, Seconds]
    bubble: Seconds | None = None

    @property
    def bubble_seconds(self) -> Seconds:
        return 0 * self.compute_seconds if self.bubble is None else self.bubble

    @property
    def exposed_seconds(self) -> Seconds:
        return sum(self.exposed.values(), start=0 * self.compute_seconds)

    @property
    def seconds(self) -> Seconds:
        return self.compute_seconds + self.exposed_seconds + self.bubble_seconds

    def of(self: "StepTime[Numbers]", place: int) -> "StepTime[float]":
        """Returns the time of one of many declarations."""
        exposed = {axes: float(seconds[place]) for axes, seconds in self.exposed.items()}
        bubble = None if self.bubble is None else float(self.bubble[place])
        return StepTime(float(self.compute_seconds[place]), MappingProxyType(exposed), bubble)


@dataclass(frozen=True)
class LinkTimes:
    """The links of collectives over some mesh axes. Each declaration has links of its own, since its mesh does.

    of: by mesh axes and groups of devices along them, the links that occur, each with the places of its declarations.
    speed: how much faster they are than the target's.
    """

    of: Mapping[tuple[Axes, AxisGroups | None], Mapping[Link, Sequence[int]]]
    speed: float = 1.0

    def seconds(
        self, kind: CollectiveKind, axes: Axes, num_bytes: Numbers, groups: AxisGroups | None = None
    ) -> Numbers:
        """Returns the seconds of one collective alone. num_bytes: of the full array, of each declaration."""
        seconds = np.zeros_like(num_bytes, dtype=np.float64)
        for link, places in self.of[axes, groups].items():
            start, whole = (_alone(kind, size, link) for size in (0 * num_bytes[places], num_bytes[places]))
            seconds[places] = start + (whole - start) / self.speed
        return seconds

    def expected_seconds(
        self, kind: CollectiveKind, axes: Axes, num_bytes: Numbers, seconds: Numbers, expects: ExpectedAcross
    ) -> Numbers:
        """Returns the seconds that a scheduler expects a collective to last. num_bytes: of the full array. seconds:
        those that it lasts, which the scheduler knows of those within a node."""
        expected = np.array(seconds)
        for link, places in self.of[axes, None].items():
            if len(link.levels) > 1:
                at_once = link.levels[0].size
                sent = num_bytes[places] / expects.bytes_per_second + link.group_size * expects.step_seconds
                expected[places] = sent / at_once * (1.0 if kind in MOVING else expects.sums)
        return expected

    def of_large_groups(self, axes: Axes, most: int, seconds: Numbers) -> Numbers:
        """Returns 1 for each declaration whose groups over these axes have more than `most` devices, else 0. seconds:
        any numbers of as many declarations."""
        found = np.zeros_like(seconds)
        for link, places in self.of[axes, None].items():
            if link.group_size > most:
                found[places] = 1.0
        return found


def _alone(kind: CollectiveKind, num_bytes: Numbers, link: Link) -> Numbers:
    seconds = collective_seconds(kind, num_bytes, link.group_size, link)
    assert seconds is not None
    return seconds


def estimate_time(plan: Plan, step: Region) -> StepTime[float] | None:
    """Returns the time of the plan's step; None where the target's figures are not known."""
    rates = plan_rates(plan.target)
    if rates is None:
        return None
    weights = frozenset(array.array.path for array in plan.sharding.parameters)
    shape, numbers = read_costs(step, weights, plan.ops)
    links = plan_link_times([plan.mesh], shape.collective_axes)
    return time_step(Costs(shape, numbers[:, None]), rates, links, plan_hiding(plan)).of(0)


def time_step(costs: Costs, rates: Rates, links: LinkTimes, hiding: Hiding) -> StepTime[Numbers]:
    """Returns the time of a step of each declaration, on the stage of the mesh that takes longest."""
    compute = np.zeros((1, costs.numbers.shape[1]))
    exposed: dict[Axes, Numbers] = {}
    of_regions, leaving = list[Numbers](), list[Numbers]()
    for number, region in enumerate(costs.regions()):
        works = [_work_seconds(one, rates) for one in region.works]
        alone = _compute_seconds(region, works) + _sending_seconds(region, works, links, hiding)
        compute = compute + alone
        attends = any(one.work.kind == "attention" for one in region.works)
        blocks = _compute_seconds(region, works, "attention") if attends else alone
        waited = _exposed(region, works, alone, blocks, links, hiding)
        for axes, seconds in waited.items():
            exposed[axes] = exposed.get(axes, 0.0) + seconds
        of_regions.append(StepTime(compute * 0 + alone, waited).seconds)
        out = costs.copied_to_host(number) if hiding.as_ready and not region.is_step else []
        leaving.append(region.executions * _leaving_seconds(works, out, rates))
    for number, seconds in _exposed_of_host(costs, rates, of_regions, leaving).items():
        of_regions[number] = of_regions[number] + seconds
        exposed[HOST,] = exposed.get((HOST,), 0.0) + seconds
    whole = StepTime(compute, exposed).seconds
    if costs.shape.ticks is None:
        slowest = whole.argmax(axis=0), np.arange(whole.shape[1])
        each = {axes: np.broadcast_to(seconds, whole.shape)[slowest] for axes, seconds in exposed.items()}
        found = StepTime(np.broadcast_to(compute, whole.shape)[slowest], each)
    else:
        found = _of_pipeline(costs, costs.shape.ticks, StepTime(compute, exposed), of_regions, links)
    if not rates.slice_wait:
        return found
    return replace(found, exposed={**found.exposed, (SLICES,): rates.slice_wait * found.seconds})


def _leaving_seconds(works: Sequence[Numbers], out: Sequence[tuple[int | None, Numbers]], rates: Rates) -> Numbers:
    """Returns the seconds for which a trip waits for what the one before it copies to the host: each array until the
    trip makes it anew, in the same place. out: by array, the works before it is made, and its bytes; what a trip begins
    with leaves after these, and it waits for none of it."""
    leaving = ((made, size / rates.host["copy-to-host"]) for made, size in out if made is not None)
    copies = [Flight(seconds, seconds, 0, made, moves=False) for made, seconds in leaving]
    return sum(exposed_as_ready(works, copies, ()), start=np.zeros(()))


def _exposed_of_host(
    costs: Costs, rates: Rates, of_regions: Sequence[Numbers], leaving: Sequence[Numbers]
) -> dict[int, Numbers]:
    """Returns, by region, the seconds by which copies to the host or back outlast the compute and the waits of the
    region and of those inside of it. Both ways run at the same time. leaving: those for which the trips of a region
    wait for each other's copies to the host."""
    found: dict[int, Numbers] = {}
    for number, copied in costs.copied_bytes().items():
        beside = sum((of_regions[one] for one in costs.shape.inside(number)), start=0 * of_regions[number])
        longest = np.max([0 * beside + num_bytes / rates.host[kind] for kind, num_bytes in copied.items()], axis=0)
        found[number] = np.maximum(longest - beside, leaving[number])
    return found


def _of_pipeline(
    costs: Costs, loop: TickLoop, work: StepTime[Numbers], of_regions: Sequence[Numbers], links: LinkTimes
) -> StepTime[Numbers]:
    """Returns the time of a step with ticks: until the last stage ends. What stages do not spend on compute and on
    exposed collectives is the bubble. work: both of each stage, without permutes of ticks. of_regions: both together,
    by region."""
    num_stages = max(len(part.chosen[0]) for part in loop.parts if isinstance(part, TickSlot))
    wide = [np.broadcast_to(seconds, (num_stages, seconds.shape[1])) for seconds in of_regions]
    outside = sum((each for one, each in enumerate(wide) if one not in loop.regions), start=0 * wide[0])
    num_ticks = costs.executions(loop.region)
    once = [_of_part(part, wide, costs, links) for part in loop.parts]
    free = [0 * each if isinstance(part, TickPermute) else each for part, each in zip(loop.parts, once, strict=True)]
    rest = wide[loop.region] / num_ticks
    ends, without = (outside + time_ticks(loop, each, rest) for each in (once, free))
    compute = (work.compute_seconds + 0 * ends).mean(axis=0)
    exposed = {axes: (seconds + 0 * ends).mean(axis=0) for axes, seconds in work.exposed.items()}
    permutes = ends.max(axis=0) - without.max(axis=0)
    exposed[STAGE,] = exposed.get((STAGE,), 0.0) + permutes
    bubble = ends.max(axis=0) - StepTime(compute, exposed).seconds
    return StepTime(compute, exposed, np.maximum(bubble, 0.0))


def _of_part(part: TickPart, of_regions: Sequence[Numbers], costs: Costs, links: LinkTimes) -> Numbers:
    """Returns the seconds of one slot, by branch and stage, or of one permute."""
    if isinstance(part, TickPermute):
        return links.seconds("collective-permute", (STAGE,), costs.numbers[part.full_bytes])
    each = []
    for branch in part.branches:
        executions = costs.executions(branch[0])
        total = sum((of_regions[one] for one in branch), start=0 * of_regions[0])
        each.append(total / np.where(executions > 0, executions, 1.0))
    return np.array(each)


def _compute_seconds(region: RegionCosts, works: Sequence[Numbers], only: WorkKind | None = None) -> Numbers:
    """Returns the seconds of a region's works in a whole step, or of those of one kind. works: of one execution."""
    each = (seconds for one, seconds in zip(region.works, works, strict=True) if only in (None, one.work.kind))
    return region.executions * sum(each, start=np.zeros(()))


def _work_seconds(one: WorkCosts, rates: Rates) -> Numbers:
    """Returns the seconds of one execution of an operation."""
    kind, rated_by = one.work.kind, one.work.rated_by
    if one.flops is None or (rated_by is None and kind != "matmul"):
        large = rates.large_bytes_per_second
        passes = {"merged": rates.merged_bytes_per_second, "routed": large, "sliced": large}
        return one.num_bytes / passes.get(kind, rates.hbm_bytes_per_second)
    if rated_by is not None:
        faster = rates.faster.get(peak_name(one.work.dtype), 1.0) if one.work.dtype and rates.faster else 1.0
        alone = one.flops / (rates.kernel(rated_by) * faster)
    elif rates.matmuls is not None and rates.matmuls.knows(one.work.dtype):
        assert one.num_results is not None
        alone = rates.matmuls.seconds(one.work.dtype, one.flops, one.num_results)
    else:
        few_bits = peak_name(one.work.dtype) if rates.of_type else ""
        rate = rates.of_type.get(few_bits, rates.matmul_flops_per_second)
        alone = one.flops / rate + rates.matmul_seconds
    return np.maximum(alone, one.num_bytes / rates.stream_bytes_per_second)


def _sending_seconds(
    region: RegionCosts, works: Sequence[Numbers], links: LinkTimes, hiding: Hiding
) -> Numbers | float:
    """Returns how much longer a region's matmuls take that send chunks of collectives: as long as these are on their
    way. works: the seconds of one execution of each work."""
    sending = [each for each in region.transfers if each[0].is_weight and each[0].kind in hiding.from_matmuls]
    if not sending:
        return 0.0
    sent = region.executions * sum(links.seconds(one.kind, one.mesh_axes, size) for one, size in sending)
    return (cost_model().sending_matmul - 1) * np.minimum(sent, _compute_seconds(region, works, "matmul"))


def _exposed(
    region: RegionCosts,
    works: Sequence[Numbers],
    compute: Numbers | float,
    blocks: Numbers | float,
    links: LinkTimes,
    hiding: Hiding,
) -> dict[Axes, Numbers]:
    """Returns the exposed seconds by mesh axes. works: the seconds of one execution of each work. compute: of all, in
    the whole step. blocks: the seconds of attention, beside which the permutes of a ring run."""
    waited: dict[Axes, Numbers] = {}
    stalls: list[Stall] = []
    hidden: list[tuple[Transfer, Numbers, Numbers]] = []  # what compute may hide, of one execution
    beside_blocks: dict[Axes, tuple[Numbers | float, Numbers | float]] = {}  # their time, and the least of it
    for one, num_bytes in (each for each in region.transfers if not each[0].is_of_tick):
        once = links.seconds(one.kind, one.mesh_axes, num_bytes, one.groups)
        seconds = region.executions * once
        if (own := hiding.of_operations.get(one.source or "")) is not None and own.is_beside_attention:
            of_all, of_share = beside_blocks.get(one.mesh_axes, (0.0, 0.0))
            beside_blocks[one.mesh_axes] = of_all + seconds, of_share + own.share * seconds
        elif own is not None:
            waited[one.mesh_axes] = waited.get(one.mesh_axes, 0.0) + own.share * seconds
            # What is as small is not asynchronous, and no stall.
            if own.share > 0.0 and np.max(num_bytes) > cost_model().interleaved_bytes:
                stalls.append(Stall(own.share * once, one.ready))
        elif not one.is_weight:
            ring = 0.5 if one.kind == "collective-permute" else 1.0  # a ring sends one way around, a collective both
            waited[one.mesh_axes] = waited.get(one.mesh_axes, 0.0) + hiding.activations_exposed * ring * seconds
        else:
            kind = one.kind
            if kind == "reduce-scatter" and (hiding.is_doubled or one.parameter in hiding.all_reduced):
                times = 1.0 + links.of_large_groups(one.mesh_axes, hiding.scattered, once)
                kind, once, seconds = "all-reduce", times * once, times * seconds
            share = _exposed_share(region, kind, hiding) if kind in hiding.weights else 1.0
            waited[one.mesh_axes] = waited.get(one.mesh_axes, 0.0) + share * seconds
            if share == 0.0 or (share < 1.0 and hiding.expected_kernels is None):  # else all of it is in the share
                hidden.append((one, num_bytes, (1.0 - share) * once))
    for axes, (seconds, least) in beside_blocks.items():
        waited[axes] = waited.get(axes, 0.0) + np.maximum(seconds - blocks, least)
    if hiding.as_ready:
        left = _exposed_as_ready(region, works, hidden, stalls)
    elif hiding.in_order is None or (hiding.begins_early and not region.has_loops):
        all_of_it = region.executions * sum((once for *_, once in hidden), start=np.zeros(()))
        with np.errstate(invalid="ignore", divide="ignore"):
            stays = np.where(all_of_it > 0, np.maximum(all_of_it - compute, 0.0) / all_of_it, 0.0)
        left = [stays * once for *_, once in hidden]
    else:
        left = _exposed_in_order(works, hidden, links, hiding.in_order, hiding)
    for (one, *_), once in zip(hidden, left, strict=True):
        waited[one.mesh_axes] = waited.get(one.mesh_axes, 0.0) + region.executions * once
    return waited


def _exposed_as_ready(
    region: RegionCosts,
    works: Sequence[Numbers],
    hidden: Sequence[tuple[Transfer, Numbers, Numbers]],
    stalls: Sequence[Stall],
) -> list[Numbers]:
    """Returns the seconds of each collective that a scheduler exposes which lets each begin as soon as it may. It
    computes what only sums read at the end of a trip, each right before its sum. hidden: each with its bytes and its
    seconds."""
    makers = () if region.is_step else [one.maker for one, *_ in hidden if one.kind not in MOVING]
    last = list(dict.fromkeys(maker for maker in makers if maker is not None))
    first = [place for place in range(len(works)) if place not in last]
    # A place before the works that come last is that of the next work which does not.
    of_place = [bisect_left(first, place) if place < len(works) else len(works) for place in range(len(works) + 1)]
    flights = list[Flight]()
    for one, _, once in hidden:
        begin, end = one.beside
        until = len(works) if end is None else of_place[end]
        if one.kind in MOVING:
            flights.append(Flight(once, once, of_place[begin], until))
        else:
            ready = len(first) + last.index(one.maker) + 1 if one.maker in last else of_place[one.ready]
            flights.append(Flight(once, once, ready, until, moves=False))
    ordered = [works[place] for place in (*first, *last)]
    return exposed_as_ready(ordered, flights, [replace(one, place=of_place[one.place]) for one in stalls])


def _exposed_in_order(
    works: Sequence[Numbers],
    hidden: Sequence[tuple[Transfer, Numbers, Numbers]],
    links: LinkTimes,
    expects: ExpectedAcross,
    hiding: Hiding,
) -> list[Numbers]:
    """Returns the seconds of each collective that the scheduler's order exposes. hidden: each with its bytes and its
    seconds."""
    together: dict[object, list[int]] = {}  # sums that end together
    for number, (one, *_) in enumerate(hidden):
        alone = number if one.kind in MOVING else None
        together.setdefault((alone, one.kind, one.mesh_axes, one.beside), []).append(number)
    apart = [[number] for number in range(len(hidden))]
    limit = math.inf if hiding.expected_kernels is not None else hiding.most_combined_bytes or 0
    sizes = (sum((hidden[number][1] for number in each), start=np.zeros(())) for each in together.values())
    combines = np.max(np.broadcast_arrays(np.zeros(()), *sizes), axis=0) <= limit
    ways = [groups for groups, is_way in ((together.values(), combines), (apart, ~combines)) if np.any(is_way)]
    found = [_exposed_of(groups, works, hidden, links, expects, hiding) for groups in ways]
    return found[0] if len(found) == 1 else [np.where(combines, *each) for each in zip(*found, strict=True)]


def _exposed_of(
    groups: Iterable[Sequence[int]],
    works: Sequence[Numbers],
    hidden: Sequence[tuple[Transfer, Numbers, Numbers]],
    links: LinkTimes,
    expects: ExpectedAcross,
    hiding: Hiding,
) -> list[Numbers]:
    """Returns the seconds of each collective that the scheduler's order exposes. groups: the collectives that XLA
    combines, by their places in `hidden`; a group is expected to last as one collective."""
    flights = list[tuple[Sequence[int], Flight]]()
    for each in groups:
        one = hidden[each[0]][0]
        once = sum((hidden[number][2] for number in each), start=np.zeros(()))
        if (kernels := hiding.expected_kernels) is not None:  # the scheduler counts kernels
            lasts = np.full_like(once, kernels.moves if one.kind in MOVING else kernels.sums)
        elif hiding.by_prices:
            lasts = once
        else:
            lasts = sum(
                (links.expected_seconds(one.kind, one.mesh_axes, *hidden[number][1:], expects) for number in each),
                start=np.zeros(()),
            )
        until = len(works) if one.beside[1] is None else one.beside[1]
        flights.append((each, Flight(once, lasts, one.beside[0], until)))
    of_works = None if hiding.expected_kernels is None else [np.ones(()) for _ in works]
    left = exposed_in_order(works, [flight for _, flight in flights], of_works, at_once=hiding.at_once)
    shares = {
        number: seconds / np.maximum(flight.seconds, np.finfo(float).tiny)
        for (each, flight), seconds in zip(flights, left, strict=True)
        for number in each
    }
    return [shares[number] * once for number, (*_, once) in enumerate(hidden)]


def _exposed_share(region: RegionCosts, kind: CollectiveKind, hiding: Hiding) -> float:
    """Returns the share of a weight's collective that no compute of its region can hide."""
    if kind != "all-reduce" or hiding.as_ready:
        return 0.0
    if region.is_step:  # after the loops all of a gradient is there: nothing is left to compute beside its sum
        return 1.0
    is_second = any(one.kind == "reduce-scatter" and one.is_weight for one, *_ in region.transfers)
    return hiding.exposed_second_sums if is_second else 0.0


def plan_rates(target: TargetPlan) -> Rates | None:
    """Returns the speeds of a device of the target; None where its figures are not known."""
    chip, peak = target.chip, target.peak_flops_per_second
    bandwidth = target.hbm_bytes_per_second_per_device
    if chip is None or peak is None or bandwidth is None:
        return None
    share, power = chip.efficiency, chip.power_share
    memory, slower = bandwidth * share.memory, target.calibration.matmul if target.calibration else 1.0
    large = bandwidth * chip.kernels.memory  # of a single large pass
    # Passes over the rows of experts are large: those of a compiled qwen3_30b_a3b on h100-8 move GBs each. So are
    # copies of slices: a layer's weights, and the sums of its gradients, which stages of a pipeline keep in stacks. A
    # calibration stretches them as passes over memory, not as the matmuls that stream their operands.
    # On TPUs XLA keeps much of a ring's sums in vector memory: a compiled step for v5p merges 21 bytes for each element
    # of the queries at the full bandwidth (parallel/attention/context.py), as many as are counted here.
    return Rates(
        matmul_flops_per_second=peak * share.matmul * power,
        kernel=lambda of: target.kernel_rate(of) or peak,
        hbm_bytes_per_second=memory,
        stream_bytes_per_second=large / slower,
        merged_bytes_per_second=bandwidth if target.platform == "tpu" else memory,
        large_bytes_per_second=large / (target.calibration.other if target.calibration else 1.0),
        matmuls=target.matmul_times(slower),
        matmul_seconds=cost_model().matmul_seconds * slower if target.platform == "tpu" else 0.0,
        slice_wait=target.slice_wait,
        of_type={name: (target.peak_of(name) or peak) * _share_of_type(chip, name) * power for name in chip.real_types},
        faster={name: (target.peak_of(name) or peak) / peak for name in chip.real_types},
        host={kind: speed for kind in HOST_COPIES if (speed := target.host_bytes_per_second(kind))},
    )


def _share_of_type(chip: ChipSpec, name: PeakType) -> float:
    """Returns the share of a type's peak that its matmuls reach in programs: as much less than alone as others."""
    alone = chip.kernels.matmul_by_type.get(name, chip.kernels.matmul)
    return alone * chip.efficiency.matmul / chip.kernels.matmul


def plan_hiding(plan: Plan) -> Hiding:
    """Returns what the compiler hides with the declared overlap, or with the one that a search is expected to find
    (estimated_step.py)."""
    target, assumed = plan.target, assume_overlap(plan)
    weights = hidden_kinds(assumed.flag_presets, plan.spec, target)
    options = options_with(assumed.flag_presets, plan.spec, target)
    by_prices = plan.spec.overlap.pgle is not None
    at_once = sent_at_once(options, target.option_effects)
    is_ring = runs_beside_compute(plan.ops, ((each.op.kind, each.chosen.name) for each in plan.operations))
    exposed = cost_model().exposed_beside_matmuls if is_ring and why_permutes_wait(target) is None else None
    if exposed is None and assumed.layers.batch_split > 1:
        exposed = exposed_of_parts(plan.model.stacks, plan.arrays, target, at_once=at_once)
    return Hiding(
        weights=weights,
        activations_exposed=1.0 if exposed is None else exposed,
        is_doubled=target.platform == "tpu" and "reduce-scatter" not in weights,
        of_operations=exposed_by_source(plan.operations, target),
        exposed_second_sums=target.compiler.exposed_second_sums,
        from_matmuls=kinds_from_matmuls(assumed.flag_presets, plan.spec, target),
        in_order=target.compiler.expected_across,
        expected_kernels=None if by_prices else target.compiler.expected_kernels,
        begins_early=begin_early(options, target.option_effects),
        at_once=at_once,
        by_prices=by_prices,
        most_combined_bytes=sums.most_bytes if (sums := target.compiler.combined_sums) else None,
        scattered=min(math.prod(target.compiler.scattered_block), target.num_devices - 1),
        as_ready=target.compiler.begins_as_ready,
        all_reduced=frozenset(path for path, each in leaves_by_path(plan.weights).items() if each.is_all_reduced),
    )


def plan_link_times(meshes: Sequence[MeshPlan], wanted: Iterable[tuple[Axes, AxisGroups | None]]) -> LinkTimes:
    """Returns the links of these mesh axes, and of groups of devices along them, on each mesh. Raises ValueError for
    links that are unknown."""
    found: dict[tuple[Axes, AxisGroups | None], Mapping[Link, Sequence[int]]] = {}
    for axes, groups in wanted:
        places: dict[Link, list[int]] = {}
        for place, mesh in enumerate(meshes):
            link = mesh.placement.link_of(axes, groups)
            if not link.levels and (groups.size if groups else mesh.num_shards(axes)) > 1:
                raise ValueError(f"the links along {', '.join(axes)} are not known")
            places.setdefault(link, []).append(place)
        found[axes, groups] = places
    return LinkTimes(found)
