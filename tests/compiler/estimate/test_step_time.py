"""The time of a step without a compiler, against sums by hand; costs of many declarations against one at a time."""

import numpy as np
import pytest

from conftest import SMALL, plan_of
from meshloom.compiler.core.traffic import CollectiveKind
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.estimate.estimated_step import read_step
from meshloom.compiler.estimate.program_costs import (
    Costs,
    ProgramShape,
    Transfer,
    Work,
    read_costs,
)
from meshloom.compiler.estimate.regions import price_regions
from meshloom.compiler.estimate.step_time import Hiding, LinkTimes, Rates, time_step
from meshloom.compiler.parallel.operation import Exposed
from support.links import links_of

RATES = Rates(
    matmul_flops_per_second=10.0,
    attention_flops_per_second=5.0,
    hbm_bytes_per_second=100.0,
    stream_bytes_per_second=200.0,
    merged_bytes_per_second=100.0,
)
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
    work = [Work("matmul", 1, 1, (2,)), Work("other", 1, 1, (3,))]
    compute, _ = _seconds(_loop(work, [], [20.0, 1000.0, 50.0]), Hiding(ALL, 1.0, is_doubled=False))
    assert compute == pytest.approx(4 * (5.0 + 0.5))


@pytest.mark.parametrize(("compute_flops", "exposed"), [(100.0, 0.0), (5.0, 4 * (1.5 - 0.5))])
def test_gathers_hide_behind_the_arithmetic_of_their_own_loop(compute_flops, exposed):
    """10 bytes take 0.5 + 1 s, beside 10 s or half a second of a matmul."""
    costs = _loop([Work("matmul", 1, 1, ())], [Transfer("all-gather", ("fsdp",), True, 1, 2)], [compute_flops, 10.0])
    assert _seconds(costs, Hiding(ALL, 1.0, is_doubled=False))[1][("fsdp",)] == pytest.approx(exposed)


def test_what_the_compiler_does_not_overlap_is_waited_for():
    costs = _loop([Work("matmul", 1, 1, ())], [Transfer("all-gather", ("fsdp",), True, 1, 2)], [1000.0, 10.0])
    assert _seconds(costs, Hiding(frozenset(), 1.0, is_doubled=False))[1][("fsdp",)] == pytest.approx(4 * 1.5)


def test_of_activations_the_share_beside_matmuls_is_waited_for():
    costs = _loop([Work("matmul", 1, 1, ())], [Transfer("all-reduce", ("tensor",), False, 1, 2)], [1000.0, 10.0])
    assert _seconds(costs, Hiding(ALL, 0.25, is_doubled=False))[1][("tensor",)] == pytest.approx(4 * 2.0 * 0.25)


def test_exchanges_of_tokens_are_waited_for_as_far_as_their_plan_says():
    transfer = Transfer("all-reduce", ("tensor",), False, 1, 2, "routed")
    costs = _loop([Work("matmul", 1, 1, ())], [transfer], [1000.0, 10.0])
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
    works = [Work("matmul", 1, 1, ()), Work("attention", 1, 2, ())]
    transfer = Transfer("all-reduce", ("tensor",), False, 1, 3, exchange)
    costs = _loop(works, [transfer], [1000.0, attention_flops, 10.0])
    exposed = Exposed(0.35, is_beside_attention=True) if is_beside else Exposed(1.0)
    hiding = Hiding(ALL, 0.25, is_doubled=False, of_operations={"ring": exposed, "all_gather": Exposed(1.0)})
    assert _seconds(costs, hiding)[1][("tensor",)] == pytest.approx(4 * waited)


PLANS = [
    ("target=v5p-16", "sharding=fsdp", "remat=full"),
    ("target=v5p-16", "sharding=fsdp_tensor", "mesh.tensor=2", "remat=save_dots", "num_microbatches=2"),
    ("target=v6e-8", "sharding=hsdp", "remat=offload"),
]


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
    flops = sum(each[0, 0] for region in regions for each in region.flops.values())
    assert flops == sum(part.flops or 0 for part in estimate.roofline)
    moved = sum(each[0, 0] for region in regions for each in region.num_bytes.values())
    assert moved == sum(part.hbm_bytes or 0 for part in estimate.roofline)
    sent = sum((one[1] * one[2])[0, 0] for region in regions for one in region.transfers)
    assert sent == sum(one.bytes for one in estimate.communication)
