"""The time of a step without a compiler, against sums by hand; costs of many declarations against one at a time."""

import json
from dataclasses import replace

import numpy as np
import pytest

from conftest import SMALL, plan_of
from meshloom.compiler.analysis.schedule_analysis import chip_of
from meshloom.compiler.core.kernels import AttentionCall
from meshloom.compiler.core.traffic import CollectiveKind
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.estimate.estimated_step import read_step
from meshloom.compiler.estimate.program_costs import (
    CopiedArray,
    Costs,
    ProgramShape,
    Transfer,
    Work,
    read_costs,
)
from meshloom.compiler.estimate.regions import price_regions
from meshloom.compiler.estimate.step_time import Hiding, LinkTimes, Rates, plan_hiding, plan_rates, time_step
from meshloom.compiler.parallel.operation import Exposed
from meshloom.compiler.spec.calibration_spec import Calibration
from meshloom.compiler.spec.flag_presets import hidden_by
from meshloom.compiler.target.target import calibrate_target
from support.links import links_of
from support.programs import target_of

RATES = Rates(
    matmul_flops_per_second=10.0,
    kernel=lambda of: 5.0 if isinstance(of, AttentionCall) else 2.0,
    hbm_bytes_per_second=100.0,
    stream_bytes_per_second=200.0,
    merged_bytes_per_second=100.0,
    large_bytes_per_second=150.0,
    host={"copy-to-device": 4.0, "copy-to-host": 5.0},
)
FUSION, SPLIT = "xla_tpu_enable_async_collective_fusion", "xla_enable_async_all_gather"
FUSED = f"{FUSION}: true, {FUSION}_fuse_all_gather: true, {SPLIT}: true"
PIPELINED = "xla_gpu_enable_pipelined_all_reduce"
OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload"
ALL: frozenset[CollectiveKind] = frozenset({"all-gather", "reduce-scatter", "all-reduce"})
LINKS = links_of({("fsdp",): 2}, rate=10.0, start=0.5) | links_of({("tensor",): 2}, rate=10.0)


def _loop(work, transfers, numbers, trips=4):
    """A step whose only region but itself is a loop. numbers: by place, behind the trips."""
    shape = ProgramShape(
        num_numbers=1 + len(numbers),
        works=tuple(work),
        transfers=tuple(transfers),
        regions=((), ((0,),)),
        live=((),),
        on_host=((),),
        arguments=(),
    )
    return Costs(shape, np.array([[trips], *([x] for x in numbers)], float))


def _seconds(costs, hiding):
    time = time_step(costs, RATES, LinkTimes(LINKS), hiding)
    return float(time.compute_seconds[0]), {axes: float(x[0]) for axes, x in time.exposed.items()}


def test_a_matmul_takes_the_longer_of_its_arithmetic_and_its_traffic():
    """A matmul of 20 FLOPs and 1,000 bytes, 4 times: 2 s against 5; what is not a matmul has traffic alone, at less
    than the rate of a stream."""
    work = [Work("matmul", 1, 1, (2,), 1), Work("other", 1, 1, (3,))]
    compute, _ = _seconds(_loop(work, [], [20.0, 1000.0, 50.0]), Hiding(ALL, 1.0, is_doubled=False))
    assert compute == pytest.approx(4 * (5.0 + 0.5))


@pytest.mark.parametrize("name", ["h100-8", "v5p-8"])
def test_passes_over_the_rows_of_experts_take_as_long_as_compiled_passes_calibrated_or_not(name):
    factors = {"chip": name.split("-")[0], "matmul": 2.0, "attention": 1.0, "other": 1.5, "links": {}, "source": "none"}
    target = target_of(name)
    for each in (target, calibrate_target(target, Calibration.model_validate(factors))):
        rates, chip = plan_rates(each), chip_of(each)
        assert rates is not None
        compiled = chip.hbm_bytes_per_second * chip.memory_share / chip.factors.get("other", 1.0)
        assert rates.large_bytes_per_second == pytest.approx(compiled)


@pytest.mark.parametrize(
    ("sent", "longer"), [(10.0, 4 * 1.5 * 0.07), (1000.0, 4 * 2.25 * 0.07)], ids=["shorter", "longer"]
)
def test_a_matmul_takes_its_start_and_longer_while_it_sends(sent, longer):
    """By hand: 4 times 20 FLOPs in 2 s after 0.25; a gather of 10 bytes takes 1.5 s, one of 1,000 outlasts it."""
    costs = _loop([Work("matmul", 1, 1, (), 1)], [Transfer("all-gather", ("fsdp",), "w", 1, 2)], [20.0, sent])
    hiding, rates = Hiding(ALL, 1.0, is_doubled=False), replace(RATES, matmul_seconds=0.25)
    alone = time_step(costs, rates, LinkTimes(LINKS), hiding).of(0).compute_seconds
    sends = replace(hiding, from_matmuls=frozenset({"all-gather"}))
    assert alone == pytest.approx(4 * 2.25)
    assert time_step(costs, rates, LinkTimes(LINKS), sends).of(0).compute_seconds == pytest.approx(alone + longer)


@pytest.mark.parametrize(
    ("target", "options", "kinds"),
    [
        ("v5e-8", "", {"all-gather"}),  # by default
        ("v5e-8", f"{FUSION}: false", set()),
        ("v5p-16", FUSED, {"all-gather"}),
        ("v5p-16", f"{OFFLOAD}_3d_all_gather: true, {SPLIT}: true", set()),
        ("v5p-16", f"{FUSED}, {OFFLOAD}_3d_all_gather: true", set()),  # SparseCores take what they would send
        ("v4-16", f"{SPLIT}: true", set()),
        ("h100-8", "", set()),
    ],
)
def test_matmuls_send_what_nothing_else_hides(target, options, kinds):
    declared = (*SMALL, f"target={target}", "sharding=fsdp", "overlap.flag_presets=[]")
    plan = plan_of(*declared, f"compiler_options={{{options}}}")
    assert plan_hiding(plan).from_matmuls == kinds


@pytest.mark.parametrize(
    ("target", "declared", "share"),
    [
        ("v6e-8", "overlap.flag_presets=[auto]", 0.79),
        ("v6e-8", "compiler_options={xla_tpu_scoped_vmem_limit_kib: 65536}", 0.9),
        ("v6e-8", "compiler_options={xla_tpu_scoped_vmem_limit_kib: '98304'}", 0.9),
        ("v6e-8", "compiler_options={xla_tpu_scoped_vmem_limit_kib: 32768}", 0.79),
        ("v6e-8", "overlap.flag_presets=[auto,scoped_memory]", 0.9),
        ("v5p-16", "compiler_options={xla_tpu_scoped_vmem_limit_kib: 65536}", 0.94),  # not measured
    ],
)
def test_matmuls_of_v6e_are_faster_with_more_scoped_memory(target, declared, share):
    plan = plan_of(*SMALL, f"target={target}", "sharding=fsdp", "precision=bfloat16", declared)
    rates = plan_rates(plan.target)
    assert rates is not None
    assert plan.target.chip is not None
    peak = plan.target.chip.peak_flops_per_second["bfloat16"]
    assert peak is not None
    assert chip_of(plan.mesh.placement.target).matmul_share == share  # of compiled programs
    assert rates.matmul_flops_per_second == pytest.approx(share * peak)


def test_each_kernel_takes_its_own_time_and_rows_of_experts_their_own_rate():
    """20 FLOPs of attention in 4 s, as many of a grouped matmul in 10 s, 3,000 bytes of one that streams in 15 s; 50
    bytes of rows of experts."""
    work = [
        Work("attention", 1, 1, (), rated_by=AttentionCall()),
        Work("grouped", 1, 1, (), rated_by="triton"),
        Work("grouped", 1, 1, (2,), rated_by="triton"),
        Work("routed", 1, None, (3,)),
    ]
    compute, _ = _seconds(_loop(work, [], [20.0, 3000.0, 50.0]), Hiding(ALL, 1.0, is_doubled=False))
    assert compute == pytest.approx(4 * (4.0 + 10.0 + 15.0 + 50 / 150))


@pytest.mark.parametrize(("compute_flops", "exposed"), [(100.0, 0.0), (5.0, 4 * (1.5 - 0.5))])
def test_gathers_hide_behind_the_arithmetic_of_their_own_loop(compute_flops, exposed):
    """10 bytes take 0.5 + 1 s, beside 10 s or half a second of a matmul."""
    costs = _loop([Work("matmul", 1, 1, (), 1)], [Transfer("all-gather", ("fsdp",), "w", 1, 2)], [compute_flops, 10.0])
    assert _seconds(costs, Hiding(ALL, 1.0, is_doubled=False))[1][("fsdp",)] == pytest.approx(exposed)


def test_what_the_compiler_does_not_overlap_is_waited_for():
    costs = _loop([Work("matmul", 1, 1, (), 1)], [Transfer("all-gather", ("fsdp",), "w", 1, 2)], [1000.0, 10.0])
    assert _seconds(costs, Hiding(frozenset(), 1.0, is_doubled=False))[1][("fsdp",)] == pytest.approx(4 * 1.5)


@pytest.mark.parametrize(("hidden", "exposed"), [("all-gather", 4 * 3.0), ("all-reduce", 4 * (3.0 - 1.0))])
def test_a_gradient_that_becomes_an_all_reduce_hides_where_all_reduces_do(hidden, exposed):
    """10 bytes take 0.5 + 1 s as a reduce-scatter and twice that as an all-reduce, beside one second of a matmul."""
    costs = _loop([Work("matmul", 1, 1, (), 1)], [Transfer("reduce-scatter", ("fsdp",), "w", 1, 2)], [10.0, 10.0])
    found = time_step(costs, RATES, LinkTimes(LINKS), Hiding(frozenset({hidden}), 1.0, is_doubled=True))
    assert float(found.exposed_seconds[0]) == pytest.approx(exposed)


@pytest.mark.parametrize(("most", "exposed"), [(1, 4 * 3.0), (2, 4 * 1.5)])
def test_over_small_groups_a_gradient_stays_a_reduce_scatter(most, exposed):
    """Of two devices: twice its time where only groups of one stay so."""
    costs = _loop([Work("matmul", 1, 1, (), 1)], [Transfer("reduce-scatter", ("fsdp",), "w", 1, 2)], [10.0, 10.0])
    hiding = Hiding(frozenset(), 1.0, is_doubled=True, scattered=most)
    assert float(time_step(costs, RATES, LinkTimes(LINKS), hiding).exposed_seconds[0]) == pytest.approx(exposed)


def test_gradients_are_scattered_in_blocks_of_a_slice_and_not_over_all_of_it():
    """By compiled programs: all-reduces over all of v5e-16, reduce-scatters over a quarter of v5e-64."""
    whole = ("sharding=fsdp", "mesh.fsdp=16", "target=v5e-16", "global_batch_size=16")
    assert plan_hiding(plan_of(*SMALL, *whole)).scattered == 15
    block = ("sharding=hsdp", "mesh.replica=4", "mesh.fsdp=16", "target=v5e-64", "global_batch_size=64")
    assert plan_hiding(plan_of(*SMALL, *block)).scattered == 16


@pytest.mark.parametrize(("region", "exposed"), [(0, 3.0), (1, 0.0)])
def test_a_gradient_that_is_summed_after_the_loops_is_waited_for(region, exposed):
    """10 bytes take 2 (0.5 + 1) s: beside 100 s of a matmul of the same region, or once after all of them."""
    works = [Work("matmul", region, 1, (), 1)]
    costs = _loop(works, [Transfer("all-reduce", ("fsdp",), "w", region, 2)], [1000.0, 10.0])
    assert _seconds(costs, Hiding(ALL, 1.0, is_doubled=False))[1][("fsdp",)] == pytest.approx(exposed)


def test_a_sum_that_follows_another_of_a_trip_is_waited_for_in_part():
    """Over ("fsdp",) 10 bytes take 3 s, over ("tensor",) 2: a quarter of these, though the matmul takes 100 s."""
    transfers = [Transfer("reduce-scatter", ("fsdp",), "w", 1, 2), Transfer("all-reduce", ("tensor",), "w", 1, 2)]
    costs, hiding = _loop([Work("matmul", 1, 1, (), 1)], transfers, [1000.0, 10.0]), Hiding(ALL, 1.0, is_doubled=False)
    assert _seconds(costs, hiding)[1][("tensor",)] == pytest.approx(0.0)
    found = _seconds(costs, replace(hiding, exposed_second_sums=0.25))[1]
    assert (found["fsdp",], found["tensor",]) == (pytest.approx(0.0), pytest.approx(4 * 0.25 * 2.0))


def test_of_activations_the_share_beside_matmuls_is_waited_for():
    costs = _loop([Work("matmul", 1, 1, (), 1)], [Transfer("all-reduce", ("tensor",), None, 1, 2)], [1000.0, 10.0])
    assert _seconds(costs, Hiding(ALL, 0.25, is_doubled=False))[1][("tensor",)] == pytest.approx(4 * 2.0 * 0.25)


@pytest.mark.parametrize(
    ("region", "num_bytes", "exposed"),
    [
        (1, {"copy-to-host": 10.0}, 0.0),  # 2 s, beside 2 s of a matmul and 1 s of what it contains
        (1, {"copy-to-host": 20.0}, 4 * 1.0),
        (1, {"copy-to-device": 20.0}, 4 * 2.0),
        (1, {"copy-to-device": 20.0, "copy-to-host": 20.0}, 4 * 2.0),  # both ways at once
        (2, {"copy-to-host": 10.0}, 4 * 1.0),
        (0, {"copy-to-host": 10.0}, 2.0),  # nothing runs between the loops
    ],
)
def test_copies_to_the_host_are_waited_for_where_they_outlast_their_loop(region, num_bytes, exposed):
    """20 FLOPs of a matmul in a loop of 4 trips, 10 in a branch that each of them takes."""
    work = [Work("matmul", 1, 1, (), 1), Work("matmul", 2, 2, (), 2)]
    costs = _loop(work, [], [20.0, 10.0, 1.0, *num_bytes.values()])
    copied = tuple(CopiedArray(kind, region, 4 + place) for place, kind in enumerate(num_bytes))
    costs = replace(costs, shape=replace(costs.shape, regions=((), ((0,),), ((0,), (3,))), copied=copied))
    time = time_step(costs, RATES, LinkTimes(LINKS), Hiding(ALL, 1.0, is_doubled=False))
    assert time.exposed["host",] == pytest.approx(exposed)
    assert time.seconds == pytest.approx(12.0 + exposed)


def test_a_trip_waits_until_what_it_makes_anew_has_left_for_the_host():
    """Two matmuls of 1 and 2 s in a trip, whose results take 0.4 and 2 s to the host: the second is in line."""
    hiding = Hiding(ALL, 1.0, is_doubled=False, as_ready=True)
    work = [Work("matmul", 1, 1, (), 1), Work("matmul", 1, 2, (), 2)]
    costs = _loop(work, [], [10.0, 20.0, 1.0, 2.0, 10.0])
    for made, exposed in (((0, 1), 0.4 + 1.0), ((1, 1), 1.4), ((None, None), 0.0), ((None, 0), 2.0)):
        copied = tuple(CopiedArray("copy-to-host", 1, 4 + place, of) for place, of in enumerate(made))
        regions = ((), ((0,),), ((0,), (3,)))
        here = replace(costs, shape=replace(costs.shape, regions=regions, copied=copied))
        time = time_step(here, RATES, LinkTimes(LINKS), hiding)
        assert time.exposed["host",] == pytest.approx(4 * exposed)


def test_offloaded_activations_cross_the_hosts_link_out_and_in_once():
    plan = plan_of(*SMALL, "target=v6e-8", "sharding=fsdp", "remat=offload", "remat.names=[layer_input,mlp_up]")
    step = price_regions(read_step(plan), plan.target.compiler)
    shape, numbers = read_costs(step, frozenset(), plan.ops)
    totals = {"copy-to-device": 0.0, "copy-to-host": 0.0}
    for copied in Costs(shape, numbers[:, None]).copied_bytes().values():
        for kind, num_bytes in copied.items():
            totals[kind] += num_bytes.item()
    on_host = estimate_step(plan).memory.host_bytes
    assert on_host > 0
    assert totals == {"copy-to-device": on_host, "copy-to-host": on_host}


def test_exchanges_of_tokens_are_waited_for_as_far_as_their_plan_says():
    transfer = Transfer("all-reduce", ("tensor",), None, 1, 2, "routed")
    costs = _loop([Work("matmul", 1, 1, (), 1)], [transfer], [1000.0, 10.0])
    hiding = Hiding(ALL, 0.25, is_doubled=False, of_operations={"routed": Exposed(0.5)})
    assert _seconds(costs, hiding)[1][("tensor",)] == pytest.approx(4 * 2.0 * 0.5)


@pytest.mark.parametrize(
    ("exchange", "attention_flops", "is_beside", "waited"),
    [
        ("ring", 1000.0, True, 0.35 * 2.0),  # the blocks of attention take longer: a share is waited for
        ("ring", 0.5, True, 1.9),  # what they do not hide
        ("ring", 1000.0, False, 2.0),  # the compiler overlaps no permute
        ("all_gather", 1000.0, True, 2.0),  # nothing runs beside it
    ],
)
def test_a_rings_permutes_hide_behind_attention_alone(exchange, attention_flops, is_beside, waited):
    """A large matmul is in the same loop; it needs what attention makes."""
    works = [Work("matmul", 1, 1, (), 1), Work("attention", 1, 2, (), rated_by=AttentionCall())]
    transfer = Transfer("all-reduce", ("tensor",), None, 1, 3, exchange)
    costs = _loop(works, [transfer], [1000.0, attention_flops, 10.0])
    exposed = Exposed(0.35, is_beside_attention=True) if is_beside else Exposed(1.0)
    hiding = Hiding(ALL, 0.25, is_doubled=False, of_operations={"ring": exposed, "all_gather": Exposed(1.0)})
    assert _seconds(costs, hiding)[1][("tensor",)] == pytest.approx(4 * waited)


PLANS = [
    ("target=v5p-16", "sharding=fsdp", "remat=full"),
    ("target=v5p-16", "sharding=fsdp_tensor", "mesh.tensor=2", "remat=save_dots", "num_microbatches=2"),
    ("target=v6e-8", "sharding=hsdp", "remat=offload"),
]


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize("overrides", PLANS, ids=" ".join)
def test_the_costs_of_a_program_are_those_of_its_estimate(overrides):
    plan = plan_of(*SMALL, *overrides)
    estimate, step = estimate_step(plan), price_regions(read_step(plan), plan.target.compiler)
    weights = frozenset(array.array.path for array in plan.sharding.parameters)
    shape, numbers = read_costs(step, weights, plan.ops)
    twice = Costs(shape, np.stack([numbers, 2 * numbers], axis=1))
    assert twice.peak_bytes()[0] == estimate.memory.peak_bytes
    assert twice.peak_bytes()[1] == 2 * estimate.memory.peak_bytes
    assert twice.host_bytes()[0] == estimate.memory.host_bytes
    regions = twice.regions()
    of_works = [(one, region.executions[0, 0]) for region in regions for one in region.works]
    flops = sum(times * one.flops[0] for one, times in of_works if one.flops is not None)
    assert flops == sum(part.flops or 0 for part in estimate.roofline)
    moved = sum(times * one.num_bytes[0] for one, times in of_works)
    assert moved == sum(part.hbm_bytes or 0 for part in estimate.roofline)
    sent = sum((num_bytes * region.executions)[0, 0] for region in regions for _, num_bytes in region.transfers)
    assert sent == sum(one.bytes for one in estimate.communication)


def _by_hand(options):
    """A declaration of these options without a preset."""
    typed = ", ".join(f"{name}: {json.dumps(value)}" for name, value in options.items())
    return "overlap.flag_presets=[]", f"compiler_options={{{typed}}}"


@pytest.mark.ci
@pytest.mark.parametrize("chip", ["v5p-16", "v6e-8", "tpu7x-8", "v5e-8", "v4-16", "h100-8"])
def test_options_by_hand_count_as_the_preset_that_has_them(chip):
    declared = (*SMALL, f"target={chip}", "sharding=fsdp")
    presets = {name: one.flags for name, one in target_of(chip).flag_presets.items() if one.flags is not None}
    assert len(presets) > 2
    for name, flags in presets.items():
        preset = plan_of(*declared, f"overlap.flag_presets=[{name}]")
        by_hand = plan_of(*declared, *_by_hand(flags))
        assert plan_hiding(by_hand) == plan_hiding(preset), name
        if preset.target.flag_presets[name].hides:
            assert estimate_step(by_hand).figures == estimate_step(preset).figures, name


def test_slices_wait_for_a_share_of_the_step_whatever_crosses_them():
    """By hand: 4 times 100 s of a matmul and 2 s of a sum that is waited for, 12 % of which are 48.96 s."""
    costs = _loop([Work("matmul", 1, 1, (), 1)], [Transfer("all-reduce", ("tensor",), None, 1, 2)], [1000.0, 10.0])
    hiding, rates = Hiding(ALL, 1.0, is_doubled=False), replace(RATES, slice_wait=0.12)
    found = time_step(costs, rates, LinkTimes(LINKS), hiding).of(0)
    assert found.exposed == pytest.approx({("tensor",): 8.0, ("slices",): 48.96})
    assert found.seconds == pytest.approx(456.96)


def test_a_plan_over_slices_waits_for_them():
    declared = (*SMALL, "target=v5e-4", "sharding=hsdp", "global_batch_size=16", "precision=bfloat16")
    found = estimate_step(plan_of(*declared, "target.num_slices=2")).figures
    waited = found.exposed_by_axes.get("slices", 0.0)
    assert found.step_seconds
    assert waited == pytest.approx(0.014 * (found.step_seconds - waited))
    assert "slices" not in estimate_step(plan_of(*declared)).figures.exposed_by_axes


def test_an_option_that_is_off_by_hand_takes_the_presets_effect_away():
    declared = (*SMALL, "target=v5p-16", "sharding=fsdp", "overlap.flag_presets=[sparse_core]")
    by_hand = ("true", "false", "'true'", "'False'", "0", "AUTO")
    plans = (plan_of(*declared, f"compiler_options={{{OFFLOAD}_reduce_scatter: {value}}}") for value in by_hand)
    hidden = [plan_hiding(plan).weights for plan in plans]
    rest = ALL - {"reduce-scatter"}
    assert hidden == [ALL, rest, ALL, rest, rest, rest]


@pytest.mark.parametrize(
    ("target", "options", "hidden"),
    [
        ("v6e-8", {f"{FUSION}_fuse_all_gather": True, FUSION: True}, set()),  # what is not split stays
        ("v6e-8", {f"{FUSION}_fuse_all_gather": True, FUSION: True, SPLIT: True}, {"all-gather"}),
        ("v6e-8", {f"{OFFLOAD}_2d_all_gather": True}, set()),
        ("v6e-8", {f"{OFFLOAD}_2d_all_gather": True, SPLIT: True}, {"all-gather"}),
        ("v5e-8", {}, {"all-gather"}),
        ("v5e-8", {FUSION: False}, set()),
        ("v5e-8", {SPLIT: False}, set()),
        ("v4-16", {SPLIT: True}, {"all-gather"}),
        ("h100-8", {"xla_gpu_disable_async_collectives": "ALLREDUCE,ALLTOALL"}, {"all-gather", "reduce-scatter"}),
        ("h100-8", {"xla_gpu_enable_latency_hiding_scheduler": False}, set()),
        ("h100-8", {PIPELINED: True}, {"all-gather", "reduce-scatter"}),
        ("h100-8", {PIPELINED: 1}, {"all-gather", "reduce-scatter"}),
        ("h100-8", {PIPELINED: False}, ALL),
        ("h100-8", {PIPELINED: True, "xla_gpu_enable_while_loop_double_buffering": True}, ALL),
    ],
)
def test_what_an_option_hides_depends_on_the_chip_and_on_the_others(target, options, hidden):
    assert hidden_by(options, target_of(target).option_effects) == hidden
