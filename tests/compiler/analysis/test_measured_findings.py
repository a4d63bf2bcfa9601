"""What measurements say is slow is found in measured programs and in toys, and not in programs without it."""

from pathlib import Path

import pytest

from meshloom.compiler.analysis.compiled_step import inspect_text
from meshloom.compiler.analysis.program_devices import ProgramDevices
from meshloom.compiler.schema import Finding
from meshloom.compiler.target.placement import plan_own_order
from support.programs import target_of
from support.recorded import recorded_text
from support.schedules import compute, module

MEASURED = Path(__file__).parents[3] / "bench" / "measured"
RULES = ("attention-block", "float32-reduction", "host-copies-cannot-hide", "exchange-over-torus")
HALF = 2**20


def findings(text: str, target: str) -> dict[str, Finding]:
    program = inspect_text(text, ProgramDevices(plan_own_order(target_of(target)), is_assumed=True))
    return {each.rule: each for each in program.findings if each.rule in RULES}


def warnings(text: str, target: str) -> set[str]:
    return {rule for rule, each in findings(text, target).items() if each.severity == "warning"}


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize(
    ("name", "target"),
    [("v5e_fsdp16", "v5e-16"), ("v5e_tensor", "v5e-8"), ("v6e_sparsecore", "v6e-8"), ("h100_fsdp", "h100-8"),
     ("foreign/equinox", "h100-8"), ("toys/stack_v5e", "v5e-4"), ("toys/twice_v5e", "v5e-4")],
)  # fmt: skip
def test_programs_without_them_have_none(name, target):
    assert warnings(recorded_text(name), target) == set()


def test_copies_that_take_longer_than_all_compute_cannot_hide():
    """The measured program moves 15 GiB to the host and back in 784 ms, beside passes over memory of 24 ms."""
    text = (MEASURED / "v6e_host_offload.txt").read_text()
    found = findings(text, "v6e-8")["host-copies-cannot-hide"]
    assert "15.0 GiB" in found.what
    assert "compute it again" not in found.fix, "it has no backward pass"
    step = text.replace('op_name="', 'op_name="jit(f)/transpose(jvp())/')
    assert step != text
    assert "compute it again" in findings(step, "v6e-8")["host-copies-cannot-hide"].fix
    host, device = "f32[4096,256]{1,0:S(5)}", "f32[4096,256]{1,0}"
    lines = (f"  %here = {device} parameter(1)", f"  %there = {host} copy(%here)")
    assert warnings(module(*lines, *END), "v5e-4") == {"host-copies-cannot-hide"}
    hidden = (
        lines[0],
        f"  %start = ({host}, {device}, u32[]) copy-start(%here)",
        compute("a", 10**9),
        f"  %there = {host} copy-done(%start)",
        *END,
    )
    assert warnings(module(*hidden), "v5e-4") == set()
    kernel = '  %k = bf16[8]{0} custom-call(%x), custom_call_target="mystery"'  # its time is not known
    assert warnings(module(*lines, kernel, *END), "v5e-4") == set()


END = (compute("work", 5), "  ROOT %o = bf16[8]{0} copy(%x)")  # an estimate of a TPU's compiler


def splash(name: str, length: int, table: int, heads: int = 16) -> str:
    array = f"bf16[{heads},{length},128]{{2,1,0}}"
    given = [f"  %{n} = {array} parameter({n[1]})" for n in ("q1", "k2", "v3")]
    tables = f"  %t = s8[1,{table},{table}]{{2,1,0}} parameter(4)"
    call = f'  %{name} = {array} custom-call(%t, %t, %q1, %k2, %v3), custom_call_target="tpu_custom_call"'
    return module(*given, tables, call, *END)


@pytest.mark.parametrize(
    ("length", "block", "better"),
    [
        (4096, 4096, 1024),
        (8192, 8192, 1024),
        (8192, 1024, None),
        (1024, 1024, None),
        (2048, 512, 1024),
        (4096, 256, 1024),
    ],
)
def test_blocks_of_attention_are_compared_with_others_by_what_each_costs(length, block, better):
    """A block as long as the sequence computes the whole square, and many small ones cost more than their matmuls."""
    by_table = splash("splash_mha_fwd_no_residuals", length, length // block)
    by_name = splash(f"splash_mha_fwd_block_kv_{block}_block_q_{block}", length, 1)
    for text in (by_table, by_name):
        found = findings(text, "v5p-8").get("attention-block")
        assert (found is None) == (better is None)
        if found:
            assert f"in blocks of {block:,} x {block:,}" in found.what
            assert ("too large" in found.what) == (block > better)
            assert f"Blocks of {better:,} would save" in found.what


def test_blocks_of_a_backward_kernel_are_those_of_its_pass():
    """As the kernel of keys' gradients is named in the measured step on v5p-8."""
    name = "splash_mha_dkv_segmented_block_kv_dkv_512_block_kv_dkv_compute_512_block_q_dkv_512_k_layout_1"
    assert "in blocks of 512 x 512, too small" in findings(splash(name, 2048, 1), "v5p-8")["attention-block"].what
    of_ours = splash("splash_mha_fwd", 4096, 1).replace(
        '"tpu_custom_call"', '"tpu_custom_call", metadata={op_name="blocks=1_of_1"}'
    )
    assert warnings(of_ours, "v5p-8") == set()


GROUPS = "replica_groups={{0,1,2,3}}, to_apply=%sum"
SUM = """\
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
"""


def summed(*dtypes: str, cast: bool = False) -> str:
    lines = []
    for n, dtype in enumerate(dtypes):
        given = "bf16" if cast else dtype
        lines.append(f"  %y{n} = {given}[{HALF}]{{0}} parameter({n + 1})")
        lines.append(f"  %c{n} = {dtype}[{HALF}]{{0}} {'convert' if cast else 'copy'}(%y{n})")
        lines.append(f"  %r{n} = {dtype}[{HALF}]{{0}} all-reduce(%c{n}), {GROUPS}")
    return module(*lines, *END, before=SUM)


@pytest.mark.parametrize(
    ("dtypes", "cast", "severity"),
    [
        (("f32", "bf16", "bf16", "bf16"), False, "warning"),
        (("f32", "f32", "bf16"), False, None),
        (("bf16", "bf16"), False, None),
        (("f32", "f32"), False, None),
        (("f32", "f32"), True, "note"),
    ],
    ids=["an exception", "the rule", "all in bfloat16", "all in float32", "what goes in is bfloat16"],
)
def test_a_sum_in_float32_where_bfloat16_is_the_rule(dtypes, cast, severity):
    found = findings(summed(*dtypes, cast=cast), "v5e-4").get("float32-reduction")
    assert (found and found.severity) == severity
    if found and severity == "warning":
        assert "1 all-reduce in float32" in found.what
        assert "(r0," in found.where


@pytest.mark.parametrize(("target", "is_found"), [("v5e-8", True), ("h100-8", False)])
def test_an_exchange_that_waits_over_a_torus_is_found(target, is_found):
    exchange = f"  %e = bf16[{8 * HALF}]{{0}} all-to-all(%y), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, dimensions={{0}}"
    lines = (f"  %y = bf16[{8 * HALF}]{{0}} parameter(1)", exchange, *(END if is_found else END[1:]))
    text = module(*lines).replace("num_partitions=4", "num_partitions=8")
    found = findings(text, target).get("exchange-over-torus")
    assert bool(found) == is_found
    if found:
        assert "groups of 8 chips" in found.what
        assert "experts" in found.fix
