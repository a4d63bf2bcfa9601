"""Runs the program of a pipeline in time: a clock for each stage, and branches that its table chooses.

    tick loop:  permute-start dx, conditional slot=F, permute-start y, permute-done dx, conditional slot=BW, ..

All stages run one program, and differ in the branches of conditionals within the scope of a slot: in tick t stage s
takes the branch with the work if row t of the table has that operation for s. A collective whose group lies on several
stages begins when all of them have started it; so does a permute, since its sender may not write before its receiver is
there: v5p's have a barrier. A send between hosts begins when its sender is there. A wait for other stages is no exposed
communication: it is the *bubble*. So for each stage

    compute + exposed + bubble = the step

Ticks are not folded: no two of them need be alike. Outside of slots the stages run the same steps, each by its own
clock, and conditionals there take the branch that ends last on any stage.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...core.format import counted
from ...core.scopes import OperationName
from ..hlo import HloError
from .simulate import Clock, Loops, Picked, Placed, Simulation, StageTime, Taken, Trip
from .steps import Branches, Collective, Loop, Start, Step, every

BY_TABLE = "by the pipeline's table"
SHOWN_STAGES, SHOWN_TICKS = 8, 24  # whose steps a timeline shows: the first half of them, and the last half


@dataclass(frozen=True)
class StagedDevices:
    """The ticks that a program runs, and the stage of each device. rows: by tick and stage the slots that have work,
    each an operation with its virtual stage: the place of its layers in the model. kinds: of each virtual stage, by its
    layers; where there are several, a slot has a branch for each, or a conditional. num_in_program: the devices that
    the program names; all slices run the program of one."""

    rows: Sequence[Sequence[Sequence[tuple[str, int]]]]
    kinds: Sequence[int]
    stage_of: Sequence[int]
    num_in_program: int

    @property
    def num_stages(self) -> int:
        return len(self.rows[0])

    def awaited(self, collective: Collective) -> list[set[int]]:
        """Returns the stages that each stage waits for: those of its groups; of a send between hosts, the sender."""
        found: list[set[int]] = [set() for _ in range(self.num_stages)]
        for group in self._groups(collective):
            stages = [self.stage_of[device] for device in group]
            for stage in stages[1:] if collective.kind == "send" else stages:
                found[stage] |= set(stages[:1] if collective.kind == "send" else stages)
        return [others - {stage} for stage, others in enumerate(found)]

    def _groups(self, collective: Collective) -> Sequence[Sequence[int]]:
        """Returns the groups: those of one slice in each, and across slices the devices at the same place in each."""
        devices, per_slice = range(len(self.stage_of)), self.num_in_program
        if collective.num_slices is not None:
            return [devices[first::per_slice] for first in range(per_slice)]
        if any(device >= per_slice for group in collective.groups for device in group):
            return collective.groups
        return [[first + each for each in group] for first in devices[::per_slice] for group in collective.groups]


@dataclass(frozen=True)
class SlotOf:
    """The conditional of a slot: of the operation as a whole, or of its part on one end of the pipeline."""

    operation: str
    end: str | None = None
    is_shared: bool = False


def slot_of(step: Branches) -> SlotOf | None:
    """Returns the slot that a conditional belongs to; None where it has no scope of one, or where it is one of an end
    with other branches than two."""
    name = OperationName(step.op_name)
    slot = SlotOf(name.slot or "", name.shared_end or name.end, name.shared_end is not None)
    return slot if slot.operation and (slot.end is None or step.on is not None) else None


def simulate_stages(
    steps: tuple[Step, ...], price: Callable[[Collective], Placed], devices: StagedDevices
) -> Simulation:
    """Runs the steps once on all stages. Raises HloError if the program does not run the ticks of the table."""
    run = _Stages(steps, price, devices)
    run.run(steps, loops=(), is_shown=True)
    return run.finished()


def middle(count: int, shown: int) -> range:
    """Returns what a timeline leaves out of so many stages or ticks: (16, 8) -> 4 to 11; all but both ends."""
    return range(shown // 2, count - shown // 2) if count > shown else range(0)


@dataclass
class _Stages:
    """Runs stages side by side. seen: how often the conditionals of each slot have been reached. now: the slot and the
    tick that each stage is in. crossing: by the identity of steps, whether they start a collective among stages. taken:
    how often each slot runs. left_out: the stages that the timeline does not show."""

    steps: tuple[Step, ...]
    price: Callable[[Collective], Placed]
    devices: StagedDevices
    result: Simulation = field(default_factory=Simulation)
    seen: Counter[SlotOf] = field(default_factory=Counter)
    now: list[tuple[SlotOf, int] | None] = field(default_factory=list)
    crossing: dict[int, bool] = field(default_factory=dict)
    taken: dict[SlotOf, Taken] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_stages = self.devices.num_stages
        self.weight = 1 / num_stages
        self.now += [None] * num_stages
        self.clocks = [
            Clock(self.price, lambda step, s=s: self.pick(step, s), self.result, s) for s in range(num_stages)
        ]
        self.left_out = middle(num_stages, SHOWN_STAGES)
        self.per_tick = {slot: self._per_tick(slot, n) for slot, n in self._executions(self.steps, 1).items()}
        there = {operation for row in self.devices.rows for slots in row for operation, _ in slots}
        for operation in sorted(there):
            if SlotOf(operation) not in self.per_tick:
                raise HloError(f"the program has no conditional of the pipeline's slot {operation}")

    def _executions(self, steps: tuple[Step, ...], times: int) -> Counter[SlotOf]:
        """Returns how often the program reaches the conditionals of each slot."""
        found: Counter[SlotOf] = Counter()
        for step in steps:
            if isinstance(step, Loop):
                found += self._executions(step.body, times * self._trips(step))
            elif isinstance(step, Branches) and (slot := slot_of(step)) is not None:
                found[slot] += times
        return found

    def _trips(self, loop: Loop) -> int:
        """Returns the trips of a loop; of one that runs slots and does not say, the ticks of the table."""
        if loop.num_trips is not None:
            return loop.num_trips
        return len(self.devices.rows) if self._has_slots(loop) else 1

    def _per_tick(self, slot: SlotOf, executions: int) -> int:
        num_ticks = len(self.devices.rows)
        if executions % num_ticks:
            reached = f"{counted(executions, 'conditional')} of the slot {slot.operation}"
            raise HloError(f"the program reaches {reached}, and the pipeline's table has {counted(num_ticks, 'tick')}")
        return executions // num_ticks

    def run(self, steps: tuple[Step, ...], *, loops: Loops, is_shown: bool) -> None:
        for step in steps:
            if isinstance(step, Start) and any(awaited := self.devices.awaited(step.collective)):
                self._start(step.collective, awaited, loops, is_shown)
            elif isinstance(step, Loop) and (self._has_slots(step) or self._crosses(step.body)):
                self._loop(step, loops, is_shown)
            elif isinstance(step, Branches) and (slot := slot_of(step)) is not None:
                self._slot(step, slot, loops, is_shown)
            elif isinstance(step, Branches) and step.branches and any(map(self._crosses, step.branches)):
                longest = max(step.branches, key=lambda branch: max(clock.end_of(branch) for clock in self.clocks))
                self.run(longest, loops=(*loops, (step.name, Taken(None))), is_shown=is_shown)
            else:
                for stage, clock in enumerate(self.clocks):
                    clock.run((step,), weight=self.weight, loops=loops, is_shown=self._is_seen(is_shown, stage))

    def pick(self, step: Branches, stage: int) -> Picked | None:
        """Returns the branch that a stage takes within a slot: of a conditional of one end, by the table."""
        slot, now = slot_of(step), self.now[stage]
        if slot is None or slot.end is None or now is None:
            return None
        return Picked(self._branch(step, slot, now[1], stage), self._taken(slot))

    def finished(self) -> Simulation:
        for stage, clock in enumerate(self.clocks):
            clock.finish(weight=self.weight, is_shown=self._is_seen(True, stage))
        result = self.result
        result.seconds = max(clock.seconds for clock in self.clocks)
        for stage, clock in enumerate(self.clocks):
            if stage not in self.left_out:
                clock.show_end(result.seconds)
        for clock in self.clocks:
            compute, exposed = clock.spent.compute / self.weight, clock.spent.exposed / self.weight
            bubble = max(0.0, result.seconds - compute - exposed)
            result.stages = (*result.stages, StageTime(compute, exposed, bubble))
        return result

    def _start(self, collective: Collective, awaited: list[set[int]], loops: Loops, is_shown: bool) -> None:
        """Starts a collective on all stages. Where a send's stage is sent nothing, no recv-done waits for it."""
        free = [clock.free_at(collective) for clock in self.clocks]
        for stage, clock in enumerate(self.clocks):
            clock.start(
                collective,
                weight=self.weight,
                loops=loops,
                is_shown=self._is_seen(is_shown, stage),
                ready=max((free[other] for other in awaited[stage]), default=0.0),
                is_awaited=bool(awaited[stage]) or collective.kind != "send",
            )

    def _loop(self, loop: Loop, loops: Loops, is_shown: bool) -> None:
        trips = self._trips(loop)
        left_out, begins = middle(trips, SHOWN_TICKS), [0.0] * len(self.clocks)
        if loop.num_trips is None and not self._has_slots(loop):
            self.result.unknown_loops.add(loop.name)
        for trip in range(trips):
            if left_out and trip == left_out.start:
                begins = [clock.seconds for clock in self.clocks]
            if left_out and trip == left_out.stop and is_shown:
                unseen = Trip(loop.name, left_out.start, len(left_out))
                for stage, (clock, begin) in enumerate(zip(self.clocks, begins, strict=True)):
                    if stage not in self.left_out:
                        clock.show_left_out(unseen, begin)
            for clock in self.clocks:
                clock.enter(loop.name, trip)
            self.run(loop.body, loops=(*loops, (loop.name, trips)), is_shown=is_shown and trip not in left_out)
        for clock in self.clocks:
            clock.leave()

    def _is_seen(self, is_shown: bool, stage: int) -> bool:
        return is_shown and stage not in self.left_out

    def _slot(self, step: Branches, slot: SlotOf, loops: Loops, is_shown: bool) -> None:
        tick, number = divmod(self.seen[slot], self.per_tick[slot])
        is_of_kind = step.on is not None and self.per_tick[slot] == len(set(self.devices.kinds)) > 1
        kind = number if is_of_kind else None
        self.seen[slot] += 1
        within = (*loops, (step.name, self._taken(slot)))
        if slot.is_shared:
            idle, stages = self._idle(step), range(len(self.clocks))
            is_on = any(self._virtual(slot, tick, stage) is not None for stage in stages)
            return self.run(step.branches[1 - idle if is_on else idle], loops=within, is_shown=is_shown)
        for stage, clock in enumerate(self.clocks):
            branch = step.branches[self._branch(step, slot, tick, stage, kind)]
            self.now[stage] = (slot, tick)
            clock.forget_ends()
            clock.run(branch, weight=self.weight, loops=within, is_shown=self._is_seen(is_shown, stage))
            self.now[stage] = None

    def _branch(self, step: Branches, slot: SlotOf, tick: int, stage: int, kind: int | None = None) -> int:
        """Returns the branch that a stage runs in a tick. kind: the kind of chunk that this step serves, where a slot
        has several steps; None if it serves all."""
        virtual, idle, num_kinds = self._virtual(slot, tick, stage), self._idle(step), len(set(self.devices.kinds))
        if len(step.branches) not in (2, 1 + num_kinds):
            has = f"{step.name} of the slot {slot.operation} has {counted(len(step.branches), 'branch', 'branches')}"
            raise HloError(f"{has}, and the pipeline has {counted(num_kinds, 'kind')} of parts")
        if virtual is None or kind not in (None, self.devices.kinds[virtual]):
            return idle
        return 1 - idle if step.on is not None else 1 + self.devices.kinds[virtual]

    def _idle(self, step: Branches) -> int:
        """Returns the branch without work: that of a false predicate, or the first of several."""
        return 0 if step.on is None else 1 - step.on

    def _virtual(self, slot: SlotOf, tick: int, stage: int) -> int | None:
        """Returns the virtual stage whose operation a stage runs in a tick, and if the slot is one of an end, there;
        None if it runs none."""
        run = [virtual for operation, virtual in self.devices.rows[tick][stage] if operation == slot.operation]
        ends = {"first": 0, "last": len(self.devices.kinds) - 1}
        return next((each for each in run if slot.end is None or each == ends[slot.end]), None)

    def _taken(self, slot: SlotOf) -> Taken:
        """Returns the share of the table's ticks in which a stage has the slot's operation, over all stages."""
        if slot not in self.taken:
            rows, stages = self.devices.rows, range(len(self.clocks))
            num_on = sum(self._virtual(slot, tick, stage) is not None for tick in range(len(rows)) for stage in stages)
            self.taken[slot] = Taken(num_on / (len(rows) * len(stages)), BY_TABLE)
        return self.taken[slot]

    def _has_slots(self, loop: Loop) -> bool:
        return any(slot_of(each) is not None for each in every(loop.body, Branches))

    def _crosses(self, steps: tuple[Step, ...]) -> bool:
        """Returns True if steps start a collective among several stages."""
        if id(steps) not in self.crossing:
            starts = every(steps, Start)
            self.crossing[id(steps)] = any(any(self.devices.awaited(each.collective)) for each in starts)
        return self.crossing[id(steps)]
