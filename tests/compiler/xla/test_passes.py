"""Operations of TPUs take what profiles of real chips have: passes over memory, matmuls, updates inside tiles."""

import importlib
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest

from meshloom.compiler.analysis.schedule_analysis import chip_of
from meshloom.compiler.xla.hlo import parse_module
from meshloom.compiler.xla.hlo.types import parse_type
from meshloom.compiler.xla.schedule.prices import price_instruction
from support.programs import target_of

BENCH = Path(__file__).parents[3] / "bench"
MOST = {  # the largest mean error of a kind
    "all-gather": 0.08,
    "reduce-scatter": 0.05,
    "all-reduce": 0.05,
    "all-to-all": 0.25,
    "matmul": 0.06,
    "matmul that sends": 0.08,
    "pass over memory": 0.09,
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


STACK, LAYER = "f32[16,512,7168]{2,0,1:T(8,128)}", "f32[1,512,7168]{2,0,1:T(1,128)}"
LAYER_BYTES = 4 * 512 * 7168


def price_of(line, *parameters, before=""):
    """Returns the price of an instruction of a program for v5p-8. parameters: types of %a, %b and so on."""
    given = "\n".join(
        f"  %{name} = {kind} parameter({place})"
        for place, (name, kind) in enumerate(zip("abc", parameters, strict=False))
    )
    text = f"HloModule m, is_scheduled=true\n\n{before}\nENTRY %main () -> f32[] {{\n{given}\n  ROOT {line}\n}}\n"
    entry = (program := parse_module(text)).entry_computation
    price = price_instruction(entry.root, entry, program, chip_of(target_of("v5p-8")))
    assert price is not None
    return price.seconds


@pytest.mark.parametrize(
    ("result", "lines", "seconds"),
    [
        (  # 8 times the update read and written, and the update itself read once
            STACK,
            f"%n = {LAYER} negate(%u)\n  ROOT %d = {STACK} dynamic-update-slice(%s, %n, %i, %i, %i)",
            (16 * LAYER_BYTES / 0.25 + LAYER_BYTES / 0.9) / 2.765e12,
        ),
        (  # 8 times the slice read, and as many bytes written as it has
            LAYER,
            f"%d = {LAYER} dynamic-slice(%s, %i, %i, %i), dynamic_slice_sizes={{1,512,7168}}\n"
            f"  %m = {LAYER} multiply(%d, %u)\n  ROOT %n = {LAYER} negate(%m)",
            (8 * LAYER_BYTES + 2 * LAYER_BYTES) / 0.9 / 2.765e12,
        ),
    ],
    ids=["update", "slice"],
)
def test_parts_inside_tiles_touch_all_of_these(result, lines, seconds):
    """Of each tile of 8 layers one row is changed, or read, inside a fusion, too."""
    fused = (
        f"%fused (s: f32[], u: f32[], i: s32[]) -> f32[] {{\n  %s = {STACK} parameter(0)\n"
        f"  %u = {LAYER} parameter(1)\n  %i = s32[] parameter(2)\n  {lines}\n}}\n"
    )
    line = f"%f = {result} fusion(%a, %b, %c), kind=kLoop, calls=%fused"
    assert price_of(line, STACK, LAYER, "s32[]", before=fused) == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(("rows", "is_streamed"), [(8, True), (2048, False)])
def test_a_little_in_vector_memory_leaves_a_pass_one(rows, is_streamed):
    """64 MiB are read from the HBM. Of a program that reads as much of vector memory the compiler's estimate stands."""
    kinds = "f32[2048,8192]{1,0:T(8,128)}", f"f32[{rows},8192]{{1,0:T(8,128)S(1)}}"
    lines = (f"  %p{place} = {kind} parameter({place})\n" for place, kind in enumerate(kinds))
    fused = f"%fused (p0: f32[], p1: f32[]) -> f32[] {{\n{''.join(lines)}  ROOT %r = f32[] constant(0)\n}}\n"
    line = '%f = f32[] fusion(%a, %b), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"3500000"}'
    assert (price_of(line, *kinds, before=fused) == pytest.approx(2e-3)) != is_streamed


def test_a_small_pass_takes_its_start():
    """64 KiB in and out: 1.5 us and as long as the whole bandwidth takes."""
    seconds = price_of("%n = f32[16384]{0:T(1024)} negate(%a)", "f32[16384]{0:T(1024)}")
    assert seconds == pytest.approx(1.5e-6 + 2**17 / 2.765e12)


@pytest.mark.parametrize(
    ("kind", "before", "after", "share"),
    [
        ("bf16[16,2048,128]", "{2,1,0:T(8,128)(2,1)}", "{1,2,0:T(8,128)(2,1)}", 0.7),
        ("bf16[16,2048,2048]", "{2,1,0:T(8,128)(2,1)}", "{2,0,1:T(8,128)(2,1)}", 0.85),
        ("f32[16,2048,128]", "{2,1,0:T(8,128)}", "{1,0,2:T(8,128)}", 0.85),
        ("f32[1,512,7168]", "{2,1,0:T(8,128)}", "{2,0,1:T(1,128)}", 0.44),
    ],
    ids=["columns of rows", "rows stay", "not packed", "other tiles"],
)
def test_copies_that_change_the_layout_are_slower(kind, before, after, share):
    seconds = price_of(f"%c = {kind}{after} copy(%a)", f"{kind}{before}")
    num_bytes = 2 * parse_type(kind)[0].num_bytes
    assert seconds == pytest.approx(num_bytes / (share * 2.765e12))
