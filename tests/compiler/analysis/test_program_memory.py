"""Schedules made by hand, whose arrays one can count: each of 1 kB. And recorded ones, against XLA's own count."""

import re

import jax
import jax.numpy as jnp
import pytest

from conftest import plan_of
from meshloom.compiler.analysis.program_memory import read_peak
from meshloom.compiler.xla.aot import memory_of
from meshloom.compiler.xla.hlo import parse_module
from meshloom.compiler.xla.hlo.types import elements_of, parse_type
from meshloom.compiler.xla.schedule.buffers import Buffers, read_buffers
from support.programs import programs_of
from support.recorded import recorded_text

KB = "f32[256]{0}"
MIB = 2**20
FORWARD, BACKWARD = "jit(f)/jvp(layers)/while/body", "jit(f)/transpose(jvp(layers))/while/body"


def made(name: str, *operands: str, opcode: str = "reverse", op_name: str = "", type_text: str = KB) -> str:
    metadata = f', metadata={{op_name="{op_name}"}}' if op_name else ""
    return f"  %{name} = {type_text} {opcode}({', '.join('%' + operand for operand in operands)}){metadata}"


def module(*lines: str, before: str = "", donated: str = "") -> str:
    lines = (*lines[:-1], lines[-1].replace("  %", "  ROOT %", 1))
    alias = f", input_output_alias={{ {donated} }}, entry_computation_layout={{}}" if donated else ""
    return "\n".join(
        [f"HloModule step, is_scheduled=true{alias}", "", before, f"ENTRY %main (x: f32[256]) -> {KB} {{",
         f"  %x = {KB} parameter(0)", *lines, "}", ""]
    )  # fmt: skip


def walked(*lines: str, **about: str) -> Buffers:
    return read_buffers(parse_module(module(*lines, **about)))


def live(buffers: Buffers) -> list[str]:
    return [each.name for each in buffers.at_peak]


def test_an_array_lives_until_it_is_last_read():
    last = made("e", "d", type_text="f32[]")
    found = walked(made("a", "x"), made("b", "a"), made("c", "b"), made("d", "c", "b"), last)
    assert (live(found), found.peak_bytes, found.peak_at) == (["b", "c", "d"], 4 * 1024, ("d",))
    assert found.bytes_during == {"x": 1024, "a": 2048, "b": 3072, "c": 3072, "d": 4096, "e": 2048}


TILED = ", entry_computation_layout={(f32[256]{0:T(256)})->f32[256]{0:T(256)}}"


@pytest.mark.parametrize(
    ("lines", "count", "on_tpus"),
    [
        ([made("a", "x"), made("s", "a", type_text="f32[]"), made("r", "s")], 1, 2),  # a lies where r will
        ([made("a", "x"), made("r", "a")], 2, 2),
        ([made("a", "x"), made("r", "a", opcode="copy")], 1, 1),  # in place
        ([made("a", "x"), made("r", "a", opcode="sine")], 1, 1),  # likewise
        (
            [made("a", "x", opcode="all-gather"), made("r", "a", opcode="copy")],
            1,
            2,
        ),  # XLA for v5e: 576 MiB of 64 + 256
        ([made("a", "x"), made("r", "a", opcode="all-reduce")], 2, 1),  # of TPUs in place
        ([made("r", "x", opcode="copy")], 1, 1),
        ([made("a", "x", type_text="f32[512]{0}"), made("s", "a", type_text="f32[]"), made("r", "s")], 3, 3),
    ],
    ids=["before it", "its operand", "copied", "elementwise", "gathered", "summed", "of an argument", "too large"],
)
def test_a_result_that_replaces_no_argument_has_a_place_from_the_start(lines, count, on_tpus):
    """Only what does not outlive its making can lie there, and on TPUs only what becomes the result."""
    text = module(*lines)
    assert read_buffers(parse_module(text)).peak_bytes == (1 + count) * 1024
    tiled = text.replace("is_scheduled=true", f"is_scheduled=true{TILED}")
    assert read_buffers(parse_module(tiled)).peak_bytes == (1 + on_tpus) * 1024


def test_an_elementwise_operation_overwrites_what_a_gather_brought_unless_that_is_a_result():
    """XLA for v5e has 320 MiB for a sum of sines of 256 that are gathered from 64."""
    lines = [made("a", "x", opcode="all-gather"), made("b", "a", opcode="sine"), made("r", "b", type_text="f32[]")]
    text = module(*lines).replace("is_scheduled=true", f"is_scheduled=true{TILED}")
    assert read_buffers(parse_module(text)).peak_bytes == 2 * 1024


def test_an_argument_that_is_not_donated_is_not_overwritten():
    end = made("r", "a", "b", type_text="f32[]")
    copied = made("a", "x", opcode="copy")
    assert walked(copied, made("b", "a"), end).peak_bytes == 3 * 1024
    read_last = made("b", "x") + ", kind=kLoop, calls=%f"
    fused = "%f {\n  %p = f32[256]{0} parameter(0)\n  ROOT %n = f32[256]{0} negate(%p)\n}\n"
    lines = [made("a", "x"), read_last.replace("reverse(", "fusion("), end]
    assert walked(*lines, before=fused).peak_bytes == 3 * 1024


@pytest.mark.parametrize(
    ("dtype", "opcode", "header", "count"),
    [
        ("f32", "all-reduce", TILED, 1), ("bf16", "all-reduce", TILED, 2), ("bf16", "all-reduce-start", "", 1),
        ("f32", "all-reduce", "", 2),
    ],
    ids=["TPU", "TPU, widened", "GPU", "CPU"],
)  # fmt: skip
def test_a_sum_over_devices_is_in_place_on_gpus_and_on_tpus_unless_it_is_widened(dtype, opcode, header, count):
    kind = f"{dtype}[{1024 // {'f32': 4, 'bf16': 2}[dtype]}]{{0}}"
    lines = [made("a", "x", type_text=kind), made("b", "a", opcode=opcode, type_text=kind),
             made("r", "b", type_text="f32[]")]  # fmt: skip
    text = module(*lines).replace("is_scheduled=true", f"is_scheduled=true{header}")
    assert read_buffers(parse_module(text)).peak_bytes == (1 + count) * 1024


def test_a_copy_is_an_array_where_its_source_is_read_again():
    found = walked(made("a", "x"), made("b", "a", opcode="copy"), made("c", "a", "b", type_text="f32[]"))
    assert live(found)[:2] == ["a", "b"]


def test_starts_and_dones_make_only_what_they_bring():
    pair = f"({KB}, f32[1024]{{0}})"
    start = made("s", "a", opcode="all-gather-start", type_text=pair)
    lines = [made("a", "x"), start, made("d", "s", opcode="all-gather-done", type_text="f32[1024]{0}")]
    assert walked(*lines, made("r", "d", type_text="f32[]")).peak_bytes == (1 + 1 + 4) * 1024
    copied = made("s", "a", opcode="copy-start", type_text=f"({KB}, {KB}, u32[])")
    lines = [made("a", "x"), copied, made("d", "s", opcode="copy-done")]
    assert walked(*lines, made("r", "d", "a", type_text="f32[]")).peak_bytes == 3 * 1024
    nested = made("s", "a", opcode="async-start", type_text=f"(({KB}), {KB}, u32[])")
    lines = [made("a", "x"), nested, made("d", "s", opcode="async-done")]
    assert walked(*lines, made("r", "d", "a", type_text="f32[]")).peak_bytes == 3 * 1024


def test_donated_results_take_the_place_of_arguments():
    lines = [made("a", "x"), made("b", "a", "x"), made("c", "b")]
    assert walked(*lines).peak_bytes == 3 * 1024
    donated = walked(*lines, donated="{}: (0, {}, may-alias)")
    assert (donated.peak_bytes, live(donated)) == (3 * 1024, ["a", "b"])
    assert [each.name for each in donated.arguments[0].writers] == ["x", "c"]


LOOP = f"""\
%body (s: ({KB}, {KB})) -> ({KB}, {KB}) {{
  %s = ({KB}, {KB}) parameter(0)
  %i = {KB} get-tuple-element(%s), index=0
  %w = {KB} get-tuple-element(%s), index=1
  %p = {KB} reverse(%i), metadata={{op_name="FIRST"}}
  %q = {KB} add(%p, %w), metadata={{op_name="LAST"}}
  ROOT %t = ({KB}, {KB}) tuple(%q, %w)
}}
"""


def looped(name: str, *state: str, body: str = "body") -> list[str]:
    types = f"({KB}, {KB})"
    while_ = made(name, f"{name}.state", opcode="while", type_text=types) + f", condition=%c, body=%{body}"
    return [made(f"{name}.state", *state, opcode="tuple", type_text=types), while_,
            made(f"{name}.0", name, opcode="get-tuple-element") + ", index=0"]  # fmt: skip


def test_what_a_loop_hands_on_lies_where_its_state_does():
    found = walked(
        made("a", "x"), made("b", "x"), *looped("loop", "a", "b"), made("r", "loop.0", type_text="f32[]"), before=LOOP
    )
    assert (live(found), found.peak_at) == (["a", "b", "p"], ("loop", "p"))
    (state,) = [each for each in found.at_peak if each.name == "a"]
    assert [each.name for each in state.writers] == ["a", "q"]
    assert state.loops == ("loop",)


def test_nested_loops_add_up():
    inner = LOOP.replace("%body", "%inner")
    outer = LOOP.replace(
        f"  %p = {KB} reverse(%i)", "\n".join(looped("in", "i", "w", body="inner")) + f"\n  %p = {KB} copy(%in.0)"
    )
    found = walked(made("a", "x"), made("b", "x"), *looped("loop", "a", "b"), made("r", "loop.0"), before=inner + outer)
    assert found.peak_bytes == 4 * 1024
    assert found.peak_at == ("loop", "in", "p")


def classes(*lines: str, before: str = "") -> dict[str, int]:
    found = read_peak(parse_module(module(*lines, before=before))).by_class
    return {name: count // 1024 for name, count in found.items()}


def test_what_the_forward_pass_writes_and_the_backward_pass_reads_is_an_activation():
    lines = [made("kept", "x", op_name=f"{FORWARD}/dot_general"), made("t", "x", op_name=f"{FORWARD}/exp"),
             made("u", "t", op_name=f"{FORWARD}/mul")]  # fmt: skip
    backward = made("r", "kept", "u", op_name=f"{BACKWARD}/mul", type_text="f32[]")
    assert classes(*lines, backward) == {"activations": 2, "temporaries": 1}
    again = [line.replace(FORWARD, f"{BACKWARD}/rematted_computation") for line in lines]
    assert classes(*again, backward) == {"temporaries": 3}


def test_a_loops_state_is_kept_for_what_the_loops_write_and_read():
    forward, backward = LOOP.replace("LAST", f"{FORWARD}/dynamic_update_slice"), LOOP.replace("%body", "%back")
    backward = (
        backward.replace("FIRST", f"{BACKWARD}/dynamic_slice")
        .replace("LAST", f"{BACKWARD}/dot_general")
        .replace("add(", "dot(")
    )
    lines = [made("stack", "x"), made("b", "x"), *looped("loop", "stack", "b")]
    lines += [made("c", "x", op_name=f"{BACKWARD}/broadcast"), *looped("pool", "c", "loop.0", body="back")]
    lines.insert(-3, made("other", "x", op_name=f"{BACKWARD}/reduce_sum"))
    lines.append(made("r", "pool.0", "other", op_name="jit(f)/optimizer/mul", type_text="f32[]"))
    assert classes(*lines, before=forward + backward) == {"activations": 1, "gradients": 2, "temporaries": 1}


def test_gradients_are_what_is_reduced_or_updated_with_and_what_is_added_to_them():
    gradient = made("g", "x", op_name=f"{BACKWARD}/dot_general")
    for name in ("jit(f)/optimizer/mul", f"{BACKWARD}/weight=layers/w/reduce_scatter"):
        assert classes(gradient, made("r", "g", op_name=name, type_text="f32[]")) == {"gradients": 1}
    added = [gradient, made("total", "x"), made("sum", "total", "g", op_name="jit(f)/while/body/add")]
    assert classes(*added, made("r", "sum", op_name="jit(f)/optimizer/mul", type_text="f32[]")) == {"gradients": 3}
    copied = [gradient, made("moved", "g", type_text="f32[256]{0:S(1)}"), made("back", "moved")]
    assert classes(*copied, made("r", "back", op_name="jit(f)/optimizer/mul", type_text="f32[]")) == {"gradients": 1}
    moments = [made("m", "x", op_name="jit(f)/optimizer/mul"), made("r", "m", op_name="jit(f)/optimizer/add")]
    assert classes(*moments) == {"temporaries": 2}


def test_a_gathered_weight_is_one_in_both_passes_and_a_cast_one_is_another_class():
    of_names = {f"{FORWARD}/weight=layers/w/all_gather": "gathered_weights",
                f"{BACKWARD}/rematted_computation/weight=layers/w/all_gather": "gathered_weights",
                "jit(f)/working_parameters/convert_element_type": "working_parameters"}  # fmt: skip
    for name, kind in of_names.items():
        lines = [made("w", "x", op_name=name), made("r", "w", op_name=f"{BACKWARD}/dot_general", type_text="f32[]")]
        assert classes(*lines) == {kind: 1}


def test_a_longer_life_never_lowers_the_peak():
    """Of any one array: the instruction that makes the result reads it too."""
    text = recorded_text("llama_h100_8")
    peak, lines = read_buffers(parse_module(text)).peak_bytes, text.splitlines()
    entry = next(n for n, line in enumerate(lines) if line.startswith("ENTRY"))
    (root,) = [n for n in range(entry, len(lines)) if lines[n].startswith("  ROOT")]
    names = re.findall(r"^  %(loop_\S+|input_\S+) = f", "\n".join(lines[entry:root]), re.M)
    for name in names[::10]:
        longer = [*lines[:root], made("late", name), *lines[root:]]
        assert read_buffers(parse_module("\n".join(longer))).peak_bytes >= peak, name


@pytest.mark.parametrize(
    ("name", "peak_bytes", "microbatch_tokens"),
    [("llama_v5e8_two_microbatches", 5_760_843_264, 4096), ("llama_h100_8", 6_105_733_516, 8192)],
)
def test_the_peak_of_recorded_programs_is_xlas(name, peak_bytes, microbatch_tokens):
    """peak_bytes: `memory_analysis().peak_memory_in_bytes` of the same program."""
    found = read_peak(parse_module(recorded_text(name)))
    assert max(found.bytes_during.values()) == found.num_bytes
    assert found.num_bytes == pytest.approx(peak_bytes, rel=0.02)
    kept = microbatch_tokens * 4096 * 2  # the input of a layer, and that of the head
    assert 5 * kept <= found.by_class["activations"] <= 6 * kept + MIB
    layers = 4 * (4 * 4096 * 4096 + 3 * 4096 * 11008) // 8 * 4
    whole = 2 * 32000 * 4096 * 4 if "two" in name else 0
    assert found.by_class["gradients"] >= layers + whole


def test_recorded_gradients_that_wait_whole_for_all_microbatches():
    held = read_peak(parse_module(recorded_text("llama_v5e8_two_microbatches"))).held
    whole = [each.shape for each in held if each.over_microbatches and each.num_bytes > 400 * MIB]
    assert sorted(whole) == [(4096, 32000), (32000, 4096)]


@pytest.mark.parametrize(
    "sharding", ["fsdp_tensor", *(pytest.param(name, marks=pytest.mark.ci) for name in ("ddp", "fsdp"))]
)
def test_the_peak_of_a_cpus_program_is_what_it_takes(sharding):
    """Its compiler packs without gaps, nearly."""
    compiled = programs_of(plan_of(f"sharding={sharding}", "num_microbatches=2"))["train"]
    assert read_peak(parse_module(compiled.as_text())).num_bytes == pytest.approx(
        memory_of(compiled).taken_bytes, rel=0.03
    )


@pytest.mark.parametrize("donated", [(), (0,)])
def test_results_need_memory_where_they_replace_no_argument(donated):
    def forward(layers, x):
        return jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, layers)[0], layers * 2

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((6, 256, 256), (512, 256))]
    compiled = jax.jit(forward, donate_argnums=donated).lower(*shapes).compile()
    found = read_peak(parse_module(compiled.as_text() or "")).num_bytes
    assert found == pytest.approx(memory_of(compiled).taken_bytes, rel=0.02)


def test_padding_and_elements_of_types():
    (array,) = parse_type("bf16[3,200]{1,0:T(8,128)(2,1)}")
    assert array.held_bytes == 8 * 256 * 2
    (array,) = parse_type("f32[4,32,3]{0,1,2:T(4,128)}")
    assert array.held_bytes == 3 * 32 * 128 * 4
    assert elements_of("((f32[2]{0}, s32[]), /*index=1*/u32[3]{0:T(128)})") == (
        "(f32[2]{0}, s32[])",
        "u32[3]{0:T(128)}",
    )
    assert elements_of("f32[2]{0}") is None
