"""Bounds and MFU of a step whose sites multiply in few bits: by the type of each."""

import pytest

from conftest import plan_of
from meshloom.compiler.core.known import known
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.estimate.roofline import least_step_seconds, roofline_seconds
from meshloom.compiler.figures import StepWork
from meshloom.compiler.report.explain import plan_as_json

TOKENS, LAYERS, E, H, K, D, M = 16 * 512, 2, 1024, 8, 4, 128, 4096
KEYS = ("target=h100-8", "sharding=fsdp", "remat=none", f"model.num_layers={LAYERS}", f"model.embed_dim={E}",
        f"model.num_heads={H}", f"model.num_kv_heads={K}", f"model.head_dim={D}", f"model.mlp_dim={M}",
        "global_batch_size=16", "sequence_length=512")  # fmt: skip
MATRICES = LAYERS * (2 * E * H * D + 2 * E * K * D + 3 * E * M)


@pytest.fixture(scope="module")
def plans():
    return {name: plan_of(*KEYS, f"precision={name}") for name in ("bfloat16", "fp8")}


def test_the_bound_is_lower_by_what_the_peaks_of_both_types_say(plans):
    bfloat16, float8 = (plans["fp8"].target.peak_of(dtype) for dtype in ("bfloat16", "float8"))
    work = {name: plan.work for name, plan in plans.items()}
    at_peak = {name: each.seconds_at_peak(each.model_flops) for name, each in work.items()}
    flops = 6 * MATRICES * TOKENS  # forward, and the gradients of x and of the weight
    assert at_peak["bfloat16"] - at_peak["fp8"] == pytest.approx(flops / 8 * (1 / bfloat16 - 1 / float8), rel=1e-6)


def test_no_bound_is_above_a_step_and_no_mfu_above_one(plans):
    for plan in plans.values():
        found = estimate_step(plan)
        least, roofline = known(least_step_seconds(plan)), known(roofline_seconds(found.roofline))
        step, mfu = known(found.figures.step_seconds), known(found.figures.mfu)
        assert least
        assert roofline
        assert step
        assert mfu
        assert least <= roofline <= step
        assert mfu < 1


def test_rooflines_take_the_type_of_each_operand(plans):
    layers = [next(part for part in estimate_step(plan).roofline if "layers" in part.name) for plan in plans.values()]
    bfloat16, float8 = (known(part.flops_seconds) for part in layers)
    assert bfloat16
    assert layers[0].flops == layers[1].flops
    assert float8 == pytest.approx(bfloat16 / 2, rel=0.01)


def test_a_plan_file_has_what_measured_steps_are_rated_by(plans):
    for plan in plans.values():
        assert StepWork.of_plan_file(plan_as_json(plan)) == plan.work


def test_emulated_types_save_nothing():
    plan = plan_of(*KEYS, "precision=fp8", "precision.emulate=true")
    assert plan.work.saved_seconds == 0
