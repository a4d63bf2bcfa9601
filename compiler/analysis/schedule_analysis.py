"""Analyses the schedule of a compiled step: what hides each collective, and the time of a step.

It joins the results of `compiler/xla/schedule/` with the places of the program's devices, which give the links of a
group, and with the plan, if there is one: the parameter that an operation moves, and the FLOPs of the model. A program
without a declaration has no plan; everything that follows from one is then unknown.

A collective whose name the compiler dropped is matched with the planned ones of its kind, axes and size:

    all-reduce over fsdp of f32[1024,4096], three times  ->  layers/mlp/up_EM, backward (inferred from its size)

On TPUs, reduce-scatters over 16 or more devices become synchronous all-reduces of many gradients at once, without
names. A program for several slices has no names at all.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp

from ..core.errors import Problem, raise_if_any, use_one_of
from ..core.float_types import FEW_BITS
from ..core.format import counted, human_names
from ..core.known import Unknown, each_known, or_unknown
from ..core.scopes import OperationName, is_sum_of_matmul
from ..core.traffic import HOST_COPIES, MOVING, ComputeKind, Placed, TrafficSource
from ..estimate.communication import PlannedCollective
from ..figures import SLICES, StepWork, no_figures
from ..jaxpr.program import LANES
from ..parallel.operation import ParallelOp, find_source
from ..parallel.registry import OPERATIONS
from ..plan import Plan
from ..schema import CollectiveReport, Event, StepReport
from ..target.accuracy import ProgramKind, kinds_in_types, program_kinds, range_figures
from ..target.target import TargetPlan
from ..xla.hlo import Module
from ..xla.schedule import Simulation, simulate
from ..xla.schedule.prices import Chip
from ..xla.schedule.program import read_steps
from ..xla.schedule.simulate import CollectiveTotals, Taken
from ..xla.schedule.stage_clocks import StagedDevices, simulate_stages
from ..xla.schedule.steps import (
    ALL,
    Choices,
    Collective,
    Compute,
    Done,
    Step,
    apply_choices,
    conditionals,
    every,
    open_loops,
)
from .program_devices import ProgramDevices
from .program_text import line_finder
from .timeline_events import schedule_events

NUM_SHOWN_BEHIND = 3
NO_CHIP = "the target's chip is not known: simulated devices have neither links nor a clock"
NO_MATMULS = "it multiplies no matrices, as the published steps do that predictions were compared with"
NOT_DECLARED = "no declaration says it: the program was inspected by itself"
UNDECLARED = StepWork(Unknown(NOT_DECLARED), Unknown(NOT_DECLARED), 1, Unknown(NOT_DECLARED))


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


@dataclass(frozen=True)
class ScheduleAnalysis:
    """The facts of a schedule. step: without the roofline bound, which is not part of the schedule. matches: for each
    collective, the planned ones of its size. compute_seconds: by instruction, over all executions; empty if the chip is
    unknown. dones: the instructions that wait for a collective, with its name. latency_seconds: for each collective,
    the part of its time alone that does not depend on its size."""

    collectives: tuple[CollectiveReport, ...]
    matches: Mapping[str, tuple[Match, ...]]
    step: StepReport
    events: tuple[Event, ...]
    compute_seconds: Mapping[str, float] = field(default_factory=dict)
    dones: Mapping[str, str] = field(default_factory=dict)
    latency_seconds: Mapping[str, float | Unknown] = field(default_factory=dict)


@dataclass(frozen=True)
class Declared:
    """The facts that a plan gives about its program. paths: the paths of all parameters. planned: its collectives.
    work: what its step does; None without a declaration. ops: its operations. kinds: of program, without a declaration
    as far as the target says. stages: the ticks of its pipeline, and
    the stage of each device; None where it has none."""

    paths: Sequence[str]
    planned: Sequence[PlannedCollective]
    work: StepWork | None
    ops: Sequence[ParallelOp]
    kinds: Sequence[ProgramKind] | None = None
    stages: StagedDevices | None = None


NOTHING_DECLARED = Declared((), (), None, OPERATIONS)


def analyse_schedule(
    module: Module,
    plan: Plan,
    planned: Sequence[PlannedCollective],
    order: Sequence[int] | None = None,
    stages: StagedDevices | None = None,
) -> ScheduleAnalysis:
    """Returns the analysis of a scheduled program of a plan. planned: the plan's collectives. order: the position in
    the plan's mesh of each device of the program, if they differ. stages: the ticks of the pipeline that the program
    runs; None where it runs none. Raises HloError for an unknown form of replica groups, and for a program that runs
    other ticks."""
    paths = [array.array.path for array in plan.sharding.parameters]
    devices = ProgramDevices(plan.mesh.placement, order)
    return analyse_program(module, devices, Declared(paths, planned, plan.work, plan.ops, plan.kinds, stages))


def analyse_program(
    module: Module, devices: ProgramDevices, declared: Declared | None = None, choices: Choices | None = None
) -> ScheduleAnalysis:
    """Returns the analysis of a scheduled program. declared: None for a program without a plan. choices: the user's
    choices of how often something runs, where the program does not say. Raises HloError for an unknown form of replica
    groups, and ConfigError for choices about loops or branches that do not exist."""
    placed: dict[str, Placed] = {}

    def price(collective: Collective) -> Placed:
        if collective.name not in placed:
            placed[collective.name] = devices.place(collective)
        return placed[collective.name]

    target, known = devices.target, declared or NOTHING_DECLARED
    steps = read_steps(module, chip_of(target), known.ops)
    if choices is not None:
        raise_if_any(_wrong_choices(choices, steps))
        steps = apply_choices(steps, choices)
    result = simulate_stages(steps, price, known.stages) if known.stages else simulate(steps, price)
    line_of = line_finder(module)
    matches = {
        name: match_planned(totals.collective, placed[name].mesh_axes, round(totals.count), known.planned)
        for name, totals in result.collectives.items()
    }
    collectives = tuple(
        _collective(
            totals,
            placed[name],
            known,
            matches[name],
            line=line_of(totals.collective),
            is_timed=target.chip is not None,
        )
        for name, totals in result.collectives.items()
    )
    return ScheduleAnalysis(
        collectives=collectives,
        matches=matches,
        step=_step(result, placed, target, known, {one.dtype for one in every(steps, Compute) if one.dtype}),
        events=schedule_events(result.segments, steps, collectives) if target.chip is not None else (),
        compute_seconds=result.operations if target.chip is not None else {},
        dones={done.by: done.name for done in every(steps, Done)},
        latency_seconds=_latencies(result, devices),
    )


def _wrong_choices(choices: Choices, steps: tuple[Step, ...]) -> Iterator[Problem]:
    """Yields choices of loops and conditionals that do not exist."""
    for where, named, there in (
        ("trips", choices.trips, open_loops(steps)),
        ("taken", choices.shares, conditionals(steps)),
    ):
        what = "loop of an unknown number of iterations" if where == "trips" else "conditional"
        for name in named:
            if not there:
                yield Problem(where, f"the program has no {what}", "leave it out")
            elif name != ALL and name not in there:
                yield Problem(where, f"the program has no {what} {name}", use_one_of(name, there))


def _latencies(result: Simulation, devices: ProgramDevices) -> dict[str, float | Unknown]:
    """Returns the part of each collective's time that does not depend on its size, over all executions."""
    found = {}
    for name, totals in result.collectives.items():
        empty = devices.place(replace(totals.collective, num_bytes=0))
        alone = empty.alone_seconds
        found[name] = Unknown(empty.why or NO_CHIP) if alone is None else alone * totals.count
    return found


def _origin(collective: Collective, matches: Sequence[Match], known: Declared) -> TrafficSource:
    """Returns the source of a collective: its own name; else that of the matmul that computes its operand, if the plan
    has a sum of matmuls of that size; else the source by size alone. The plan names a sum of several by one of them."""
    if collective.op_name:
        return source_of(collective.op_name, collective.kind, known.paths, known.ops)
    is_sum = any(is_sum_of_matmul(origin.activation) for match in matches for origin in match.origins)
    if is_sum and collective.made_by:
        return source_of(collective.made_by[0], collective.kind, known.paths, known.ops)
    return source_by_size(matches) or source_of("", collective.kind, known.paths, known.ops)


def source_of(op_name: str, kind: str, paths: Sequence[str], ops: Sequence[ParallelOp] = OPERATIONS) -> TrafficSource:
    """Returns the source: 'jit(step)/transpose(jvp(head))/weight=head/kernel_EV/reduce_scatter' -> 'head/kernel_EV,
    backward'.

    If the compiler combined several, the first of them and how many more. kind: the collective's; one that reduces a
    weight moves its gradient. paths: the paths of all parameters. ops: the operations of the program.
    """
    if not op_name:
        return TrafficSource()
    name = OperationName(op_name)
    found, alone = name.parameters(paths), name.separated[0]
    ours = find_source(ops, alone) or alone.activation
    in_pass = (
        "backward" if found and kind not in (*MOVING, *HOST_COPIES) and name.in_pass == "forward" else name.in_pass
    )
    if found:
        return TrafficSource(parameter=found[0], num_more=len(found) - 1, in_pass=in_pass)
    return TrafficSource(activation=ours or "/".join(alone.text.split("/")[-2:]), in_pass=in_pass)


def chip_of(target: TargetPlan) -> Chip:
    """Returns the figures of one device."""
    if target.chip is None:
        return Chip(target.platform, None, {}, float("inf"))
    chip, share = target.chip, 1 / target.chip.num_devices
    peaks = {name: peak * share for name, peak in chip.peak_flops_per_second.items() if peak}
    for name in FEW_BITS - {*chip.real_types} if "bfloat16" in peaks else ():
        peaks[name] = peaks["bfloat16"]  # its compiler multiplies them in 16 bits
    factors: dict[ComputeKind, float] = {}
    if found := target.calibration:
        factors = {"matmul": found.matmul, "attention": found.attention, "other": found.other}
    arithmetic = chip.sustained * chip.power_share  # of matmuls; other kernels were measured under load
    return Chip(
        platform=target.platform,
        clock_hz=chip.clock_hz if target.platform == "tpu" else None,
        peak_flops_per_second=peaks,
        hbm_bytes_per_second=chip.hbm_bytes_per_second * share,
        matmul_share=chip.kernels.matmul * arithmetic,
        matmul_shares={name: of_type * arithmetic for name, of_type in chip.kernels.matmul_by_type.items()},
        attention=chip.attention,
        kernels_share=chip.power_share,
        memory_share=chip.kernels.memory,
        passes=chip.kernels.passes,
        factors=factors,
        matmuls=target.matmul_times(),
    )


def _collective(
    totals: CollectiveTotals, where: Placed, known: Declared, matches: Sequence[Match], *, line: str, is_timed: bool
) -> CollectiveReport:
    found = totals.collective
    alone = or_unknown(totals.alone_seconds, where.why) if is_timed else Unknown(NO_CHIP)
    is_placed = where.is_certain and where.why is None
    is_certain = found.is_certain and is_placed and not {None, Taken(None)} & {trips for _, trips in totals.loops}
    behind = sorted(totals.hidden_behind.items(), key=lambda item: -item[1])
    return CollectiveReport(
        kind=found.kind,
        mesh_axes=where.mesh_axes,
        group_size=where.group_size,
        link=where.level,
        bytes=round(found.num_bytes * totals.count),
        dtype=found.dtype,
        count=max(1, round(totals.count)),
        alone_seconds=alone,
        hidden_seconds=each_known(alone, lambda _: totals.hidden_seconds or 0.0),
        exposed_seconds=each_known(alone, lambda _: totals.exposed_seconds),
        hidden_behind=tuple(name for name, _ in behind[:NUM_SHOWN_BEHIND]),
        is_async=found.is_async,
        form=found.form,
        origin=_origin(found, matches, known),
        line=line,
        where=_where(totals),
        confidence="high" if is_certain else "low",
        name=found.name,
    )


def _where(totals: CollectiveTotals) -> str:
    """Returns how often it runs: 'in a loop of 32 iterations'; 'once'; 'in a branch of conditional.3 (counts as always
    taken)'."""
    trips = [str(trips or "an unknown number of") for _, trips in totals.loops if not isinstance(trips, Taken)]
    branches = [f"in a branch of {name} ({each})" for name, each in totals.loops if isinstance(each, Taken)]
    iterations = "iteration" if trips == ["1"] else "iterations"
    loops = [f"in a loop of {' x '.join(trips)} {iterations}"] if trips else []
    return ", ".join([*loops, *branches]) or "once"


def nothing_timed(why: str) -> StepReport:
    """Returns the figures of a step of which nothing is known."""
    unknown = Unknown(why)
    return StepReport(
        **dict(no_figures(why)),
        compute_seconds_by_kind={},
        least_seconds=unknown,
        roofline_seconds=unknown,
        bound_seconds=unknown,
        num_unpriced=0,
        counted_once=(),
        num_bounded=0,
        bounded_seconds=0.0,
    )


def _step(
    result: Simulation, placed: Mapping[str, Placed], target: TargetPlan, known: Declared, dtypes: Iterable[str]
) -> StepReport:
    """Returns the figures of the schedule, without those of memory. dtypes: in which it multiplies."""
    if target.chip is None:
        return nothing_timed(NO_CHIP)
    kinds = known.kinds or program_kinds(target, {}, 0, has_experts=False)
    left_out = "; ".join(_left_out(result, placed))
    waits = target.slice_wait * result.seconds
    whole = Unknown(left_out) if left_out else result.seconds + waits
    is_timed = not _untimed(result)
    undeclared = Unknown(NOT_DECLARED)
    exposed: dict[str, float] = {}
    for name, totals in result.collectives.items() if is_timed else ():
        axes = "+".join(placed[name].mesh_axes)
        exposed[axes] = exposed.get(axes, 0.0) + totals.exposed_seconds
    exposed[SLICES] = waits if is_timed else 0.0
    is_like_published = any(result.compute_seconds.get(kind) for kind in ("matmul", "attention"))
    found = StepReport(
        **dict(no_figures("the memory of a program is not in its schedule"))
        | range_figures(target, kinds_in_types(kinds, dtypes), whole if is_like_published else Unknown(NO_MATMULS))
        | {
            "step_seconds": whole,
            "compute_seconds": sum(result.compute_seconds.values()),
            "exposed_seconds": result.exposed_seconds + waits if is_timed else whole,
            "bubble_seconds": result.bubble_seconds if is_timed else whole,
            "exposed_by_axes": {axes: seconds for axes, seconds in exposed.items() if seconds},
        },
        compute_seconds_by_kind=dict(result.compute_seconds),
        least_seconds=result.seconds + waits,
        roofline_seconds=undeclared,
        bound_seconds=undeclared,
        num_unpriced=len(result.unpriced),
        counted_once=tuple(sorted(result.unknown_loops)),
        num_bounded=len(result.bounded),
        bounded_seconds=sum(result.bounded.values()),
    )
    return found.rated(known.work or UNDECLARED)


def _untimed(result: Simulation) -> list[str]:
    """Returns the collectives whose time is unknown."""
    return [name for name, totals in result.collectives.items() if totals.alone_seconds is None]


def _left_out(result: Simulation, placed: Mapping[str, Placed]) -> list[str]:
    """Returns the reasons why a step takes longer than the simulation: kernels and collectives whose time is unknown,
    and loops that count once."""
    reasons: list[str] = []
    if result.unpriced:
        kernels = [f"{name} ({count})" for name, count in Counter(result.unpriced.values()).most_common()]
        times = f"the time of {counted(len(result.unpriced), 'kernel')} is not known, and the least counts"
        reasons.append(f"{times}: {human_names(kernels)}")
    if untimed := _untimed(result):
        whys = " and ".join(dict.fromkeys(placed[name].why or "" for name in untimed))
        reasons.append(f"the time of {human_names(untimed)} is not known, and the step is longer by it: {whys}")
    if loops := sorted(result.unknown_loops):
        named, pronoun = human_names(loops), "them" if len(loops) > 1 else "it"
        reasons.append(f"how often {named} runs is not known, and one iteration of {pronoun} counts")
    return reasons


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
