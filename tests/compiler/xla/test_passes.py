"""Operations of TPUs take what profiles of real chips have: passes over memory, matmuls, updates inside tiles."""

import importlib
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest

from meshloom.compiler.analysis.schedule_analysis import chip_of
from meshloom.compiler.xla.hlo import parse_module
from meshloom.compiler.xla.schedule.prices import price_instruction
from support.programs import target_of

BENCH = Path(__file__).parents[3] / "bench"
MOST = {  # the largest mean error of a kind
    "all-gather": 0.08,
    "reduce-scatter": 0.05,
    "all-reduce": 0.05,
    "all-to-all": 0.25,
    "matmul": 0.13,
    "matmul that sends": 0.08,
    "pass over memory": 0.13,
    "update inside tiles": 0.08,
}
SUM = """\
HloModule m, is_scheduled=true

%added (p: f32[16777216]) -> f32[16777216] {
  %p = f32[16777216]{0} parameter(0)
  ROOT %a = f32[16777216]{0} OPCODE(%p, %p)
}

ENTRY %main (x: f32[16777216]) -> f32[16777216] {
  %x = f32[16777216]{0} parameter(0)
  ROOT %f = f32[16777216]{0SPACE} fusion(%x), kind=kLoop, calls=%added, backend_config={"estimated_cycles":"3500000"}
}
"""


@pytest.fixture
def operations(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("tpu_operations")


@pytest.mark.parametrize("kind", MOST)
def test_operations_take_what_was_measured(operations, kind):
    errors = defaultdict(list)
    for each in operations.tpu_operations():
        errors[each.kind].append(each.price / each.measured - 1)
    assert mean(map(abs, errors[kind])) < MOST[kind]


@pytest.mark.parametrize(
    ("opcode", "space", "milliseconds"),
    [
        ("add", "", 2 * 2**26 / (0.85 * 2.765e12) * 1e3),  # read and written, at the measured share
        ("add", ":S(1)", 2.0),  # into vector memory: the compiler's own estimate
        ("gather", "", 2.0),  # data says what is read
    ],
    ids=["streamed", "vector memory", "irregular"],
)
def test_a_pass_takes_the_measured_share_of_the_bandwidth_and_not_the_compilers_estimate(opcode, space, milliseconds):
    module = parse_module(SUM.replace("OPCODE", opcode).replace("SPACE", space))
    entry = module.entry_computation
    price = price_instruction(entry.root, entry, module, chip_of(target_of("v5p-8")))
    assert price is not None
    assert price.seconds == pytest.approx(milliseconds * 1e-3)
    assert price.priced_by == ("bytes" if milliseconds < 1 else "cycles")
