"""Pipelines: a clock for each stage, whose times one can add up by hand."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from meshloom.compiler.core.scopes import at_most_once_scope, end_scope, nested_scope, shared_end_scope, slot_scope
from meshloom.compiler.core.traffic import COMPUTE, Placed
from meshloom.compiler.xla.hlo import HloError, Module, parse_module
from meshloom.compiler.xla.schedule.prices import Chip
from meshloom.compiler.xla.schedule.program import read_steps
from meshloom.compiler.xla.schedule.simulate import Segment, Simulation, Trip, simulate
from meshloom.compiler.xla.schedule.stage_clocks import SlotOf, StagedDevices, simulate_stages, slot_of
from meshloom.compiler.xla.schedule.steps import Branches, Collective, Compute, Done, Loop, Start, Step
from support.pipelines import DEVICES, GPIPE, ONE_F_ONE_B, STAGES, Rows, table
from support.recorded import recorded_text
from support.schedules import collectives_of, module

LAYERS = 2
CYCLES = Chip("tpu", 1.0, {}, float("inf"))  # compute takes its estimated cycles, in seconds, and all else nothing


def cycles(module: Module, name: str) -> int:
    """The cycles of a computation's own instructions, and of its loops over layers; of no branches."""
    total = 0
    for each in module.computations[name].instructions:
        if each.opcode == "while":
            total += LAYERS * cycles(module, (each.attribute("body") or "").lstrip("%"))
        elif found := re.search(r'"estimated_cycles":"(\d+)"', each.attributes):
            total += int(found[1])
    return total


def slot_cycles(module: Module, scope: str) -> tuple[int, int]:
    """The cycles of both branches of the conditional with this scope, the one without the work first."""
    (found,) = (
        each
        for computation in module.computations.values()
        for each in computation.instructions
        if each.opcode == "conditional" and each.op_name.endswith(f"{scope}/cond")
    )
    return cycles(module, found.called[0]), cycles(module, found.called[1])


def between_slots(module: Module) -> int:
    """The cycles of a tick between its two slots, which a stage in a ramp spends while it waits."""
    (tick,) = (
        each.instructions
        for each in module.computations.values()
        if any(one.op_name.endswith("slot=BW/cond") and one.opcode == "conditional" for one in each.instructions)
    )
    first, last = (place for place, each in enumerate(tick) if each.opcode == "conditional")
    found = (re.search(r'"estimated_cycles":"(\d+)"', each.attributes) for each in tick[first:last])
    return sum(int(each[1]) for each in found if each)


def around_ticks(module: Module, num_ticks: int) -> int:
    """The cycles outside of the ticks, and those of each tick outside of its slots."""
    total = 0
    for each in module.entry_computation.instructions:
        if each.opcode == "while":
            total += num_ticks * cycles(module, (each.attribute("body") or "").lstrip("%"))
        elif found := re.search(r'"estimated_cycles":"(\d+)"', each.attributes):
            total += int(found[1])
    return total


def run(text: str, table: Rows, *, permute: float = 0.0, sent: float = 0.0, within: float = 0.0) -> Simulation:
    """Simulates a recorded program. permute, sent, within: the seconds of a permute, a send and another collective."""
    module = parse_module(text)
    steps = read_steps(module, CYCLES)

    def price(collective: Collective) -> Placed:
        seconds = {"collective-permute": permute, "send": sent}.get(collective.kind, within)
        return Placed(seconds, (collective.kind,))

    result = simulate_stages(steps, price, StagedDevices(table, [0] * STAGES, DEVICES, module.num_devices))
    check_laws(result)
    return result


def check_laws(result: Simulation) -> None:
    for each in result.stages:
        assert each.compute_seconds + each.exposed_seconds + each.bubble_seconds == pytest.approx(result.seconds)
    num = len(result.stages)
    assert sum(result.compute_seconds.values()) == pytest.approx(sum(s.compute_seconds for s in result.stages) / num)
    assert result.exposed_seconds == pytest.approx(sum(s.exposed_seconds for s in result.stages) / num)
    assert sum(c.exposed_seconds for c in result.collectives.values()) == pytest.approx(result.exposed_seconds)
    for each in result.collectives.values():
        assert 0 <= each.exposed_seconds <= (each.alone_seconds or 0) * (1 + 1e-9) + 1e-9


def test_the_longest_path_of_1f1b_by_hand():
    """Stage 0 runs the first forward slot, its neighbours theirs; the last stage both slots of 8 microbatches; then the
    last gradient goes back. That is 11 of each slot, as (p - 1) / m says: 3 / 8 more than the 8 of a stage's work. In
    the 6 ticks of the ramps the idle branch and what lies between the slots run during the wait for a neighbour. In
    these rings of permutes the first and the last stage are neighbours: each ramp waits for two of their idle slots."""
    text = recorded_text("pipeline_1f1b")
    module = parse_module(text)
    (no_f, f), (no_b, b) = slot_cycles(module, "slot=F"), slot_cycles(module, "slot=BW")
    around = around_ticks(module, 14)
    result = run(text, ONE_F_ONE_B)
    between = between_slots(module)
    assert result.seconds == pytest.approx(11 * (f + b) + around - 6 * between + 2 * (no_f + no_b + 2 * between))
    for each in result.stages:
        assert each.compute_seconds == pytest.approx(8 * (f + b) + 6 * (no_f + no_b) + around)
    folded = simulate(read_steps(module, CYCLES), lambda _: Placed(0.0, ()))
    assert folded.seconds == pytest.approx(14 * (f + b) + around), "without a table both slots run in all ticks"


def test_the_longest_path_of_gpipe_with_a_head_and_gathers_in_its_branches_by_hand():
    """8 forward slots on the last stage each run the head; the other stages wait for it."""
    text, gathered = recorded_text("pipeline_gpipe"), 1000.0
    module = parse_module(text)
    (no_f, f), (no_b, b) = slot_cycles(module, "slot=F"), slot_cycles(module, "slot=BW")
    no_head, head = slot_cycles(module, "end=last")
    assert head > f / 2
    f, b = f + LAYERS * gathered, b + 2 * LAYERS * gathered
    around = around_ticks(module, 22) + gathered  # the sum at the end
    result = run(text, GPIPE, within=gathered)
    path = 3 * (f + no_head) + 8 * (f + head) + 11 * b + 8 * (no_f + no_b)
    in_ring = 2 * (no_f + no_b + 2 * between_slots(module))  # as in 1F1B
    assert result.seconds == pytest.approx(path + around - 6 * between_slots(module) + in_ring)
    of_branches = 8 * 3 * LAYERS * gathered
    assert [each.exposed_seconds for each in result.stages] == pytest.approx([of_branches + gathered] * STAGES)
    work = [each.compute_seconds for each in result.stages]
    assert work[3] - work[0] == pytest.approx(8 * (head - no_head))
    counts = {each.collective.kind: each.count for each in result.collectives.values()}
    assert counts["all-gather"] == counts["reduce-scatter"] == 8 * LAYERS


def test_permutes_of_1f1b_hide_in_full_ticks_and_are_exposed_in_the_ramps_by_hand():
    """In the 8 full ticks of the last stage a permute of less than a slot hides. In each tick of a ramp a stage waits
    for what its neighbour has sent, and nothing runs beside that but idle slots, for which it waits anyway."""
    text = recorded_text("pipeline_1f1b")
    module = parse_module(text)
    (no_f, f), (no_b, _) = slot_cycles(module, "slot=F"), slot_cycles(module, "slot=BW")
    permute, in_ring = 0.5 * f, 2 * (no_f + no_b + 2 * between_slots(module))
    free, result = run(text, ONE_F_ONE_B), run(text, ONE_F_ONE_B, permute=permute)
    assert result.seconds - free.seconds == pytest.approx(6 * permute - in_ring)


def test_stages_on_two_slices_wait_for_sends_between_their_clocks():
    """Stages 0 and 1 are on the first slice. The program is that of one slice, and its pairs name devices of both."""
    text = recorded_text("pipeline_slices")
    module = parse_module(text)
    sends = [each for each in collectives_of(read_steps(module, CYCLES)) if each.kind == "send"]
    assert {each.groups for each in sends} == {
        ((0, 6), (4, 2), (1, 7), (5, 3)),  # the gradient of stage 2 to stage 1, of stage 0 to the last one
        ((2, 4), (6, 0), (3, 5), (7, 1)),
    }
    assert all(each.is_certain and each.num_slices is None for each in sends)
    (_, f), _ = slot_cycles(module, "slot=F"), slot_cycles(module, "slot=BW")
    free = run(text, ONE_F_ONE_B)
    slow = run(text, ONE_F_ONE_B, sent=0.1 * f)
    assert slow.seconds > free.seconds
    assert {name for name, each in slow.collectives.items() if each.exposed_seconds} == {each.name for each in sends}


def test_a_head_that_is_split_over_the_stages_runs_on_all_in_the_ticks_of_the_last():
    """Its sum among the stages waits for the last of them: 8 times on every stage."""
    text, summed = recorded_text("pipeline_shared"), 1000.0
    module = parse_module(text)
    (no_f, f), (no_b, b) = slot_cycles(module, "slot=F"), slot_cycles(module, "slot=BW")
    _, head = slot_cycles(module, "shared_end=last")
    assert head > f / 2
    result = run(text, ONE_F_ONE_B, within=summed)
    (total,) = (
        each for each in result.collectives.values() if each.collective.op_name.endswith("cond/branch_1_fun/psum")
    )
    assert (total.count, total.exposed_seconds) == (8, 8 * summed)
    work = 8 * (f + b + head) + 6 * (no_f + no_b)
    of_each = {round(each.compute_seconds - work) for each in result.stages}
    assert len(of_each) == 1, "the same on all stages"
    assert result.seconds > 11 * (f + b) + 8 * (head + summed)


def test_a_table_with_other_ticks_than_the_program_is_an_error():
    with pytest.raises(HloError, match=r"14 conditionals of the slot F, and the pipeline's table has 22 ticks"):
        run(recorded_text("pipeline_1f1b"), GPIPE)
    without = recorded_text("pipeline_1f1b").replace("slot=F", "slots=F")
    with pytest.raises(HloError, match="no conditional of the pipeline's slot F"):
        run(without, ONE_F_ONE_B)


def compute(name: str, seconds: float) -> Compute:
    return Compute(name, "other", seconds, "bytes", "")


def slot(operation: str, seconds: float, *, inside: tuple[Step, ...] = ()) -> Branches:
    on = (compute(operation, seconds), *inside)
    return Branches(f"c{operation}", ((), on), op_name=f"jit(step)/while/body/{slot_scope(operation)}/cond", on=1)


def permute(name: str, pairs: tuple[tuple[int, int], ...]) -> Collective:
    return Collective(name, "collective-permute", 8, "bf16", pairs, True, "", "", "", (4,))


ALL = lambda seconds: lambda _: Placed(seconds, ("x",))  # noqa: E731
TWO = table("F0|", "F1|F0", "|F1")


def two_stages(*body: Step, trips: int | None = 3, seconds: float = 0.0, by: Rows = TWO) -> Simulation:
    result = simulate_stages((Loop("l", trips, body),), ALL(seconds), StagedDevices(by, [0, 0], [0, 1], 2))
    check_laws(result)
    return result


@pytest.mark.parametrize("trips", [3, None])
def test_a_permute_waits_for_the_clock_of_its_source(trips):
    """10 s for F. Stage 1 waits in tick 0 for what stage 0 sends after 10 s and 2 s on the way; its own F of 10 s in
    tick 1 begins at 12. Stage 0 has nothing to wait for."""
    sent = permute("p", ((0, 1),))
    found = two_stages(slot("F", 10.0), Start(sent), Done("p"), trips=trips, seconds=2.0)
    assert found.seconds == 12 + 12 + 12
    first, second = found.stages
    assert (first.compute_seconds, first.exposed_seconds, first.bubble_seconds) == (20, 6, 10)
    assert (second.compute_seconds, second.exposed_seconds, second.bubble_seconds) == (20, 6, 10)
    assert found.unknown_loops == set()


@pytest.mark.parametrize(("name", "rows"), [("1f1b", ONE_F_ONE_B), ("gpipe", GPIPE), ("shared", ONE_F_ONE_B)])
def test_the_lane_of_each_stage_is_its_compute_its_waits_and_its_bubble(name, rows):
    """On the track of compute each moment of the step is shown once, on every stage."""
    result = run(recorded_text(f"pipeline_{name}"), rows, permute=5e4, within=1e3)
    for stage, time in enumerate(result.stages):
        lane = [each for each in result.segments if each.stage == stage and each.track == COMPUTE]
        assert covers(lane, result.seconds)
        sums = Counter[str]()
        for each in lane:
            sums[each.kind if each.kind in ("exposed", "bubble") else "compute"] += each.seconds  # pyright: ignore[reportArgumentType]
        assert sums["compute"] == pytest.approx(time.compute_seconds)
        assert sums["exposed"] == pytest.approx(time.exposed_seconds)
        assert sums["bubble"] == pytest.approx(time.bubble_seconds)
        sent = sum(
            each.seconds for each in result.segments if (each.stage, each.track) == (stage, "collective-permute")
        )
        assert sent == pytest.approx(2 * len(rows) * 5e4)


def covers(lane: list[Segment], seconds: float) -> bool:
    ends = [(each.start_seconds, each.start_seconds + each.seconds) for each in lane]
    return [0.0, *(end for _, end in ends)] == pytest.approx([*(start for start, _ in ends), seconds])


def test_of_many_stages_and_ticks_the_first_and_the_last_are_shown():
    """Twelve stages, each a tick after the one before it: ticks 12 to 28 of 41 are one stretch on each lane."""
    num, rows = 12, [[""] * 12 for _ in range(41)]
    for stage in range(num):
        for microbatch in range(30):
            rows[stage + microbatch][stage] = f"F{microbatch}"
    sent = permute("p", tuple((stage, stage + 1) for stage in range(num - 1)))
    body = (slot("F", 10.0), Start(sent), Done("p"))
    devices = StagedDevices(table(*("|".join(row) for row in rows)), [0] * num, range(num), num)
    result = simulate_stages((Loop("l", 41, body),), ALL(1.0), devices)
    assert {each.stage for each in result.segments} == {0, 1, 2, 3, 8, 9, 10, 11}
    for stage in (0, 3, 8, 11):
        lane = [each for each in result.segments if each.stage == stage and each.track == COMPUTE]
        assert covers(lane, result.seconds)
        (left_out,) = (each.trip for each in lane if each.kind == "loop")
        assert left_out == Trip("l", 12, 17)
        assert sum(each.kind == "other" for each in lane) == 13, "12 - stage of the first, 1 + stage of the last"


def test_what_is_sent_flies_during_the_next_slot():
    """Tick 0: F on stage 0 until 10, then B on stage 1 for 5: it was sent nothing, and waits for nobody's clock before
    its own B. With the wait after B, 2 s of 5 s are left."""
    rows = table("F0|B0", "|F0", "|")
    sent = permute("p", ((0, 1),))
    found = two_stages(slot("F", 10.0), Start(sent), slot("B", 11.0), Done("p"), seconds=3.0, by=rows)
    first, second = found.stages
    assert first.compute_seconds == 10
    assert second.compute_seconds == 11 + 10
    assert second.exposed_seconds == pytest.approx(2 + 3 + 3)  # of tick 0: from 11 to 13, begun at 10
    assert found.seconds == pytest.approx(13 + 10 + 3 + 3)


@pytest.mark.parametrize(("kind", "back", "on"), [("collective-permute", 30, 30), ("send", 20, 30)])
def test_both_ends_of_a_permute_wait_and_of_a_send_the_receiver(kind, back, on):
    """Two ticks of 10 s on stage 0, then one on stage 1. With p = 2 the next stage is also the one before: who waits
    for a send is told by its pairs alone."""
    for pair, seconds in (((1, 0), back), ((0, 1), on)):
        sent = replace(permute("p", (pair,)), kind=kind)
        found = two_stages(slot("F", 10.0), Start(sent), Done("p"), by=table("F0|", "F1|", "|F0"))
        assert found.seconds == seconds


def test_a_sum_over_the_stages_begins_when_the_last_of_them_is_there():
    total = replace(permute("s", ((0, 1),)), kind="all-reduce")
    found = two_stages(slot("F", 10.0), Start(total), Done("s"), seconds=1.0)
    assert found.seconds == 3 * 11
    assert [each.bubble_seconds for each in found.stages] == pytest.approx([10, 10])


@pytest.mark.parametrize(("end", "seconds"), [("first", (21, 20)), ("last", (20, 21))])
def test_a_conditional_of_an_end_runs_on_that_end_alone(end, seconds):
    name = nested_scope(slot_scope("F"), f"cond/branch_1_fun/{end_scope(end)}/cond")
    inner = Branches("e", ((), (compute("e", 0.5),)), op_name=name, on=1)
    found = two_stages(slot("F", 10.0, inside=(inner,)))
    assert tuple(each.compute_seconds for each in found.stages) == seconds


def test_all_stages_run_the_conditional_of_a_shared_end():
    """The last stage has F in ticks 1 and 2; both then compute their part of the head."""
    name = nested_scope(slot_scope("F"), f"{shared_end_scope('last')}/cond")
    head = Branches("h", ((), (compute("h", 0.5),)), op_name=name, on=1)
    found = two_stages(slot("F", 10.0), head)
    assert [each.compute_seconds for each in found.stages] == [21, 21]


def test_a_slot_with_the_work_in_the_first_branch_and_one_of_two_conditionals():
    """A compiler may write the predicate's true branch first, and a slot may be two conditionals."""
    flipped = replace(slot("F", 10.0), on=0, branches=((compute("F", 10.0),), ()))
    assert two_stages(flipped, slot("F", 1.0)).stages[0].compute_seconds == 22


def test_a_slot_has_a_branch_for_each_kind_of_layers():
    """Stage 0 runs two layers of 10 s, stage 1 one of them: branch 0 is idle, 1 of two layers, 2 of one."""
    switch = replace(slot("F", 0.0), branches=((), (compute("two", 20.0),), (compute("one", 10.0),)), on=None)
    by = table("F0|", "F1|F0", "|F1")
    devices = StagedDevices(by, [0, 1], [0, 1], 2)
    result = simulate_stages((Loop("l", 3, (switch,)),), ALL(0.0), devices)
    assert [each.compute_seconds for each in result.stages] == [40, 20]
    with pytest.raises(HloError, match=r"of the slot F has 3 branches, and the pipeline has 1 kind of parts"):
        simulate_stages((Loop("l", 3, (switch,)),), ALL(0.0), replace(devices, kinds=[0, 0]))


def test_a_slot_has_a_conditional_for_each_kind_of_layers():
    """The same, as on GPUs: each is the loop of one trip at most of its kind."""
    of_kind = [slot("F", 20.0), slot("F", 10.0)]
    devices = StagedDevices(table("F0|", "F1|F0", "|F1"), [0, 1], [0, 1], 2)
    result = simulate_stages((Loop("l", 3, tuple(of_kind)),), ALL(0.0), devices)
    assert [each.compute_seconds for each in result.stages] == [40, 20]


def test_a_loop_of_one_trip_at_most_is_read_as_a_conditional():
    def read(scope):
        name = f'metadata={{op_name="jit(f)/slot=F/{scope}/while"}}'
        return read_steps(parse_module(module(f"  ROOT %c = bf16[8]{{0}} while(%x), body=%work, {name}")), CYCLES)

    (loop,) = read("while/body")
    (found,) = read(at_most_once_scope())
    assert isinstance(loop, Loop)
    assert isinstance(found, Branches)
    assert (found.branches, found.on) == ((loop.body, ()), 0)
    assert slot_of(found) == SlotOf("F")


@pytest.mark.parametrize(
    ("written", "on"),
    [
        ("%x, %x, %x), branch_computations={%off, %work}", 1),
        ("%x, %x, %x), true_computation=%work, false_computation=%off", 0),
        ("%x, %x, %x, %x), branch_computations={%off, %work, %off}", None),
    ],
)
def test_the_branch_of_a_true_predicate_is_read_from_both_forms(written, on):
    text = module(f'  ROOT %c = bf16[8]{{0}} conditional({written}, metadata={{op_name="jit(f)/slot=F/cond"}}')
    (found,) = read_steps(parse_module(text.replace("%off", "%work")), CYCLES)
    assert isinstance(found, Branches)
    assert found.on == on
    assert slot_of(found) == SlotOf("F")


def test_ticks_that_are_unrolled_or_peeled_stay_in_order():
    """Rows 0 to 5: a tick, a loop of 2 trips with 2 ticks each, and a tick. Rows 3 and 5 take 10 s."""
    rows = table("|", "|", "|", "F0|", "|", "|F0")
    one, sent = slot("F", 10.0), permute("p", ((0, 1),))
    body = (one, Start(sent), Done("p"))
    steps = (*body, Loop("l", 2, (*body, *body)), *body)
    result = simulate_stages(steps, ALL(0.0), StagedDevices(rows, [0, 0], [0, 1], 2))
    assert result.seconds == 20
    assert [each.compute_seconds for each in result.stages] == [10, 10]


def test_a_conditional_elsewhere_takes_the_branch_that_ends_last():
    other = Branches("o", ((compute("a", 1.0),), (compute("b", 2.0),)), op_name="jit(step)/cond", on=1)
    found = two_stages(slot("F", 10.0), other)
    assert [each.compute_seconds for each in found.stages] == [26, 26]
    total = replace(permute("s", ((0, 1),)), kind="all-reduce")
    across = Branches("o", ((compute("a", 1.0),), (Start(total), Done("s"))), op_name="jit(step)/cond", on=1)
    assert two_stages(across, slot("F", 10.0), seconds=5.0).seconds == 3 * 5 + 20 + 10
