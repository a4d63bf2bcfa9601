"""Matmuls of few bits that a compiler makes in a wider type, in texts of TPUs and GPUs."""

import pytest

from meshloom.compiler.analysis.compiled_step import inspect_text
from meshloom.compiler.analysis.program_devices import ProgramDevices
from meshloom.compiler.target.placement import plan_own_order
from support.programs import target_of
from support.schedules import compute, module

N = 2048
SIDES = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def _dot(result: str, *operands: str) -> str:
    return f"  ROOT %d = {result}[{N},{N}]{{1,0}} dot({', '.join(operands)}), {SIDES}"


def _arguments(first: str, second: str) -> list[str]:
    return [f"  %p = {first}[{N},{N}]{{1,0}} parameter(1)", f"  %q = {second}[{N},{N}]{{1,0}} parameter(2)"]


def _converted(name: str, of: str) -> str:
    return f"  %{name} = bf16[{N},{N}]{{1,0}} convert(%{of})"


def _scaled(name: str, of: str) -> list[str]:
    scale = f"  %s{name} = bf16[{N},{N}]{{1,0}} broadcast(%c), dimensions={{}}"
    return ["  %c = bf16[] constant(2)", scale, f"  %{name} = bf16[{N},{N}]{{1,0}} multiply(%{of}, %s{name})"]


def findings(lines: list[str], target: str, before: str = "") -> list[str]:
    cycles = [compute("a", 5)] if target_of(target).platform == "tpu" else []  # by which a text of a TPU is known
    text = module(lines[0], *cycles, *lines[1:], before=before)
    text = text.replace("num_partitions=4", f"num_partitions={target_of(target).num_devices}")
    devices = ProgramDevices(plan_own_order(target_of(target)), is_assumed=True)
    return [each.what for each in inspect_text(text, devices).findings if each.rule == "silent-upcast"]


BOTH = [*_arguments("f8e4m3fn", "f8e4m3fn"), _converted("xc", "p"), _converted("w", "q")]
WEIGHT = [*_arguments("bf16", "s8"), _converted("w", "q")]
INT8 = [*_arguments("s8", "s8")]


@pytest.mark.parametrize("target", ["v6e-4", "h100-4", "tpu7x-8"])
def test_two_converted_operands_are_found_whatever_the_chip(target):
    (what,) = findings([*BOTH, _dot("bf16", "%xc", "%w")], target)
    assert "1 matmul of float8_e4m3fn by float8_e4m3fn" in what


def test_scales_between_hide_nothing():
    lines = [*BOTH, *_scaled("yc", "xc"), _dot("bf16", "%yc", "%w")]
    assert findings(lines, "h100-4")


def test_operands_that_a_fusion_converts_are_found_inside_it():
    inner = (
        f"%fused (a: f8e5m2[{N},{N}], b: f8e4m3fn[{N},{N}]) -> bf16[{N},{N}] {{\n"
        f"  %a = f8e5m2[{N},{N}]{{1,0}} parameter(0)\n  %b = f8e4m3fn[{N},{N}]{{1,0}} parameter(1)\n"
        f"{_converted('xc', 'a')}\n{_converted('w', 'b')}\n{_dot('bf16', '%xc', '%w')}\n}}\n"
    )
    fusion = f"  ROOT %f = bf16[{N},{N}]{{1,0}} fusion(%p, %q), kind=kOutput, calls=%fused"
    assert findings([*_arguments("f8e5m2", "f8e4m3fn"), fusion], "tpu7x-8", before=inner)


def test_a_weight_alone_in_few_bits_is_meant():
    assert not findings([*WEIGHT, _dot("bf16", "%p", "%w")], "v6e-4")


@pytest.mark.parametrize(("target", "is_found"), [("v6e-4", False), ("v5e-4", False), ("tpu7x-8", True)])
def test_few_bits_in_the_matmul_count_where_the_compiler_makes_them_real(target, is_found):
    assert bool(findings([*INT8, _dot("s32", "%p", "%q")], target)) == is_found
