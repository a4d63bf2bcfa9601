"""What calibrates a chip: the factors of a world in which everything takes longer are found again."""

import math
import random
from typing import Any

import pytest

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.profile.compare import ProfileReport, calibrate, compare, fit_steps
from meshloom.compiler.profile.prediction import Prediction, predict
from meshloom.compiler.profile.trace import read_trace
from meshloom.compiler.spec.calibration_spec import Calibration
from support.profiles import MODULE, TEXT, TPU_STEP, plan_on, prediction
from support.traces import Op, tpu_trace

# Besides, an all-reduce of some bytes, of which all is latency.
SMALL = "  %all-reduce.1 = bf16[8,8]{1,0} all-reduce(%w), replica_groups={{0,1,2,3}}, to_apply=%sum\n"
WITH_SMALL = TEXT.replace("  ROOT %reduce-scatter.1", f"{SMALL}  ROOT %reduce-scatter.1")
# matmul, other, transfer and latency of links, measured over predicted.
WORLDS = {"slower": (1.25, 2.0, 1.5, 3.0), "faster": (0.5, 0.8, 0.9, 0.25), "as predicted": (1.0, 1.0, 1.0, 1.0)}


def _overrides(matmul: float, other: float, transfer: float, latency: float, chip: str = "v5e") -> tuple[str, ...]:
    links = f"calibration.links={{ICI:{{transfer:{transfer},latency:{latency}}}}}"
    return (f"calibration.chip={chip}", f"calibration.matmul={matmul}", f"calibration.other={other}", links,
            "calibration.source=a world")  # fmt: skip


def _predicted(*overrides: str) -> Prediction:
    return predict(WITH_SMALL, plan_on("v5e-4", *overrides), ())


def _step_of(world: Prediction, noise: random.Random | None = None) -> tuple[float, list[Op]]:
    """What a chip does in this world, one operation after the other; the gather runs beside what follows it."""
    seconds = {each.name: each.seconds or 0.0 for each in world.compute}
    alone = {each.report.name: each.report.alone_seconds or 0.0 for each in world.collectives}
    ops: list[Op] = []
    now = 0.0

    def run(name: str, took: float) -> None:
        nonlocal now
        begin, now = now, now + took * 1e3 * (1 + 0.02 * noise.uniform(-1, 1) if noise else 1)
        ops.append((name, begin, now))

    run("mm.1", seconds["mm.1"])
    gathered = now + alone["all-gather-start.1"] * 1e3
    run("all-gather-start.1", 0.0)
    run("mm.2", seconds["mm.2"])
    run("all-gather-done.1", max(0.0, gathered - now) / 1e3)
    run("work.1", seconds["work.1"])
    for _ in range(3):
        run("mm.3", seconds["mm.3"] / 3)
    run("all-reduce.1", alone["all-reduce.1"])
    run("reduce-scatter.1", alone["reduce-scatter.1"])
    return now, ops


def _measured(world: Prediction, against: Prediction, noise: random.Random | None = None) -> ProfileReport:
    steps = [_step_of(world, noise) for _ in range(3)]
    every = max(end for end, _ in steps) + 1.0
    trace = tpu_trace([[ops for _, ops in steps]], module=MODULE, steps=(1, 2, 3), every=every)
    return compare([read_trace(trace, MODULE)], against)


def _factors(found: Calibration) -> tuple[float, float, float, float]:
    link = found.links["ICI"]
    return found.matmul, found.other, link.transfer, link.latency


def _by_kind(report: ProfileReport) -> dict[str, tuple[float, float]]:
    return {row.kind: (row.measured_seconds, row.predicted_seconds or math.nan) for row in report.kinds}


@pytest.mark.parametrize("factors", WORLDS.values(), ids=list(WORLDS))
def test_predictions_by_the_calibration_of_a_run_are_what_it_measured(factors):
    world, plain = _predicted(*_overrides(*factors)), _predicted()
    found = calibrate([_measured(world, plain)], "a run")
    assert _factors(found) == pytest.approx(factors, rel=1e-3)
    calibrated = _predicted(*_overrides(*_factors(found)))
    report = _measured(world, calibrated)
    for kind, (measured, predicted) in _by_kind(report).items():
        assert predicted == pytest.approx(measured, rel=1e-3), kind
    again = calibrate([report], "the same run")
    assert _factors(again) == pytest.approx(factors, rel=2e-3), "the factors of both calibrations are multiplied"


def test_a_fit_of_the_steps_says_what_it_does_not_reach():
    """A part of the step that no factor changes keeps it from what was measured."""
    report = _measured(_predicted(), _predicted())
    took, start = report.step.measured_seconds, calibrate([report], "a run")

    found, note = fit_steps(start, [report], lambda found: [0.5 * took * found.matmul / start.matmul])
    assert (found.matmul, note) == (pytest.approx(2 * start.matmul, rel=0.01), "")
    found, note = fit_steps(start, [report], lambda _: [2 * took])
    assert found == start, "what was tried and did not help is not kept"
    assert "after 4 fits the 1 step took 0.5 times as long as predicted" in note
    assert "the step is not predicted" in fit_steps(start, [report], lambda _: None)[1]


def test_a_gather_that_nothing_waited_for_does_not_calibrate_its_link():
    """Its done comes long after its transfer, which the trace does not show."""
    factors = (8.0, 1.0, 1.2, 2.0)
    report = _measured(_predicted(*_overrides(*factors)), _predicted())
    assert [row.name for row in report.operations if not row.is_transfer and row.link] == ["all-gather-start.1"]
    assert _factors(calibrate([report], "a run")) == pytest.approx(factors, rel=1e-3)


def test_noise_of_a_hundredth_moves_factors_by_no_more_than_it():
    factors = WORLDS["slower"]
    report = _measured(_predicted(*_overrides(*factors)), _predicted(), random.Random(0))
    assert _factors(calibrate([report], "a run")) == pytest.approx(factors, rel=0.02)


def test_the_estimate_without_a_compiler_follows_too():
    plain, slower = plan_on("v5e-4"), plan_on("v5e-4", *_overrides(2.0, 4.0, 3.0, 1.0))
    before, after = plain.target, slower.target
    assert before.chip is not None
    assert after.chip is not None
    assert after.chip.efficiency.matmul == before.chip.efficiency.matmul / 2
    assert after.chip.efficiency.memory == before.chip.efficiency.memory / 4
    bandwidths = [plan.mesh.placement.link_of(["fsdp"]).bytes_per_second or 0 for plan in (plain, slower)]
    assert bandwidths[0] == pytest.approx(3 * bandwidths[1])


def test_collectives_of_one_size_give_both_parts_one_factor():
    """Nothing tells latency from bandwidth where all collectives are as large."""
    world = _measured(_predicted(*_overrides(1.0, 1.0, 1.5, 3.0)), _predicted())
    large = [row for row in world.operations if row.name != "all-reduce.1"]
    found = calibrate([world.model_copy(update={"operations": tuple(large)})], "a run").links["ICI"]
    assert found.transfer == found.latency == pytest.approx(1.5, rel=0.02)  # and some of the start


@pytest.mark.parametrize(
    ("reports", "told"),
    [(("cpu-4",), "a run was on no chip that is known"), (("v5e-4", "v5p-8"), "on different chips: v5e, v5p")],
)
def test_runs_that_say_nothing_of_one_chip_are_refused(reports, told):
    trace = read_trace(tpu_trace([[TPU_STEP]], module=MODULE, steps=(1,), every=10.0), MODULE)
    with pytest.raises(ConfigError, match=told):
        calibrate([compare([trace], prediction(target)) for target in reports], "runs")


@pytest.mark.parametrize(
    ("target", "told"),
    [("v5p-8", "is of v5e, and target v5p-8 has chips of v5p"), ("cpu-4", "target cpu-4 has no chip that is known")],
)
def test_a_calibration_of_another_chip_is_a_mistake(target: str, told: str):
    more: Any = _overrides(1.0, 1.0, 1.0, 1.0)
    with pytest.raises(ConfigError, match=told):
        plan_on(target, *more)
