"""Programs without a declaration: whose devices have no names, and texts that are not programs of the target."""

import itertools
import re
import time
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from meshloom.compiler.analysis.compiled_step import InspectedProgram, inspect_text
from meshloom.compiler.analysis.program_devices import ProgramDevices, connected, strides_of
from meshloom.compiler.analysis.program_text import SourceLine, shown
from meshloom.compiler.analysis.schedule_analysis import NOT_DECLARED
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.report.build_report import report_inspected
from meshloom.compiler.target.placement import plan_own_order
from meshloom.compiler.xla.aot import ProgramMemory
from support.programs import target_of
from support.recorded import SCHEDULES, recorded_text
from support.schedules import GATHER, GROUPS, compute, module

TEXT = module(f"  ROOT %g = {GATHER}", compute("a", 5))


NO_MARK = module(f"  ROOT %g = {GATHER}")
ON_GPU = NO_MARK.replace("replica_groups", 'backend_config={"operation_queue_id":"0"}, replica_groups')
ON_CPU = NO_MARK.replace("replica_groups", 'backend_config={"outer_dimension_partitions":["2"]}, replica_groups')
TWO_CORES = TEXT.replace("replica_groups", 'backend_config={"megacore_config":{}}, replica_groups')


def devices(target: str, *, num_slices: int = 1) -> ProgramDevices:
    return ProgramDevices(plan_own_order(target_of(target, num_slices=num_slices)), is_assumed=True)


@pytest.mark.parametrize("factors", [((4, 1),), ((2, 8),), ((2, 8), (2, 1)), ((3, 40), (2, 6), (4, 1))])
def test_a_group_is_named_by_the_sizes_and_strides_that_make_it(factors):
    places = [range(0, size * stride, stride) for size, stride in factors]
    group = [5 + sum(place) for place in itertools.product(*places)]
    assert strides_of(group) == factors
    assert strides_of(group[::-1]) == factors, "in whatever order"


@pytest.mark.parametrize("group", [(0, 1, 3), (0, 1, 8, 10), (0, 1, 4, 5, 6, 7)])
def test_an_irregular_group_has_no_strides(group):
    assert strides_of(group) is None


def test_pairs_connect_groups():
    ring = [(i, (i + 1) % 4) for i in range(4)]
    assert connected([*ring, (8, 12), (12, 8), (5, 5)]) == ((0, 1, 2, 3), (8, 12))


@pytest.mark.parametrize(
    ("target", "num_slices", "number", "place"),
    [
        ("v5e-16", 1, 6, (0, 2, 1, 0)),  # (slice, x, y, core): 4 x 4, along x first
        ("v5e-16", 2, 16, (1, 0, 0, 0)),
        ("v5p-64", 1, 9, (0, 1, 0, 1, 0)),  # 2 x 4 x 4
        ("h100-16", 1, 9, (1, 1)),  # node, GPU
    ],
)
def test_the_own_order_of_a_target_is_that_of_its_numbers(target, num_slices, number, place):
    placement = plan_own_order(target_of(target, num_slices=num_slices))
    assert placement.places[number] == place
    assert len(set(placement.places)) == placement.target.num_devices


def gather_over(groups: str, target: str):
    work = [compute("a", 5)] if target_of(target).platform == "tpu" else []
    text = module(f"  ROOT %g = {GATHER}", *work).replace(GROUPS, f"replica_groups={groups}")
    text = text.replace("num_partitions=4", f"num_partitions={target_of(target).num_devices}")
    (found,) = inspect_text(text, devices(target)).analysis.collectives
    return found


def test_a_group_lies_where_its_devices_are():
    """On 4 x 4 chips: four in order are a line along x, every fourth one along y, and both have the same speed. A node
    of GPUs is left only by groups that do."""
    row, column = gather_over("[4,4]<=[16]", "v5e-16"), gather_over("[4,4]<=[4,4]T(1,0)", "v5e-16")
    assert (row.mesh_axes, column.mesh_axes) == (("4 (stride 1)",), ("4 (stride 4)",))
    assert row.alone_seconds == column.alone_seconds
    square = gather_over("[4,4]<=[2,2,2,2]T(0,2,1,3)", "v5e-16")
    assert (square.mesh_axes, square.group_size) == (("2 (stride 4)", "2 (stride 1)"), 4)
    within, across = gather_over("[2,8]<=[16]", "h100-16"), gather_over("[8,2]<=[2,8]T(1,0)", "h100-16")
    assert (within.link, across.link) == ("NVLink", "NIC")
    assert across.mesh_axes == ("2 (stride 8)",)


@pytest.mark.parametrize(("dtype", "said"), [("f8e4m3fn", "dense and low precision, "), ("bf16", "dense: ")])
def test_a_program_that_multiplies_in_eight_bits_has_the_range_of_low_precision(dtype, said):
    dot = f"{dtype}[4096,4096]{{1,0}} dot(%w, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
    text = module(compute("a", 5), f"  %w = {dtype}[4096,4096]{{1,0}} parameter(1)", f"  ROOT %d = {dot}")
    basis = inspect_text(text, devices("v6e-4")).analysis.step.range_basis
    assert isinstance(basis, str)
    assert basis.startswith(said)


def test_a_sum_across_slices_is_named_by_its_stride():
    program = inspect_text(recorded_text("two_slices"), devices("v5e-8", num_slices=2))
    across = {each.mesh_axes for each in program.analysis.collectives if each.link == "DCN"}
    assert across == {("2 (stride 8)",)}
    order = [(place + 8) % 16 for place in range(16)]
    mesh = {"replica": 2, "fsdp": 8}
    named = ProgramDevices(plan_own_order(target_of("v5e-8", num_slices=2)), order, mesh)
    found = inspect_text(recorded_text("two_slices"), named).analysis.collectives
    assert {(each.link, *each.mesh_axes) for each in found} == {("DCN", "replica"), ("ICI", "fsdp")}


def test_the_programs_own_mesh_names_its_groups():
    placement = plan_own_order(target_of("v5e-16"))
    text = TEXT.replace(GROUPS, "replica_groups=[4,4]<=[4,4]T(1,0)").replace("num_partitions=4", "num_partitions=16")
    program = inspect_text(text, ProgramDevices(placement, mesh={"data": 4, "model": 4}))
    assert [each.mesh_axes for each in program.analysis.collectives] == [("data",)]


def test_what_only_a_declaration_says_is_null_with_that_reason():
    report = report_inspected(inspect_text(recorded_text("h100_fsdp"), devices("h100-8")))
    assert report.compiled.step_seconds
    assert report.compiled.mfu == report.program.tokens_per_step == Unknown(NOT_DECLARED)
    assert isinstance(report.build, Unknown)
    memory = report.memory
    parts = [count or 0 for name, count in memory.breakdown.items() if name not in ("code", "reserved")]
    assert sum(parts) == report.compiled.peak_bytes
    assert report.compiled.fits is True


@pytest.mark.parametrize(
    ("text", "target", "said"),
    [
        (TEXT[: len(TEXT) // 2], "v5e-4", "not a whole HLO module"),
        ("#!/bin/sh\necho", "v5e-4", "not a whole HLO module"),
        ("", "v5e-4", "not a whole HLO module"),
        ("module @jit_f attributes {mhlo.num_partitions = 4 : i32} {\n}\n", "v5e-4", "a lowered program"),
        (TEXT.replace("is_scheduled=true, ", ""), "v5e-4", "is not scheduled"),
        (TEXT, "v5e-16", "the program is for 4 devices, and v5e-16 has 16"),
        (TEXT, "h100-4", "was compiled for TPUs"),
        (ON_GPU, "v5e-4", "was compiled for GPUs"),
        (ON_GPU, "cpu-4", "was compiled for GPUs"),
        (ON_CPU, "h100-4", "was compiled for CPUs"),
        (NO_MARK, "v5e-4", "was not compiled for TPUs"),
        (TWO_CORES, "v6e-4", "was compiled for chips of two cores that work as one, v4 or v5p"),
        (TEXT.replace("replica_groups={{0,1,2,3}}", "replica_groups=<all>"), "v5e-4", "replica groups of an unknown"),
        (TEXT.replace("{{0,1,2,3}}", "{{0,1,2,7}}"), "v5e-4", "g: its groups name device 7, and the program has 4"),
        (TEXT.replace("{{0,1,2,3}}", "mesh['a'=4] {'b'}"), "v5e-4", "g: its groups lie along b"),
    ],
    ids=[
        "truncated",
        "foreign",
        "empty",
        "lowered",
        "unscheduled",
        "number",
        "platform",
        "GPUs",
        "GPUs as CPUs",
        "CPUs",
        "no mark",
        "two cores",
        "groups",
        "devices",
        "axes",
    ],
)
def test_what_is_not_a_program_of_the_target_is_one_error(text, target, said):
    with pytest.raises(ConfigError) as error:
        inspect_text(text, devices(target), name="step.txt")
    (problem,) = error.value.problems
    assert said in problem.what
    assert problem.where in ("step.txt", "target")


@pytest.mark.parametrize(
    ("files", "line"),
    [
        (["/v/lib/python3.11/site-packages/flax/nnx/nn.py", "/home/me/run/train.py"], "run/train.py:1"),
        (
            ["/v/lib/python3.12/site-packages/jax/a.py", "/v/site-packages/maxtext/layers/moe.py"],
            "maxtext/layers/moe.py:1",
        ),
        (["/v/site-packages/jax/a.py", "/v/lib/python3.12/contextlib.py"], "jax/a.py:0"),
        (["train.py"], "train.py:0"),
    ],
)
def test_the_line_is_the_innermost_outside_of_libraries(files, line):
    assert shown(tuple(SourceLine(file, number) for number, file in enumerate(files))) == line


def test_where_all_lines_are_a_librarys_the_scope_is_shown():
    files = ["/v/site-packages/keras/src/layers/conv.py", "/v/site-packages/jax/a.py"]
    lines = tuple(SourceLine(file, 3) for file in files)
    assert shown(lines, "jit(train_step)/jvp(conv5_block1_3_bn)/reduce_sum") == "conv5_block1_3_bn"
    assert shown(lines, "jit(train_step)/reduce_sum") == "keras/src/layers/conv.py:3"
    assert shown((*lines, SourceLine("/home/me/fit.py", 7)), "jit(f)/bn/add") == "me/fit.py:7"


def test_a_fused_reduce_scatter_has_the_line_of_its_fusion():
    fused = f"""\
%rs {{
  %p = f32[32]{{0}} parameter(0)
  %i = s32[] parameter(1)
  %ar = f32[32]{{0}} all-reduce(%p), {GROUPS}, to_apply=%sum
  ROOT %ds = f32[8]{{0}} dynamic-slice(%ar, %i), dynamic_slice_sizes={{8}}
}}
"""
    lines = ("  %big = f32[32]{0} broadcast(%x)", "  %zero = s32[] constant(0)",
             '  ROOT %f = f32[8]{0} fusion(%big, %zero), kind=kCustom, calls=%rs, metadata={op_name="jit(f)/psum" '
             'source_file="/home/me/fit.py" source_line=31}, backend_config={"estimated_cycles":"3"}')  # fmt: skip
    (found,) = inspect_text(module(*lines, before=fused), devices("v5e-4")).analysis.collectives
    assert (found.kind, found.line) == ("reduce-scatter", "me/fit.py:31")


def called_in_turn(depth: int, *, times: int = 1) -> str:
    """Returns computations that call each other, without names of operations."""
    text = "%c0 {\n  %p = f32[64] parameter(0)\n  ROOT %n = f32[64] negate(%p)\n}\n"
    for d in range(1, depth + 1):
        calls = [
            f"  %k{d}_{n} = f32[64] call(%{f'k{d}_{n - 1}' if n else f'p{d}'}), to_apply=%c{d - 1}"
            for n in range(times)
        ]
        calls[-1] = f"  ROOT {calls[-1].strip()}"
        text += f"%c{d} {{\n  %p{d} = f32[64] parameter(0)\n" + "\n".join(calls) + "\n}\n"
    return module(f"  %y = f32[64] parameter(1)\n  ROOT %r = f32[64] call(%y), to_apply=%c{depth}", before=text)


def test_calls_cost_time_in_proportion_to_what_runs():
    """1,024 executions of one instruction, and nothing has a name that would end a search for one."""
    begin = time.process_time()
    program = inspect_text(called_in_turn(10, times=2), devices("h100-4"))
    assert time.process_time() - begin < 5
    assert program.analysis.step.least_seconds == pytest.approx(1024 * 2.5e-6)


def test_computations_that_call_each_other_without_an_end_are_an_error():
    text = called_in_turn(2).replace("to_apply=%c0", "to_apply=%c2")
    with pytest.raises(ConfigError, match="call each other without an end"):
        inspect_text(text, devices("h100-4"))


def test_memory_that_is_counted_in_a_text_says_how_much_it_may_lack():
    program = inspect_text(TEXT, devices("v5e-4"))
    assert "memory-by-text" in {each.rule for each in report_inspected(program).findings}
    known = replace(program, memory=ProgramMemory(1000, 400, 300, 5000, 70, 0, 6100))
    assert "memory-by-text" not in {each.rule for each in report_inspected(known).findings}


def nested_conditionals(depth: int) -> str:
    """Returns a program of conditionals within both branches of each other, with a gather in the innermost."""
    text = f"%c0 {{\n  %x = bf16[8]{{0}} parameter(0)\n  %g = {GATHER}\n  ROOT %n = bf16[8]{{0}} negate(%x)\n}}\n"
    for d in range(1, depth + 1):
        branches = f"true_computation=%c{d - 1}, false_computation=%c{d - 1}"
        text += f"%c{d} {{\n  %p{d} = bf16[8]{{0}} parameter(0)\n  %t{d} = pred[] constant(true)\n"
        text += f"  ROOT %k{d} = bf16[8]{{0}} conditional(%t{d}, %p{d}, %p{d}), {branches}\n}}\n"
    return module(f"  ROOT %r = bf16[8]{{0}} call(%x), to_apply=%c{depth}", before=text)


def test_branches_cost_time_in_proportion_to_their_number_and_say_that_they_are_branches():
    begin = time.process_time()
    program = inspect_text(nested_conditionals(60), devices("h100-4"))
    assert time.process_time() - begin < 5
    (gather,) = program.analysis.collectives
    assert "in a branch of k1 (counts as always taken; --taken says how often)" in gather.where
    named = {event.arguments.get("branch") for event in program.events}
    assert named == {"of k1, counts as always taken; --taken says how often"}


TARGETS = {"maxtext_dense": "v5p-128", "equinox": "h100-8"}
PEAK_BYTES = {"maxtext_dense": 5_979_694_848, "equinox": 7483438564}  # as XLA counted it where they were compiled


@cache
def inspected(name: str, *, is_stripped: bool = False) -> InspectedProgram:
    text = recorded_text(f"foreign/{name}")
    text = re.sub(r", metadata=\{[^}]*\}", "", text) if is_stripped else text
    return inspect_text(text, ProgramDevices(plan_own_order(target_of(TARGETS[name])), is_assumed=True))


def test_each_program_is_small():
    sizes = {path.name.removesuffix(".txt.xz"): path.stat().st_size for path in (SCHEDULES / "foreign").glob("*.xz")}
    assert sizes.keys() == TARGETS.keys()
    assert max(sizes.values()) < 60_000


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize("name", TARGETS)
def test_each_collective_of_the_text_is_reported(name):
    """Counted in the text by the opcodes; those inside of fusions and calls may be parts of one."""
    text = recorded_text(f"foreign/{name}")
    written = Counter(re.findall(r" (all-gather|all-reduce|all-to-all|reduce-scatter)(?:-start)?\(", text))
    found = Counter(each.kind for each in inspected(name).analysis.collectives)
    assert found.keys() == written.keys()
    assert all(0 < found[kind] <= written[kind] for kind in written)


@pytest.mark.parametrize("name", TARGETS)
def test_times_add_up(name):
    step, collectives = inspected(name).analysis.step, inspected(name).analysis.collectives
    assert step.num_unpriced == 0
    assert step.step_seconds == pytest.approx((step.compute_seconds or 0) + (step.exposed_seconds or 0))
    for each in collectives:
        assert (each.hidden_seconds or 0) + (each.exposed_seconds or 0) == pytest.approx(each.alone_seconds)


@pytest.mark.parametrize("name", TARGETS)
def test_the_peak_is_near_that_of_the_compiler(name):
    peak = inspected(name).peak
    assert not isinstance(peak, Unknown)
    assert peak.num_bytes == pytest.approx(PEAK_BYTES[name], rel=0.05)


@pytest.mark.parametrize(
    ("name", "lines", "rules"),
    [
        (
            "maxtext_dense",
            r"maxtext/\w+/\w+\.py:\d+",
            {"synchronous-collective", "reduced-then-sliced", "attention-block"},
        ),
        ("equinox", r"bench/inspect_programs\.py:\d+", {"replicated-array", "wide-collective"}),
    ],
)
def test_lines_and_findings_are_of_its_own_code(name, lines, rules):
    program = inspected(name)
    large = [each for each in program.analysis.collectives if each.bytes // each.count > 2**20 and each.line]
    assert large
    assert [each.line for each in large if not re.fullmatch(lines, each.line)] == []
    assert {finding.rule for finding in program.findings} == rules


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize("name", TARGETS)
def test_without_metadata_less_is_said_and_nothing_else(name):
    whole, stripped = inspected(name).analysis, inspected(name, is_stripped=True).analysis
    assert {each.line for each in stripped.collectives} == {""}
    assert [each.alone_seconds for each in stripped.collectives] == [each.alone_seconds for each in whole.collectives]
    report = report_inspected(inspected(name, is_stripped=True))
    assert report.compiled.peak_bytes == report_inspected(inspected(name)).compiled.peak_bytes
