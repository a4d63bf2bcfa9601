"""The range of a prediction: by published runs of its kind, those of other chips too, and none with a calibration."""

from typing import get_args

import pytest

from meshloom.compiler.core.format import human_range
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.target import accuracy
from meshloom.compiler.target.accuracy import (
    Accuracy,
    accuracy_of,
    best_published_mfu,
    kinds_in_types,
    program_kinds,
    range_figures,
)
from support.placements import cached_target_of
from support.profiles import plan_on

TABLE = {
    "best_mfu": {"v5e": 0.669},
    "kinds": {
        "dense": {
            "num_runs": {"v5e": 3, "h100": 7},
            "compiled": {"*": 1.2, "v5e": 1.25},
            "estimated": {"*": 1.3, "v5e": 1.3},
        },
        "several slices": {"num_runs": {"v5e": 1}, "compiled": {"*": 1.3}, "estimated": {"*": 1.4}},
        "experts on TPUs": {"num_runs": {"v5p": 2}, "compiled": {"*": 1.5}, "estimated": {"*": 1.35}},
    },
}


@pytest.fixture(autouse=True)
def table(monkeypatch):
    monkeypatch.setattr(accuracy, "_table", lambda: TABLE)


def test_a_range_is_a_factor_up_and_down():
    assert Accuracy(("dense",), "v5e", 1.25, 10, 3).range_of(2.0) == pytest.approx((1.6, 2.5))


def test_a_chip_without_runs_has_the_range_of_all_and_says_so():
    own, other = (accuracy_of(cached_target_of(name), ["dense"]) for name in ("v5e-4", "tpu7x-8"))
    assert own
    assert other
    assert (own.factor, other.factor) == pytest.approx((1.25, 1.2))
    assert str(own) == "dense: 9 of 10 such steps are expected inside, by 10 published runs, 3 on v5e"
    assert str(other) == "dense: 9 of 10 such steps are expected inside, by 10 published runs, none on tpu7x"


def test_an_estimate_has_a_range_of_its_own():
    estimated = accuracy_of(cached_target_of("v5p-8"), ["dense"], "estimated")
    assert estimated
    assert estimated.factor == pytest.approx(1.3)


def test_the_errors_of_several_kinds_are_combined():
    """By hand: log 1.5 is 0.4055, log 1.3 is 0.2624, and the root of the sum of their squares 0.4829; estimated 0.3001
    and 0.3365, 0.4509."""
    kinds = ("experts on TPUs", "several slices")
    compiled, estimated = (accuracy_of(cached_target_of("v5p-8"), kinds, each) for each in ("compiled", "estimated"))
    assert compiled
    assert estimated
    assert (compiled.kinds, compiled.num_runs, compiled.num_on_chip) == (kinds, 3, 2)
    assert (compiled.factor, estimated.factor) == pytest.approx((1.6208, 1.5697), rel=1e-4)
    assert str(compiled) == (
        "experts on TPUs and several slices, whose errors are combined: 9 of 10 such steps are expected inside, by 3 "
        "published runs, 2 on v5p"
    )


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "f8e5m2", "int8", "s8"])
def test_matmuls_in_eight_bits_make_a_kind(dtype):
    assert kinds_in_types(("dense",), ["bfloat16", dtype]) == ("dense", "low precision")
    assert kinds_in_types(("pipelines",), [dtype]) == ("pipelines", "low precision")
    assert kinds_in_types(("dense",), ["bfloat16", "float32", "int32"]) == ("dense",)


@pytest.mark.parametrize(
    ("target", "mesh", "length", "has_experts", "kinds"),
    [
        ("v5p-8", {"fsdp": 4}, 8192, False, ("dense",)),
        ("v5p-8", {"replica": 2, "fsdp": 2}, 8192, False, ("dense",)),
        ("v5p-8", {"data": 4, "fsdp": 1}, 8192, False, ("data parallel",)),
        ("v5p-8", {"fsdp": 4}, 32768, False, ("long context",)),
        ("v5p-8", {"fsdp": 2, "context": 2}, 8192, False, ("long context",)),
        ("v5p-8", {"fsdp": 4}, 8192, True, ("experts on TPUs",)),
        ("h100-8", {"expert": 4, "stage": 2}, 8192, True, ("experts on GPUs", "pipelines")),
    ],
)
def test_the_kind_follows_from_the_program(target, mesh, length, has_experts, kinds):
    assert program_kinds(cached_target_of(target), mesh, length, has_experts=has_experts) == kinds


def test_a_program_over_two_slices_is_a_kind_even_without_a_declaration():
    target = plan_on("v5e-4", "target.num_slices=2", "sharding=hsdp", "global_batch_size=8").target
    assert program_kinds(target, {}, 0, has_experts=False) == ("several slices",)


def test_each_kind_has_its_range(monkeypatch):
    monkeypatch.undo()
    target = cached_target_of("b200-8")
    found = {kind: accuracy_of(target, [kind], "estimated") for kind in get_args(accuracy.ProgramKind)}
    narrow, least = found.pop("low precision"), found["dense"]
    assert narrow
    assert least
    assert narrow.num_runs
    assert all(each and each.num_runs and each.factor >= least.factor for each in found.values())


def test_a_dense_step_in_few_bits_is_less_certain_than_in_bfloat16(monkeypatch):
    monkeypatch.undo()
    target, types = cached_target_of("h100-8"), ["float8_e4m3fn"]
    dense, narrow = accuracy_of(target, ["dense"]), accuracy_of(target, kinds_in_types(["dense"], types))
    assert dense
    assert narrow
    assert dense.factor < narrow.factor < 2.0
    assert narrow.num_runs > dense.num_runs


def test_the_best_published_mfu_is_of_the_own_chip():
    assert best_published_mfu(cached_target_of("v5e-4")) == 0.669
    assert best_published_mfu(cached_target_of("v5p-8")) is best_published_mfu(cached_target_of("cpu-4")) is None


def test_what_is_not_a_chip_has_no_range():
    assert accuracy_of(cached_target_of("cpu-4"), ["dense"]) is None


def test_a_calibrated_prediction_is_not_compared_with_other_peoples_runs():
    calibrated = plan_on("v5e-4", "calibration.chip=v5e", "calibration.matmul=1.5").target
    assert accuracy_of(calibrated, ["dense"]) is None
    assert range_figures(calibrated, ["dense"], 2.0)["range_factor"] == Unknown(accuracy.CALIBRATED)


@pytest.mark.parametrize(
    ("ends", "text"),
    [((1.402, 1.71), "1.40 to 1.71 s"), ((0.95, 1.05), "950 ms to 1.05 s"), ((0.0, 2.0), "0 to 2.00 s")],
)
def test_a_range_names_its_unit_once(ends, text):
    assert human_range(ends) == text
