"""A program with a loop and a cond, whose memory, communication, roofline and time can be added up in one's head.

4 trips:  x = x @ w in the first 3, x = psum(x) in the last        x, w: SQUARE bytes; a matmul: MATMUL FLOPs
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from conftest import SMALL, plan_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.partition_spec import STAGE
from meshloom.compiler.core.scopes import slot_scope
from meshloom.compiler.estimate.communication import plan_communication
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.estimate.liveness import find_peak
from meshloom.compiler.estimate.program_costs import Costs, read_costs
from meshloom.compiler.estimate.regions import price_regions
from meshloom.compiler.estimate.roofline import find_unknown, plan_roofline
from meshloom.compiler.estimate.step_time import Hiding, LinkTimes, Rates, StepTime, time_step
from meshloom.compiler.jaxpr.read_jaxpr import read_jaxpr
from meshloom.compiler.pipeline.makespan import TickPermute
from support.links import links_of

SIZE, TRIPS, FSDP = 64, 4, 8
SQUARE, MATMUL = 4 * SIZE**2, 2 * SIZE**3
COUNTER = 2 * 4 + 2 * 4  # bytes of a trip: its number is taken from a stack, and the index of the branch is made of it
RATE = 1e6  # FLOPs and bytes per second
LATENCY, SUM = 0.5, 0.5 + SQUARE / RATE  # seconds of a collective at least, and of the sum over devices


@pytest.fixture(scope="module")
def plan():
    return plan_of("target=v5e-8", "sharding=fsdp")


def regions_of(plan, step, *, num_stages=1, traits=None):
    """The regions of step(x, w) in the layers of a plan; each device has all of both. traits: another compiler's."""
    sizes = {STAGE: num_stages, "fsdp": FSDP}
    mesh, whole = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes)), jax.P()
    square = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)

    def layers(x, w):
        with jax.named_scope("layers"):
            return jax.shard_map(step, mesh=mesh, in_specs=(whole, whole), out_specs=whole, check_vma=False)(x, w)

    traced = jax.make_jaxpr(layers)(square, square)
    program = read_jaxpr(traced.jaxpr, [((), ())] * 2, sizes, consts=traced.consts)
    return price_regions(program, traits or plan.target.compiler)


def loop(trip):
    """The step that runs x = trip(t, x, w) for t = 0, 1, .."""
    return lambda x, w: lax.scan(lambda x, t: (trip(t, x, w), None), x, jnp.arange(TRIPS))[0]


def time_of(step):
    """(seconds of compute, of exposed communication) where nothing hides and everything runs at RATE."""
    shape, numbers = read_costs(step, frozenset(), ())
    links = LinkTimes(links_of({("fsdp",): FSDP}, rate=2 * RATE, start=LATENCY / 2))
    hiding = Hiding(frozenset(), 1.0, is_doubled=False)
    time = time_step(
        Costs(shape, numbers[:, None]), Rates(RATE, lambda _: RATE, RATE, RATE, RATE, RATE), links, hiding
    ).of(0)
    return time.compute_seconds, time.exposed_seconds


def matmuls_then_sum(t, x, w):
    return lax.cond(t < TRIPS - 1, lambda: x @ w, lambda: lax.psum(x, "fsdp"))


def test_each_branch_counts_in_the_trips_that_run_it(plan):
    step = regions_of(plan, loop(matmuls_then_sum))
    (part,) = plan_roofline(plan.model.stacks, plan.mesh, step, None)
    assert (part.name, part.flops) == ("layers (x3)", 3 * MATMUL)
    assert part.hbm_bytes == 3 * (3 * SQUARE) + 2 * SQUARE + TRIPS * COUNTER
    assert part.link_bytes == 2 * SQUARE * (FSDP - 1) // FSDP
    assert [(one.kind, one.bytes_each, one.count) for one in plan_communication(plan, step)] == [
        ("all-reduce", SQUARE, 1)
    ]
    compute, exposed = time_of(step)
    assert compute == pytest.approx((3 * MATMUL + 2 * SQUARE + TRIPS * COUNTER) / RATE, rel=1e-12)
    assert exposed == pytest.approx(SUM, rel=1e-12)


@pytest.mark.parametrize("copies", [True, False])
def test_a_collective_is_a_pass_over_memory_where_the_compiler_copies_for_it(plan, copies):
    traits = plan.target.compiler.model_copy(update={"copies_for_collectives": copies})
    step = regions_of(plan, loop(lambda _t, x, w: lax.psum(x @ w, "fsdp")), traits=traits)
    compute, exposed = time_of(step)
    number = 2 * 4  # bytes of a trip's
    assert compute == pytest.approx(TRIPS * (MATMUL + copies * 2 * SQUARE + number) / RATE, rel=1e-12)
    assert exposed == pytest.approx(TRIPS * SUM, rel=1e-12)


def test_slices_are_copied_at_the_rate_of_large_passes(plan):
    def trip(t, x, w):
        row = lax.dynamic_slice(w, (t, 0), (1, SIZE))
        return lax.dynamic_update_slice(x, row, (t, 0))

    shape, numbers = read_costs(regions_of(plan, loop(trip)), frozenset(), ())
    kinds = Counter(work.kind for work in shape.works)
    assert kinds["sliced"] == 2
    rates = Rates(RATE, lambda _: RATE, RATE, RATE, RATE, large_bytes_per_second=2 * RATE)
    time = time_step(Costs(shape, numbers[:, None]), rates, LinkTimes({}), Hiding(frozenset(), 1.0, is_doubled=False))
    slices = 2 * (2 * SQUARE / SIZE) / (2 * RATE)
    others = sum(numbers[place] for work in shape.works if work.kind == "other" for place in work.moved) / RATE
    assert time.of(0).compute_seconds == pytest.approx(TRIPS * (slices + others), rel=1e-9)


@pytest.mark.parametrize("heavy_first", [True, False])
def test_the_peak_is_in_the_branch_that_holds_most(plan, heavy_first):
    """x is there outside, and the result of the cond; x @ w and x @ w @ w are in one of the branches."""

    def trip(t, x, w):
        branches = (lambda: x @ w @ w @ w, lambda: x * 2)
        return lax.cond(t < 1, *(branches if heavy_first else reversed(branches)))

    assert find_peak(regions_of(plan, loop(trip))).total == 3 * SQUARE


def test_what_a_branch_gathers_is_a_gathered_weight(plan):
    def trip(t, x, _w):
        return lax.cond(t < 1, lambda: lax.all_gather(x[: SIZE // FSDP], "fsdp", tiled=True), lambda: x)

    assert find_peak(regions_of(plan, loop(trip))).num_bytes["gathered_weights"] == SQUARE


@pytest.mark.parametrize("is_in_place", [True, False])
def test_a_branch_that_writes_a_buffer_in_place_holds_and_moves_it_once(plan, is_in_place):
    """A loop in one branch writes a row of x in each trip, and the other branch hands x on."""

    def rows(x, w):
        def one(x, t):
            row = lax.dynamic_slice_in_dim(w, t, 1)
            return lax.dynamic_update_slice_in_dim(x, row, t, 0), None

        return lax.optimization_barrier(lax.scan(one, x, jnp.arange(TRIPS))[0])

    def trip(t, x, w):
        return lax.cond(t < 1, lambda: rows(x, w), lambda: x if is_in_place else x * 2)

    step = regions_of(plan, loop(trip))
    assert find_peak(step).total // SQUARE == (0 if is_in_place else 2)
    (cond,) = (one for _, one in step.each() if one.operation.kind == "branches")
    assert (cond.hbm_bytes or 0) // SQUARE == (1 if is_in_place else 3), "w, and x before and after"


def test_stages_run_what_is_theirs_and_the_slowest_counts(plan):
    """Stage 0 multiplies in all trips, and stage 1 adds up over devices."""

    def trip(_, x, w):
        return lax.cond(lax.axis_index(STAGE) == 0, lambda: x @ w, lambda: lax.psum(x, "fsdp"))

    step = regions_of(plan, loop(trip), num_stages=2)
    executions = [region.executions for region in step.walk()]
    assert executions == [(1,), (TRIPS,), (0, TRIPS), (TRIPS, 0)]
    (part,) = plan_roofline(plan.model.stacks, plan.mesh, step, None)
    assert part.flops == TRIPS * MATMUL
    assert [one.count for one in plan_communication(plan, step)] == [TRIPS]
    compute, exposed = time_of(step)
    assert exposed == pytest.approx(TRIPS * SUM)
    assert compute < TRIPS * MATMUL / RATE, "of the stage that waits"


def test_stages_run_what_a_table_says(plan):
    """The slots of two stages: F in trips 0 to 2 and in 1 and 2, B in 3 and in 0."""
    table = np.array([[[1, 0], [0, 1]], [[1, 1], [0, 0]], [[1, 1], [0, 0]], [[0, 0], [1, 0]]], bool)

    def step(x, w):
        def trip(x, row):
            on = row[:, lax.axis_index(STAGE)]
            x = lax.cond(on[0], lambda: x @ w, lambda: x)
            return lax.cond(on[1], lambda: x @ w @ w, lambda: x), None

        return lax.scan(trip, x, jnp.asarray(table))[0]

    found = regions_of(plan, step, num_stages=2)
    (_, _, _, forward, _, backward) = (region.executions for region in found.walk())
    assert (forward, backward) == (pytest.approx((3, 2)), pytest.approx((1, 1)))
    assert find_unknown(plan.model.stacks, found) == ()


def time_of_matmuls(costs: Costs, permute: float = 0.0) -> StepTime[float]:
    """The time where memory is fast, and a permute takes as long as given."""
    links = LinkTimes(links_of({(STAGE,): 2}, RATE, permute))
    fast, hiding = 1e4 * RATE, Hiding(frozenset(), 1.0, is_doubled=False)
    rates = Rates(RATE, lambda _: RATE, fast, fast, fast, fast)
    return time_step(costs, rates, links, hiding).of(0)


def test_compute_and_bubble_are_means_over_the_stages(plan):
    """Of two stages one multiplies while the other waits: each has half of the step on average."""

    def step(x, w):
        def tick(x, on):
            with jax.named_scope(slot_scope("F")):
                return lax.cond(on[0][lax.axis_index(STAGE)], lambda: x @ w, lambda: x), None

        return lax.scan(tick, x, (jnp.asarray([[False, True]] * 3),))[0]

    shape, numbers = read_costs(regions_of(plan, step, num_stages=2), frozenset(), ())
    found = time_of_matmuls(Costs(shape, numbers[:, None]))
    assert found.seconds == pytest.approx(3 * MATMUL / RATE, rel=1e-3)
    assert found.compute_seconds == pytest.approx(found.seconds / 2, rel=1e-3)
    assert found.bubble_seconds == pytest.approx(found.seconds / 2, rel=1e-3)


def test_the_step_of_a_pipeline_is_the_makespan_of_its_table(plan):
    """Two stages and two microbatches: stage 0 runs F alone, then the last one F and B twice, then stage 0 B. B is two
    matmuls. Of the permutes, those of the first and the last tick have nothing beside them."""
    forward = np.array([[1, 0], [1, 1], [0, 1], [0, 0]], bool)
    backward = np.array([[0, 0], [0, 1], [1, 1], [1, 0]], bool)
    f, b, permute = MATMUL / RATE, 2 * MATMUL / RATE, 0.3 * MATMUL / RATE

    def step(x, w):
        def tick(carry, row):
            x, dx = carry
            f_on, b_on = row[0][lax.axis_index(STAGE)], row[1][lax.axis_index(STAGE)]
            g = lax.ppermute(dx, STAGE, [(1, 0)])
            with jax.named_scope(slot_scope("F")):
                y = lax.cond(f_on, lambda: x @ w, lambda: x)
            come = lax.ppermute(y, STAGE, [(0, 1)])
            with jax.named_scope(slot_scope("BW")):
                dx = lax.cond(b_on, lambda: g @ w @ w, lambda: g)
            return (come, dx), None

        return lax.scan(tick, (x, x), (jnp.asarray(forward), jnp.asarray(backward)))[0][1]

    shape, numbers = read_costs(regions_of(plan, step, num_stages=2), frozenset(), ())
    assert shape.ticks is not None
    assert [type(part).__name__ for part in shape.ticks.parts] == ["TickPermute", "TickSlot"] * 2
    permutes = [part for part in shape.ticks.parts if isinstance(part, TickPermute)]
    assert [(one.sources, one.needed_by) for one in permutes] == [(((1,), ()), 3), (((), (0,)), None)]

    costs = Costs(shape, numbers[:, None])
    free, found = time_of_matmuls(costs, 0.0), time_of_matmuls(costs, permute)
    assert free.seconds == pytest.approx(3 * (f + b), rel=1e-3)
    assert free.compute_seconds == pytest.approx(2 * (f + b), rel=1e-3)
    assert (free.bubble_seconds, free.exposed_seconds) == (pytest.approx(f + b, rel=1e-3), 0)
    assert found.seconds == pytest.approx(3 * (f + b) + 2 * permute, rel=1e-3)
    assert found.exposed[STAGE,] == pytest.approx(2 * permute, rel=1e-3)


def test_a_sum_among_stages_in_a_branch_that_one_of_them_takes_is_an_error(plan):
    """It would hang. The others run: within a stage, or in a branch that all stages take together."""

    def step(axes, predicate):
        return loop(lambda t, x, _w: lax.cond(predicate(t), lambda: lax.psum(x, axes), lambda: x))

    def is_last(t):
        return t + lax.axis_index(STAGE) == TRIPS

    with pytest.raises(ConfigError, match="psum in layers is among stages, in a branch that not all of them take"):
        regions_of(plan, step((STAGE, "fsdp"), is_last), num_stages=2)
    regions_of(plan, step("fsdp", is_last), num_stages=2)
    regions_of(plan, step((STAGE, "fsdp"), lambda t: t == 1), num_stages=2)


def test_a_branch_that_data_chooses_counts_as_often_as_the_others_and_is_named(plan):
    def trip(_, x, w):
        return lax.switch(x[0, 0].astype(int), [lambda: x @ w, lambda: x @ w @ w, lambda: x])

    step = regions_of(plan, loop(trip))
    (part,) = plan_roofline(plan.model.stacks, plan.mesh, step, None)
    assert part.flops == TRIPS * (1 + 2) * MATMUL // 3
    (one,) = find_unknown(plan.model.stacks, step)
    assert str(one).startswith("cond at tests/compiler/estimate/test_regions.py:")
    assert str(one).endswith("in layers: which of its 3 branches runs depends on data; "
                             "each is counted as often as the others")  # fmt: skip
    assert one.why is None, "the figures of the step stay known"


def test_a_loop_that_skips_collectives_sends_what_one_without_them_sends():
    """Where collectives are synchronous, the first and the last trip of a loop that prefetches skip theirs in a cond:
    each weight is gathered in every layer forward and backward, and its gradient is reduced there."""

    def counts(overlap):
        planned = estimate_step(plan_of(*SMALL, "target=cpu-8", "sharding=fsdp", f"overlap={overlap}")).communication
        counts: Counter[tuple[str, str]] = Counter()
        for one in planned:
            if one.origin.name.startswith("layers/"):
                counts[one.kind, one.origin.name] += one.count
        return counts

    assert counts("prefetch") == counts("none") != {}
