"""What a scheduler hides in order: a trip of a compiled program, limits that hold for any order, and plans for GPUs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import meshloom
from conftest import SMALL, plan_of
from meshloom.compiler.core.traffic import Placed
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.estimate.estimated_step import read_step
from meshloom.compiler.estimate.latency_hiding import (
    Flight,
    Stall,
    exposed_as_ready,
    exposed_in_order,
    waited_in_line,
)
from meshloom.compiler.estimate.program_costs import Costs, StepOrder, read_costs
from meshloom.compiler.estimate.regions import price_regions
from meshloom.compiler.estimate.step_time import (
    plan_hiding,
    plan_link_times,
    plan_rates,
    time_step,
)
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
FEW_EXPERTS = ("model.num_layers=2", "model.num_dense_layers=0", "model.dense_mlp_dim=null", "data=synthetic")
MLP = ("up_EM", "gate_EM", "down_ME")
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


def _step(reads, writes, inside=(), flops=0) -> Any:
    operation = SimpleNamespace(flops=flops, collective=None)
    return SimpleNamespace(fused=SimpleNamespace(reads=reads, writes=writes), inside=inside, operation=operation)


def test_no_weight_is_on_its_way_while_a_loop_runs():
    def beside(inside):
        steps: Any = [_step([], ["w"]), _step([], ["x"]), _step(["x"], ["y"], inside), _step(["w", "y"], ["z"])]
        return StepOrder(steps).beside("all-gather", 0, [0, 0, 1, 1, 2], is_step=False)

    assert beside(inside=("a body",)) == (1, 1)  # between the loop and what reads it
    assert beside(inside=()) == (0, 1)


def test_what_passes_make_of_what_a_trip_begins_with_is_ready_with_it():
    """A gradient of the trip before, whose cast is traced last; one that the trip computes is ready after its cast."""
    steps: Any = [_step(["x", "w"], ["y"], flops=1), _step(["before"], ["cast"]), _step(["y"], ["own"])]
    order = StepOrder([*steps, _step(["cast"], ["sum"]), _step(["own"], ["own sum"])])
    assert (order.ready(3), order.ready(4)) == (0, 3)


@pytest.mark.parametrize("target", ["h100-8", "v5p-16"])
def test_experts_have_no_loop_in_a_layer(target):
    """Nothing would be on its way while one runs."""
    over = (f"target={target}", "mesh.expert=8", "global_batch_size=64", "sequence_length=4096", "sharding=fsdp_expert")
    plan = meshloom.plan("model=qwen3_30b_a3b", "model.num_layers=2", "remat=full", *over)
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


def test_what_is_read_after_a_stall_begins_with_it():
    works, wait = _columns([10, 10, 10]), Stall(np.array([4.0]), 1)
    read_last, read_first = _flight(20, 0, 0, 2), _flight(20, 0, 0, 1)
    a_sum = replace(_flight(20, 0, 0, 3), moves=False)
    for flight, exposed_alone, exposed in ((read_last, 0, 6), (read_first, 10, 16), (a_sum, 0, 0)):
        assert float(exposed_as_ready(works, [flight], [])[0][0]) == exposed_alone
        assert float(exposed_as_ready(works, [flight], [wait])[0][0]) == exposed
    assert exposed_as_ready(works, [], [wait]) == []


def test_stalls_and_what_begins_as_ready_are_those_of_a_clock_that_runs_the_trip():
    """Random trips of six works, of which two are stalls, in which sums begin where they are ready."""
    rng = np.random.default_rng(2)
    for _ in range(50):
        works, seconds = rng.integers(1, 20, 4).astype(float), rng.integers(1, 40, 5).astype(float)
        waits = {int(place): float(rng.integers(1, 9)) for place in rng.choice(4, 2, replace=False)}
        firsts = rng.integers(0, 4, 5)
        lasts = [int(rng.integers(first, 5)) for first in firsts]
        in_line = sorted(range(5), key=lambda number: (lasts[number], number))  # the next to be read goes first
        steps: list[Step] = []
        for place in range(5):
            steps += [_named(number) for number in in_line if firsts[number] == place]
            steps += [Compute(f"wait.{place}", "matmul", waits[place], "flops", "")] if place in waits else []
            steps += [Done(f"all-gather.{number}") for number in range(5) if lasts[number] == place]
            steps += [Compute(f"work.{place}", "matmul", float(one), "flops", "") for one in works[place : place + 1]]
        of = {f"all-gather.{number}": Placed(float(one), ("ICI",)) for number, one in enumerate(seconds)}
        result = simulate(tuple(steps), lambda each, of=of: of[each.name])
        flights = [
            replace(_flight(each, 0, int(first), last), moves=False)
            for each, first, last in zip(seconds, firsts, lasts, strict=True)
        ]
        found = exposed_as_ready(
            _columns(works), flights, [Stall(np.array([each]), place) for place, each in waits.items()]
        )
        for number, each in enumerate(found):
            assert float(each[0]) == result.collectives[f"all-gather.{number}"].exposed_seconds


def test_gathers_of_experts_hide_beside_what_follows_their_exchange():
    """If nothing waited for the exchange, they would begin with the trip, and hide behind attention, too."""
    over = ("sequence_length=4096", "sharding=fsdp_expert", "remat=full", "target=tpu7x-64", "mesh.fsdp=8")
    plan = meshloom.plan("model=deepseek_v3", *FEW_EXPERTS, *over, "mesh.expert=8", "global_batch_size=64")
    costs, rates, links = _costs_of(plan)
    hiding = plan_hiding(plan)
    assert hiding.as_ready
    none = {source: replace(each, share=0.0) for source, each in hiding.of_operations.items()}
    free = replace(hiding, of_operations=none)
    waited, with_the_trip, in_any_order = (
        float(time_step(costs, rates, links, each).exposed["fsdp",][0])
        for each in (hiding, free, replace(free, as_ready=False))
    )
    assert waited > with_the_trip > in_any_order


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


def test_what_nothing_but_a_sum_reads_is_its_maker():
    """Also through a cast. What another step reads, too, is computed where it is traced."""
    steps: Any = [_step(["x"], ["gradient"], flops=1), _step(["gradient"], ["cast"]), _step(["x"], ["other"], flops=1)]
    order = StepOrder([*steps, _step(["cast"], ["sum"]), _step(["other"], ["other sum"]), _step(["other"], ["y"])])
    assert (order.maker(3), order.maker(4)) == (0, None)


def test_gradients_of_weights_are_computed_at_the_end_of_a_trip_for_tpus():
    """As in llama3_405b on tpu7x-1024, where 5.4 s of 37.3 are waits for them, and the estimate was 31.8 s: with as few
    tokens each sum has but the matmul of the next gradient to hide it, and the last one nothing."""
    over = ("target=tpu7x-256", "global_batch_size=512", "sequence_length=4096", "sharding=fsdp", "remat=full")
    plan = meshloom.plan("model=llama3_70b", "model.num_layers=4", *over, "data=synthetic")
    costs, rates, links = _costs_of(plan)
    hiding = plan_hiding(plan)
    makers = [one for one in costs.shape.transfers if one.maker is not None]
    assert {one.parameter for one in makers if one.region} >= {f"layers/mlp/{name}" for name in MLP}
    traced = replace(costs, shape=replace(costs.shape, transfers=tuple(map(_as_traced, costs.shape.transfers))))
    last, where_traced = (float(time_step(each, rates, links, hiding).exposed_seconds[0]) for each in (costs, traced))
    assert last > 1.3 * where_traced


def _as_traced(transfer):
    return replace(transfer, maker=None)


def test_a_gradient_that_the_compiler_all_reduces_takes_twice_as_long():
    """53,248 is 13 x 4,096, too odd for 1,024 devices; over 256 it is scattered."""
    over = ("model.num_layers=2", "sequence_length=8192", "sharding=fsdp", "remat=full", "data=synthetic")
    of = {
        chips: plan_hiding(meshloom.plan("model=llama3_405b", *over, f"target=tpu7x-{chips}", size)).all_reduced
        for chips, size in ((1024, "global_batch_size=1024"), (256, "global_batch_size=256"))
    }
    assert of[1024] == {"head/kernel_EV", *(f"layers/mlp/{name}" for name in MLP)}
    assert of[256] == {"head/kernel_EV"}
