"""The text of scheduled programs, both dialects, as instructions, types, groups, opcodes and source lines."""

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshloom.compiler
from conftest import plan_of
from meshloom.compiler.analysis.program_text import SourceLine, source_finder
from meshloom.compiler.xla.hlo import HloError, Module, module_name, parse_module, split_modules
from meshloom.compiler.xla.hlo.groups import groups_of, parse_groups
from meshloom.compiler.xla.hlo.opcodes import COLLECTIVES, Does, all_that
from meshloom.compiler.xla.hlo.types import ArrayType, num_bytes, parse_type
from support.programs import programs_of

TEXT = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

FileNames
1 "model.py"
2 "train_step.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=9}
2 {file_name_id=2 function_name_id=1 line=40 end_line=40 column=1 end_column=9}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(256)} parameter(0)
  %y = f32[]{:T(256)} parameter(1)
  ROOT %sum = f32[]{:T(256)} add(%x, %y)
}

ENTRY %main (a: bf16[8,128], b: (f32[2], s32[])) -> (bf16[8,128], f32[]) {
  %a = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %b = (f32[2]{0:T(128)}, s32[]{:S(2)}) parameter(1)
  %two = s32[]{:T(128)} constant(2)
  %kernel = bf16[8,128]{1,0} custom-call(%a, /*index=1*/%two), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"blocks":"{\\"q\\": 512}"
}}, metadata={op_name="jit(step)/attend/pallas_call" stack_frame_id=2}, backend_config={"window_config":{"estimated_cycles":"1500"}}
  %reduced = (f32[2]{0}, f32[4]{0}) all-reduce(%b, %b), channel_id=3, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %out = (bf16[8,128]{1,0}, f32[]{:T(128)}) tuple(%kernel, %two)
}
"""


def test_instructions_are_read_whole():
    module = parse_module(TEXT)
    assert module.name == "jit_step"
    assert module.is_scheduled
    assert module.entry == "main"
    entry = module.entry_computation
    assert [each.name for each in entry.instructions] == ["a", "b", "two", "kernel", "reduced", "out"]
    kernel = entry.by_name["kernel"]
    assert (kernel.opcode, kernel.operands, kernel.op_name) == (
        "custom-call", ("a", "two"), "jit(step)/attend/pallas_call",
    )  # fmt: skip
    assert kernel.attribute("custom_call_target") == "tpu_custom_call"
    assert kernel.estimated_cycles == 1500
    assert entry.by_name["reduced"].estimated_cycles is None
    assert entry.by_name["two"].argument == "2"
    assert entry.root.name == "out"
    reduced = entry.by_name["reduced"]
    assert reduced.called == ("add",)
    assert reduced.operands == ("b", "b")
    assert reduced.attribute("replica_groups") == "[2,4]<=[8]"
    assert reduced.attribute("channel_id") == "3"
    assert reduced.attribute("dimensions") is None
    assert [p.name for p in entry.parameters] == ["a", "b"]


def test_the_other_dialect_says_the_same():
    bare = re.sub(r"%([\w.\-]+)", r"\1", TEXT)
    typed = TEXT.replace("tuple(%kernel, %two)", "tuple(bf16[8,128]{1,0} %kernel, s32[]{:T(128)} %two)")
    expected = parse_module(TEXT)
    for text in (bare, typed):
        found = parse_module(text)
        assert found.computations.keys() == expected.computations.keys()
        for name, computation in found.computations.items():
            for a, b in zip(computation.instructions, expected.computations[name].instructions, strict=True):
                assert (a.name, a.opcode, a.operands, a.type_text) == (b.name, b.opcode, b.operands, b.type_text)


def test_an_estimate_that_the_compiler_does_not_have_is_none():
    text = TEXT.replace('"estimated_cycles":"1500"', f'"estimated_cycles":"{2**63 - 1}"')
    assert parse_module(text).entry_computation.by_name["kernel"].estimated_cycles is None


def test_source_lines_by_frames_and_by_metadata():
    module = parse_module(TEXT)
    find = source_finder(module)
    kernel = module.entry_computation.by_name["kernel"]
    assert find(kernel) == (SourceLine("model.py", 7), SourceLine("train_step.py", 40))
    assert find(module.entry_computation.by_name["two"]) == ()
    old = TEXT.replace("stack_frame_id=2", 'source_file="old.py" source_line=3')
    assert find(parse_module(old).entry_computation.by_name["kernel"]) == (SourceLine("old.py", 3),)


@pytest.mark.parametrize(
    "text", ["", "not HLO", "HloModule a\n", TEXT[: TEXT.index("ROOT %out")],
             TEXT.replace("  %two = s32[]{:T(128)} constant(2)", "  %two = s32[]{:T(128)} constant(2")]
)  # fmt: skip
def test_what_is_no_module_is_refused(text):
    with pytest.raises(HloError):
        parse_module(text)


def test_errors_say_the_line():
    cut = TEXT.replace("constant(2)", "constant 2")
    number = 1 + next(i for i, line in enumerate(cut.splitlines()) if "%two = " in line)
    with pytest.raises(HloError, match=f"line {number}: no instruction: %two"):
        parse_module(cut)
    with pytest.raises(HloError, match=f"line {len(TEXT.splitlines()) - 1}: the text ends within main"):
        parse_module(TEXT.rstrip()[:-1])
    with pytest.raises(HloError, match="no computation add"):
        parse_module(TEXT.replace("%add (", "%other (")).computations["add"]


def test_types():
    assert parse_type("bf16[4,2048]{1,0:T(8,128)S(1)}") == (ArrayType("bf16", (4, 2048), 1, num_padding=4 * 2048),)
    assert parse_type("((f32[2]{0}, pred[]), token[])") == (
        ArrayType("f32", (2,)), ArrayType("pred", ()), ArrayType("token", ()),
    )  # fmt: skip
    assert num_bytes("(f32[2]{0}, s4[3], f8e4m3fn[5], c64[2], token[])") == 8 + 2 + 5 + 16
    assert num_bytes("bf16[<=16,2]") == 64


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,3,1) {'b'}", ((0, 2), (3, 1))),
    ],
)
def test_groups(text, groups):
    assert parse_groups(text, 8) == groups
    line = f"HloModule m\n\nENTRY %m (x: f32[]) -> f32[] {{\n  %x = f32[] parameter(0)\n  ROOT %r = f32[] all-reduce(%x), replica_groups={text}, to_apply=%f\n}}\n"
    assert parse_module(line).entry_computation.root.attribute("replica_groups") == text


@pytest.mark.parametrize("axes", [("data",), ("fsdp",), ("data", "tensor"), ("data", "fsdp", "tensor")])
def test_groups_of_compiled_programs_are_those_of_the_mesh(axes):
    """Against the positions of devices in a NumPy array."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    total = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, axes), mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    )
    x = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    module = parse_module(total.lower(x).compile().as_text() or "")
    reduced = next(each for each in module.all_within(module.entry) if each.opcode == "all-reduce")
    kept = [d for d, name in enumerate(mesh.axis_names) if name not in axes]
    over = [d for d, name in enumerate(mesh.axis_names) if name in axes]
    rows = np.arange(8).reshape(2, 2, 2).transpose(*kept, *over).reshape(-1, 2 ** len(axes))
    groups = parse_groups(reduced.attribute("replica_groups") or "", 8)
    assert sorted(map(sorted, groups)) == sorted(map(sorted, rows.tolist()))


def test_a_permute_of_no_pairs_has_no_groups():
    """As in a slice whose stages are on other slices; a reduction that names no groups is among all devices."""
    text = """HloModule m, num_partitions=2
ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %moved = f32[4]{0} collective-permute(%x), channel_id=1, source_target_pairs={}
  %sent = f32[4]{0} collective-permute(%moved), channel_id=2, source_target_pairs={{0,1}}
  ROOT %sum = f32[4]{0} all-reduce(%sent), channel_id=3, replica_groups={}, to_apply=%add
}
"""
    module = parse_module(text)
    instructions = list(module.all_within(module.entry))
    assert [groups_of(each, 2) for each in instructions] == [None, (), ((0, 1),), ((0, 1),)]


@pytest.mark.ci
def test_a_whole_train_step_is_read():
    text = programs_of(plan_of("sharding=fsdp_tensor"))["train"].as_text()
    module = parse_module(text)
    read = [each for computation in module.computations.values() for each in computation.instructions]
    assert len(read) == len(re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = ", text, re.M))
    assert all(name in module.computations for each in read for name in each.called)


def test_it_needs_no_jax():
    code = "import sys, meshloom.compiler.xla.schedule.program; assert not {'jax', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def without_indentation(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())


MATRIX = """\
  %two = s32[2,2,1]{2,1,0} constant({
    { /*i0=0*/
      {1}, {2}
    },
    { /*i0=1*/
      {3}, {4}
    }
  })
"""
FORMS = {
    "no indentation": without_indentation(TEXT),
    "more indentation": textwrap.indent(TEXT, "    "),
    "comments": TEXT.replace("\n}\n", "\n} // a computation\n").replace("ENTRY", "\n// the step\nENTRY"),
    "blank lines": f"\n\n{TEXT}".replace("\n  %b", "\n\n  // b\n  %b"),
    "constants over several lines": TEXT.replace("  %two = s32[]{:T(128)} constant(2)\n", MATRIX),
}


@pytest.mark.parametrize(
    "text",
    [*FORMS.values(), without_indentation(FORMS["constants over several lines"])],
    ids=[*FORMS, "such constants without indentation"],
)
def test_no_form_of_a_text_loses_an_instruction(text):
    def read(module: Module) -> dict[str, list[tuple[str, str, tuple[str, ...]]]]:
        return {name: [(each.name, each.opcode, each.operands) for each in computation.instructions]
                for name, computation in module.computations.items()}  # fmt: skip

    ours, module = parse_module(TEXT), parse_module(text)
    assert module.entry == ours.entry
    assert read(module) == read(ours)
    kernel = module.entry_computation.by_name["kernel"]
    assert kernel.estimated_cycles == 1500
    assert source_finder(module)(kernel) == (SourceLine("model.py", 7), SourceLine("train_step.py", 40))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  %two = ", "  %two == ", "this is not read: %two == s32[]"),
        ("  %x = f32[]{:T(256)} parameter(0)\n", "", "sum in add reads x, which is not there"),
        ("  %two = ", "  %a = ", "main has several instructions a"),
        ("%add (x", "%main (x", "there is a computation main already"),
        ("StackFrames\n", "Stack frames\n", "this is not read: Stack frames"),
        ("\nENTRY", "\nHloModule other\n\nENTRY", "a second module begins here"),
        ("  %two = s32[]{:T(128)} constant(2)", "  %two = s32[]{:T(128)} constant(2))", "closes that is not open"),
        ("\n}\n\nENTRY", "\n}\n\n  %lost = f32[] parameter(0)\nENTRY", "this is not read: %lost"),
    ],
)
def test_a_line_that_is_not_read_is_an_error(old, new, said):
    assert TEXT.count(old) == 1
    with pytest.raises(HloError, match=re.escape(said)):
        parse_module(TEXT.replace(old, new))


def test_operands_with_types_and_without_percent_signs_are_names():
    call = "custom-call(f32[2,3]{1,0:T(8,128)(2,1)} a, (f32[2], s32[]) b, f32[2,3] /*index=2*/a)"
    text = "HloModule m\n\nENTRY m {\n  a = f32[2,3]{1,0} parameter(0)\n  b = (f32[2], s32[]) parameter(1)\n"
    text += f"  ROOT c = f32[2,3]{{1,0}} {call}\n}}\n"
    assert parse_module(text).entry_computation.root.operands == ("a", "b", "a")


def test_modules_of_one_text_are_told_apart():
    other = TEXT.replace("jit_step", "jit_init")
    modules = split_modules(f"{TEXT}\n\n{other}")
    assert [parse_module(text).name for text in modules] == ["jit_step", "jit_init"]
    assert [module_name(text) for text in modules] == ["jit_step", "jit_init"]
    assert split_modules("#!/bin/sh\n") == ("#!/bin/sh\n",)
    with pytest.raises(HloError, match="does not begin"):
        parse_module(split_modules(f"#!/bin/sh\n{TEXT}")[0])


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ("{{0,1},{2,8}}", "its groups name device 8, and the program has 8, from 0"),
        ("[2,8]<=[16]", "its groups name device 15"),
        ("mesh['a'=2,'b'=4] {'c'}", "its groups lie along c, and the axes of the mesh are a, b"),
        ("mesh['a'=2,'b'=4], device_ids=(0,1,2) {'b'}", "the mesh of its groups has 3 devices in place of 8"),
        ("<all>", "replica groups of an unknown form"),
    ],
)
def test_groups_that_the_program_does_not_have_are_an_error(groups, said):
    with pytest.raises(HloError, match=re.escape(said)):
        parse_groups(groups, 8)


COMPILER = Path(meshloom.compiler.__file__).resolve().parent
VIEWS = all_that(Does.VIEW) | all_that(Does.CAST)


def test_no_other_file_lists_opcodes_that_look_at_a_value_differently():
    """Two walks with two lists would not agree on which arrays are one."""
    assert listing(VIEWS, "xla", "analysis", "profile") == {"xla/hlo/opcodes.py"}


def test_no_other_file_lists_the_collectives():
    assert listing({"all-reduce", "collective-permute", "ragged-all-to-all"}, "xla") == {"xla/hlo/opcodes.py"}


def test_opcodes_that_name_memory_give_no_work():
    """All but those that end or go on with something asynchronous, which the reader of a schedule asks first."""
    named = all_that(Does.NAME) - all_that(Does.FREE)
    assert all(each.endswith(("-done", "-update")) for each in named)
    assert not COLLECTIVES.keys() & all_that(Does.FREE)


def listing(opcodes: set[str] | frozenset[str], *folders: str) -> set[str]:
    """Files with a set, a tuple or a table that has three of these opcodes or more."""
    found = set()
    for file in (file for folder in folders for file in (COMPILER / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            elements = node.elts if isinstance(node, ast.Set | ast.Tuple | ast.List) else ()
            elements = node.keys if isinstance(node, ast.Dict) else elements
            if len({each.value for each in elements if isinstance(each, ast.Constant)} & opcodes) > 2:
                found.add(str(file.relative_to(COMPILER)))
    return found
