"""What a scheduler hides in order: a trip of a compiled program, limits that hold for any order, and plans for GPUs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

import meshloom
from conftest import SMALL, plan_of
from meshloom.compiler.core.traffic import Placed
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.estimate.estimated_step import read_step
from meshloom.compiler.estimate.latency_hiding import Flight, exposed_in_order, waited_in_line
from meshloom.compiler.estimate.program_costs import Costs, StepOrder, read_costs
from meshloom.compiler.estimate.regions import price_regions
from meshloom.compiler.estimate.step_time import plan_hiding, plan_link_times, plan_rates, time_step
from meshloom.compiler.xla.schedule.simulate import simulate
from meshloom.compiler.xla.schedule.steps import Collective, Compute, Done, Start, Step

# One forward trip of llama3_8b on h100-64, a sequence of 4,096 a chip, in microseconds: queries, keys, values,
# attention, its output, up, gate, down. What each gather waits for is in the compiled program's timeline.
WORKS = [346, 6, 24, 343, 235, 809, 809, 820]
GATHERS = {
    "query": (333, 0),
    "key, value": (231, 1),
    "out": (333, 4),
    "up": (719, 5),
    "gate": (719, 6),
    "down": (719, 7),
}
EXPECTED = {333: 460, 231: 380, 719: 930}


def _columns(values):
    return [np.array([float(value)]) for value in values]


def _named(number):
    return Start(Collective(f"all-gather.{number}", "all-gather", 1, "f32", ((0, 1),), True, "", "", "", (1,)))


def _flight(seconds, expected, first, last):
    return Flight(np.array([float(seconds)]), np.array([float(expected)]), first, last)


def test_a_trip_hides_what_its_compiled_program_hides():
    flights = [_flight(each, EXPECTED[each], 0, last) for each, last in GATHERS.values()]
    exposed = [float(each[0]) for each in exposed_in_order(_columns(WORKS), flights)]
    assert sorted(exposed) == [0, 0, 231, 333, 333, 719]  # of up and gate, which are equal, one


# One forward trip of llama3_8b on a100-64, a sequence of 8,192 a chip, in microseconds: every kernel of the compiled
# program's timeline. There the scheduler counts kernels: up waits for none of its 1,188, gate for 783.
KERNELS = [2, 2, 2, 2, 74, 2, 2, 74, 2, 2, 2, 2, 1192, 298, 298, 76, 21, 3455, 2, 1192, 74, 110, 74, 19, 19, 110, 4170,
           4170, 74, 384, 256, 4170, 256]  # fmt: skip
READ_BY = {"query": (479, 12), "key, value": (333, 13), "out": (479, 19), "up": (1188, 26),
           "gate": (1188, 27), "down": (1188, 31)}  # fmt: skip


def test_a_scheduler_that_counts_kernels_hides_what_is_read_last_first():
    flights = [_flight(seconds, 5, 0, last) for seconds, last in READ_BY.values()]
    exposed = exposed_in_order(_columns(KERNELS), flights, _columns([1] * len(KERNELS)))
    waited = {name for name, each in zip(READ_BY, exposed, strict=True) if each[0] > 0}
    assert waited == {"query", "key, value", "gate"}


def test_a_sum_that_lasts_long_leaves_nothing_beside_gathers():
    """In the backward trip it takes all works, since the scheduler expects it to last longer than these."""
    works = _columns([800, 1600, 1000, 5000])
    gathers = [_flight(700, 900, 0, last) for last in (0, 1, 3)]
    a_sum = _flight(3225, 8400, 0, 4)
    exposed = exposed_in_order(works, [*gathers, a_sum])
    assert [float(each[0]) for each in exposed] == [700, 700, 700, 0]
    short = _flight(3225, 4000, 0, 4)  # then gathers hide beside the works that are left
    assert [float(each[0]) for each in exposed_in_order(works, [*gathers, short])] == [700, 0, 0, 0]


def test_a_collective_runs_beside_the_works_of_its_window_alone():
    works = _columns([10, 1000, 10])
    assert exposed_in_order(works, [_flight(100, 100, 2, 3)])[0] == 90
    assert exposed_in_order(works, [_flight(100, 100, 0, 1)])[0] == 90
    assert exposed_in_order(works, [_flight(100, 100, 3, 3)])[0] == 100
    assert exposed_in_order(works, []) == []


def test_many_declarations_are_as_each_alone():
    rng = np.random.default_rng(0)
    works = list(rng.uniform(0, 10, (12, 50)))
    flights = []
    for _ in range(8):
        first, last = sorted(rng.integers(0, 13, 2))
        seconds = rng.uniform(0, 20, 50)
        flights.append(Flight(seconds, seconds * rng.uniform(0.5, 2.0, 50), int(first), int(last)))
    together = exposed_in_order(works, flights)
    for column in range(50):
        alone = [Flight(one.seconds[[column]], one.expected[[column]], one.first, one.last) for one in flights]
        each = exposed_in_order([work[[column]] for work in works], alone)
        assert [float(one[0]) for one in each] == [float(one[column]) for one in together]
    total, sent = sum(works), sum(one.seconds for one in flights)
    exposed = sum(together)
    assert np.all(exposed >= np.maximum(sent - total, 0) - 1e-9)
    assert np.all(exposed <= sent + 1e-9)


GPUS = (*SMALL, "target=h100-16", "sharding=fsdp", "global_batch_size=16", "model.num_layers=4")


def _costs_of(plan):
    """Returns the costs of a plan's step, and the speeds of its target's chips and links."""
    weights = frozenset(array.array.path for array in plan.sharding.parameters)
    shape, numbers = read_costs(price_regions(read_step(plan), plan.target.compiler), weights, plan.ops)
    rates = plan_rates(plan.target)
    assert rates is not None
    return Costs(shape, numbers[:, None]), rates, plan_link_times([plan.mesh], shape.collective_axes)


def test_what_a_step_sends_has_the_works_beside_it_in_the_order_of_the_program():
    plan = plan_of(*GPUS)
    weights = frozenset(array.array.path for array in plan.sharding.parameters)
    shape, _ = read_costs(price_regions(read_step(plan), plan.target.compiler), weights, plan.ops)
    sent = [one for one in shape.transfers if one.is_weight]
    by_region = {one.region: sum(work.region == one.region for work in shape.works) for one in sent}
    for one in sent:
        first, last = one.beside
        assert last is not None
        assert 0 <= first <= last <= by_region[one.region]
    loops = [one for one in sent if one.region]
    assert {one.beside for one in loops if one.kind == "reduce-scatter"} == {
        (0, by_region[one.region]) for one in loops if one.kind == "reduce-scatter"
    }
    gathers = [one.beside[1] or 0 for one in loops if one.kind == "all-gather" and one.region == loops[0].region]
    assert gathers == sorted(gathers)
    assert len({*gathers}) > 3  # those of an MLP are read after those of attention


def test_what_begins_a_trip_early_hides_in_any_order():
    plan, early = plan_of(*GPUS), plan_of(*GPUS, "overlap.flag_presets=[pipelined]")
    assert not plan_hiding(plan).begins_early
    assert plan_hiding(early).begins_early
    assert plan_hiding(plan_of(*SMALL, "target=v5p-8")).in_order is None
    waits, hides = (estimate_step(each).figures for each in (plan, early))
    assert waits.compute_seconds == hides.compute_seconds
    assert float(waits.exposed_seconds or 0.0) > float(hides.exposed_seconds or 0.0)
    costs, rates, links = _costs_of(early)
    one_at_a_time = replace(plan_hiding(early), at_once=1)
    in_order, in_any = (
        float(time_step(costs, rates, links, each).exposed_seconds[0])
        for each in (one_at_a_time, replace(one_at_a_time, in_order=None))
    )
    assert in_order == in_any


def test_older_gpus_hide_by_kernels_with_a_preset_that_is_their_default():
    a100 = [one.replace("h100", "a100") for one in GPUS]
    default, without = plan_of(*a100), plan_of(*a100, "overlap.flag_presets=[]")
    assert plan_hiding(default).expected_kernels is not None
    assert "reduce-scatter" in plan_hiding(default).weights
    assert not plan_hiding(without).weights
    assert plan_hiding(plan_of(*GPUS, "overlap.flag_presets=[]")).weights  # by itself


def test_no_weight_is_on_its_way_while_a_loop_runs():
    def step(reads, writes, inside=()):
        return SimpleNamespace(fused=SimpleNamespace(reads=reads, writes=writes), inside=inside)

    def beside(inside):
        steps: Any = [step([], ["w"]), step([], ["x"]), step(["x"], ["y"], inside), step(["w", "y"], ["z"])]
        return StepOrder(steps).beside("all-gather", 0, [0, 0, 1, 1, 2], is_step=False)

    assert beside(inside=("a body",)) == (1, 1)  # between the loop and what reads it
    assert beside(inside=()) == (0, 1)


def test_experts_on_gpus_have_no_loop_in_a_layer():
    over = ("target=h100-8", "mesh.expert=8", "global_batch_size=64", "sequence_length=4096")
    plan = meshloom.plan("model=qwen3_30b_a3b", "model.num_layers=2", "sharding=fsdp_expert", "remat=full", *over)
    weights = frozenset(array.array.path for array in plan.sharding.parameters)
    shape, _ = read_costs(price_regions(read_step(plan), plan.target.compiler), weights, plan.ops)
    trips = {one.region for one in shape.transfers if one.region and one.is_weight}
    assert [len(shape.inside(trip)) for trip in trips] == [1, 1]


def test_a_gather_that_nothing_hides_is_in_line_after_a_sum_that_begins_before_it():
    """With room for several, the sum of the trip before begins with the trip, as its scheduler expects it to last
    longer. With room for one it begins when the gather has ended, and where it is expected to end in time as well."""
    works, gather = _columns([10, 10]), _flight(3, 3, 0, 0)
    for expected, at_once, exposed in ((100, 2, [12, 3]), (100, 1, [0, 3]), (15, 2, [0, 3])):
        found = exposed_in_order(works, [_flight(12, expected, 0, 2), gather], at_once=at_once)
        assert [float(each[0]) for each in found] == exposed


def test_waits_are_those_of_a_clock_that_runs_the_trip():
    """Random trips, with what begins and ends in them by hand."""
    rng = np.random.default_rng(1)
    for _ in range(50):
        works = rng.integers(1, 20, 4).astype(float)
        seconds = rng.integers(1, 40, 5).astype(float)
        begins = rng.integers(0, 4, 5)
        ends = [int(rng.integers(begin + 1, 5)) for begin in begins]
        steps: list[Step] = []
        for place in range(5):
            steps += [Done(f"all-gather.{number}") for number in range(5) if ends[number] == place]
            steps += [_named(number) for number in reversed(range(5)) if begins[number] == place]
            steps += [Compute(f"work.{place}", "matmul", float(one), "flops", "") for one in works[place : place + 1]]
        of = {f"all-gather.{number}": Placed(float(one), ("NIC",)) for number, one in enumerate(seconds)}
        result = simulate(tuple(steps), lambda each, of=of: of[each.name])
        found = waited_in_line(_columns(works), seconds[:, None], begins[:, None] + 2, np.array(ends)[:, None] + 2)
        for number, each in enumerate(found):
            assert float(each[0]) == result.collectives[f"all-gather.{number}"].exposed_seconds


def test_sums_that_are_combined_need_one_place():
    """So with several on their way there is room for gathers beside them, which are then in line after these."""
    plan = plan_of(*GPUS, "overlap.flag_presets=[concurrent]")
    costs, rates, links = _costs_of(plan)
    hiding = plan_hiding(plan)
    assert hiding.most_combined_bytes
    exposed = [
        float(time_step(costs, rates, links, replace(hiding, most_combined_bytes=most)).exposed_seconds[0])
        for most in (hiding.most_combined_bytes, None, 1)
    ]
    assert exposed[0] > exposed[1] == exposed[2]


def test_several_on_their_way_share_their_links():
    both = [_flight(3, 100, 0, 2), _flight(3, 100, 0, 2)]
    waited = [float(np.sum(exposed_in_order(_columns([5, 5]), both, at_once=number))) for number in (1, 2)]
    assert waited == [3, 0]  # alone, the first one has all works
    assert float(np.sum(exposed_in_order(_columns([2, 2]), both, at_once=2))) == 2
