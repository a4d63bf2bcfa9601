"""A chip gains from a type of few bits what the peak and the share of this type say, or nothing."""

import pytest

from conftest import plan_of
from meshloom.compiler.analysis.compiled_step import inspect_text
from meshloom.compiler.analysis.program_devices import ProgramDevices
from meshloom.compiler.analysis.schedule_analysis import chip_of
from meshloom.compiler.core.float_types import FEW_BITS
from meshloom.compiler.estimate.step_time import plan_rates
from meshloom.compiler.target.placement import plan_own_order
from support.programs import target_of
from support.schedules import module

N = 4096


@pytest.mark.parametrize("name", ["v5e-4", "v6e-4", "tpu7x-8", "h100-8", "b200-8", "a100-8"])
def test_only_types_that_the_compiler_makes_real_have_a_peak_above_16_bits(name):
    target = target_of(name)
    chip = chip_of(target)
    for dtype in FEW_BITS:
        times = 1 if dtype not in target.real_types else 4 if dtype == "float4" else 2
        for found in (target.peak_of(dtype), chip.peak_flops_per_second[dtype]):
            assert found == pytest.approx(times * chip.peak_flops_per_second["bfloat16"], rel=0.01)


def _price(dtype: str, cycles: int) -> float:
    """Returns the price of a matmul for which libtpu 0.0.42.1 says so many cycles on v6e."""
    result = "s32" if dtype == "s8" else "bf16"
    arguments = [f"  %{name} = {dtype}[{N},{N}]{{1,0}} parameter({at})" for at, name in ((1, "p"), (2, "q"))]
    dot = f"  ROOT %d = {result}[{N},{N}]{{1,0}} convolution(%p, %q), dim_labels=bf_io->bf, "
    said = f'backend_config={{"flag_configs":[],"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    text = module(*arguments, dot + said)
    devices = ProgramDevices(plan_own_order(target_of("v6e-4")), is_assumed=True)
    seconds = inspect_text(text, devices).analysis.step.compute_seconds
    assert isinstance(seconds, float)
    return seconds


def test_int8_on_v6e_gains_a_third_and_not_all_of_its_peak():
    assert _price("bf16", 298_000) / _price("s8", 227_000) == pytest.approx(1.31, rel=0.02)


def test_an_estimate_multiplies_each_type_at_its_own_rate():
    for name, dtype in (("v6e-4", "int8"), ("h100-8", "float8")):
        plan = plan_of(f"target={name}", "sharding=fsdp", "precision=bfloat16", "global_batch_size=8")
        rates = plan_rates(plan.target)
        assert rates is not None
        assert set(rates.of_type) == {dtype}
        assert 1.3 < rates.of_type[dtype] / rates.matmul_flops_per_second <= 2.01
