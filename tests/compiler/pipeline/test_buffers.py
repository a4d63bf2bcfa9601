"""Columns of tables, run on the host with labels in the place of arrays: each read finds what it should."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings

from meshloom.compiler.pipeline.buffers import forward_only, lower_table, slots_in_use
from meshloom.compiler.pipeline.schedules import build_table
from meshloom.compiler.pipeline.table import PipelineOp, TickForm
from support.pipeline_tables import declared


class Host:
    """Runs all stages as the executor does, knowing nothing of how slots were found. A label is (kind, virtual stage,
    microbatch): the input of a virtual stage, the gradient of its result, what R leaves, what B leaves."""

    def __init__(self, table, lowered):
        self.table, self.columns, self.placement = table, lowered.columns, table.placement
        self.last, self.stages = self.placement.num_virtual - 1, range(self.placement.num_stages)
        sizes = {
            "x": lowered.num_x,
            "gradient": lowered.num_gradients,
            "cut": lowered.num_cuts,
            "residuals": lowered.num_residuals,
        }
        self.buffers = {name: [[None] * (size + 1) for _ in self.stages] for name, size in sizes.items()}
        self.spans = {name: defaultdict(list) for name in sizes}  # when each label is written and read
        self.ran = []
        self.now = self.tick = 0

    def at(self, name, stage):
        column = self.columns.get(name)
        return None if column is None else column[self.tick, stage].item()

    def put(self, buffer, name, stage, label):
        slot = self.at(name, stage)
        if slot is not None:
            self.buffers[buffer][stage][slot] = label
            if slot < len(self.buffers[buffer][stage]) - 1:
                self.spans[buffer][label].append(self.now)

    def read(self, buffer, name, stage, label):
        assert self.buffers[buffer][stage][self.at(name, stage)] == label
        self.spans[buffer][label].append(self.now)

    def run(self):
        sent = [None] * len(self.stages)
        for tick in range(self.table.num_ticks):
            self.tick = tick
            made = [self.forward(stage) for stage in self.stages]
            self.now += 1
            self.arrive("gradient", sent)
            self.now += 1
            for stage in self.stages:
                self.recompute(stage)
            self.now += 1
            sent = [self.backward(stage) for stage in self.stages]
            self.now += 1
            for stage in self.stages:
                self.weight(stage)
            self.now += 1
            self.arrive("x", made)
            self.now += 1
        return self

    def arrive(self, buffer, sent):
        for stage in self.stages:
            for way, source in (("arrives_from_below", stage - 1), ("arrives_from_above", stage + 1), ("stays", stage)):
                self.put(buffer, f"{buffer}_{way}", stage, sent[source % len(self.stages)])

    def work(self, name, op, stage):
        """Returns the virtual stage and the microbatch that a stage runs in this tick, if any."""
        if not self.at(name, stage):
            return None
        microbatch, chunk = self.at(f"{name}_microbatch", stage), self.at(f"{name}_chunk", stage)
        place = self.placement.virtual(stage, chunk), microbatch
        self.ran.append((op, *place))
        return place

    def forward(self, stage):
        if (place := self.work("forward", "F", stage)) is None:
            return None
        virtual, microbatch = place
        assert self.at("forward_is_first", stage) == (virtual == 0)
        assert self.at("forward_is_last", stage) == (virtual == self.last)
        if virtual == 0:
            self.put("x", "x_of_forward", stage, ("x", *place))
        self.read("x", "x_of_forward", stage, ("x", *place))
        if virtual == self.last:
            self.put("gradient", "gradient_of_head", stage, ("gradient", *place))
        return ("x", virtual + 1, microbatch)

    def recompute(self, stage):
        if (place := self.work("recompute", "R", stage)) is not None:
            self.read("x", "x_of_recompute", stage, ("x", *place))
            self.put("residuals", "residuals_of_recompute", stage, ("residuals", *place))

    def backward(self, stage):
        if (place := self.work("backward", "BW", stage)) is None:
            return None
        virtual, microbatch = place
        assert self.at("backward_is_first", stage) == (virtual == 0)
        of = "residuals" if "recompute" in self.columns else "x"
        self.read(of, f"{of}_of_backward", stage, (of, *place))
        self.read("gradient", "gradient_of_backward", stage, ("gradient", *place))
        self.put("cut", "cut_of_backward", stage, ("cut", *place))
        return ("gradient", virtual - 1, microbatch)

    def weight(self, stage):
        if (place := self.work("weight", "W", stage)) is not None:
            self.read("cut", "cut_of_weight", stage, ("cut", *place))
            if "recompute" not in self.columns:
                self.read("x", "x_of_weight", stage, ("x", *place))

    def alive(self, buffer):
        """Returns by stage the most labels that are between their first write and their last read."""
        events = defaultdict(list)
        for (_, virtual, _), times in self.spans[buffer].items():
            events[self.placement.stage(virtual)] += [(min(times), 1), (max(times) + 0.5, -1)]
        return tuple(max(np.cumsum([each for _, each in sorted(events[stage])]), default=0) for stage in self.stages)

    def most_alive(self, buffer):
        return max(self.alive(buffer))


def expected_work(table):
    split = {PipelineOp.INPUT_GRADIENT: "BW"}
    return sorted((split.get(work.op, str(work.op)), work.virtual, work.microbatch) for work in table.ticks)


@settings(max_examples=150)
@given(declared())
def test_each_operation_reads_what_was_made_for_it_from_as_few_slots_as_can_be(declaration):
    table = build_table(*declaration)
    lowered = lower_table(table)
    host = Host(table, lowered).run()
    assert sorted(host.ran) == expected_work(table)
    assert lowered.num_x == host.most_alive("x")
    assert lowered.num_gradients == host.most_alive("gradient")
    assert lowered.num_cuts == host.most_alive("cut")
    assert lowered.num_residuals == host.most_alive("residuals")
    assert slots_in_use(table) == {buffer: host.alive(buffer) for buffer in host.buffers}


@settings(max_examples=60)
@given(declared())
def test_forward_alone_for_evaluation(declaration):
    _, stages, chunks, microbatches, *_ = declaration
    table = forward_only(build_table(*declaration))
    for work, tick in table.ticks.items():
        assert all(table.ticks[need] < tick for need, _ in table.dependencies(work))
    lowered = lower_table(table)
    host = Host(table, lowered).run()
    assert {op for op, *_ in host.ran} == {"F"}
    assert len(host.ran) == stages * chunks * microbatches
    assert (lowered.num_gradients, lowered.num_cuts, lowered.num_residuals) == (0, 0, 0)
    assert not any("gradient" in column for column in lowered.columns)
    if chunks == 1:
        assert table.num_ticks == microbatches + stages - 1
        assert lowered.num_x == 1


@pytest.mark.parametrize("microbatches", [8, 16])
def test_slots_of_known_schedules(microbatches):
    def slots(name, form):
        lowered = lower_table(build_table(name, 4, 1, microbatches, form))
        return lowered.num_x, lowered.num_gradients

    assert slots("gpipe", TickForm.UNIT) == (microbatches, microbatches)
    assert slots("1f1b", TickForm.UNIT) == (4, 1)
    assert slots("1f1b", TickForm.MULTI) == (7, 1)


def test_columns_are_those_of_the_operations_and_ways_that_there_are():
    def columns(*shape, **more):
        return set(lower_table(build_table(*shape, **more)).columns)

    loop = columns("1f1b", 4, 1, 8, TickForm.MULTI)
    assert {"x_arrives_from_below", "gradient_arrives_from_above", "x_of_backward"} <= loop
    assert not loop & {"x_stays", "x_arrives_from_above", "weight", "recompute", "cut_of_backward"}
    v = columns("zb_v", 4, 2, 8, TickForm.UNIT, recomputes=True)
    assert {"x_stays", "x_arrives_from_above", "gradient_arrives_from_below", "cut_of_weight"} <= v
    assert "x_of_backward" not in v
    assert not any("arrives" in name for name in columns("zb_v", 1, 2, 8, TickForm.UNIT))


def test_nothing_is_read_where_nothing_runs():
    lowered = lower_table(build_table("zb_v", 4, 2, 8, TickForm.UNIT))
    for name, slot in (("forward", "x_of_forward"), ("weight", "cut_of_weight")):
        idle = lowered.columns[slot][lowered.columns[name] == 0]
        assert set(idle.tolist()) == {lowered.num_x if name == "forward" else lowered.num_cuts}
