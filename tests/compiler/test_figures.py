"""The rates of a step are computed in one place, from its seconds and its work."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import meshloom.compiler
from conftest import plan_of
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.figures import StepWork

ROOT = Path(meshloom.compiler.__file__).resolve().parent.parent
WORK = StepWork(tokens_per_step=4096, model_flops=6 * 10**12, num_chips=2, peak_flops_per_second=4 * 10**12)


def test_rates_follow_from_the_seconds_of_a_step():
    """6 TFLOPs at 4 TFLOP/s take 1.5 s."""
    assert WORK.mfu(3.0) == pytest.approx(0.5)
    assert WORK.tokens_per_second_per_chip(4.0) == pytest.approx(512)


@pytest.mark.parametrize("name", ["model_flops", "peak_flops_per_second"])
def test_a_rate_is_unknown_for_the_reason_of_its_part(name):
    assert replace(WORK, **{name: Unknown("not told")}).mfu(3.0) == Unknown("not told")
    assert WORK.mfu(Unknown("no chip")) == WORK.tokens_per_second_per_chip(Unknown("no chip")) == Unknown("no chip")
    assert isinstance(WORK.mfu(0.0), Unknown)


def test_the_work_of_a_plan_is_of_all_its_devices():
    """8 chips of a v5e at 197 TFLOP/s in bfloat16."""
    plan = plan_of("target=v5e-8", "precision=bfloat16")
    assert plan.work.peak_flops_per_second == 8 * 197e12
    assert plan.work.model_flops == plan.model_flops_per_step
    assert plan.work.tokens_per_step == plan.spec.tokens_per_step


def test_no_other_file_divides_by_peaks_or_chips():
    """Only figures.py divides FLOPs by the peak of all devices, and tokens by chips."""
    found = {
        file.name
        for folder in ("compiler", "runtime")
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _is_rate(node)
    }
    assert found - {"figures.py"} == set()
    for text in ("flops / (seconds * peak * target.num_devices)", "spec.tokens_per_step / seconds / target.num_chips"):
        division = ast.parse(text, mode="eval").body
        assert isinstance(division, ast.BinOp)
        assert _is_rate(division), "the test could not fail"


def _is_rate(node: ast.BinOp) -> bool:
    above, below = ast.unparse(node.left), ast.unparse(node.right)
    return ("peak" in below and "num_devices" in below) or ("token" in above and "num_chips" in below)
