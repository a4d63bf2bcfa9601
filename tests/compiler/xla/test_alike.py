"""Devices that compute the same are found in programs made by hand, and by JAX's own count of FLOPs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshloom
from meshloom.compiler.analysis.compiled_step import inspect_text
from meshloom.compiler.analysis.program_devices import ProgramDevices
from meshloom.compiler.target.placement import plan_own_order
from meshloom.compiler.xla.hlo import parse_module
from meshloom.compiler.xla.schedule.alike import find_repeated
from support.programs import target_of
from support.recorded import recorded_text
from support.schedules import loop, module

DOT = "f32[8,8] dot({}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
BATCH, WIDTH = 64, 128


def classes(*lines: str, before: str = "", dot: str = "%v, %v") -> tuple[int, ...]:
    """Returns what is computed alike by a matmul of %v."""
    text = module(*lines, f"  ROOT %dot = {DOT.format(dot)}", before=before)
    (found,) = find_repeated(parse_module(text))
    return found.classes


def argument(sharding: str, name: str = "v") -> str:
    return f"  %{name} = f32[8,8] parameter(1), sharding={sharding}"


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        ("{replicated}", (0, 0, 0, 0)),
        ("{devices=[4,1]<=[4]}", (0, 1, 2, 3)),
        ("{devices=[2,1,2]<=[4] last_tile_dim_replicate}", (0, 0, 1, 1)),
        ("{devices=[2,1,2]<=[2,2]T(1,0) last_tile_dim_replicate}", (0, 1, 0, 1)),
        ("{devices=[2,1,2]0,3,1,2 last_tile_dim_replicate}", (0, 1, 1, 0)),
        ("{devices=[2,1,2]<=[4] last_tile_dims={manual}}", (0, 1, 2, 3)),
        ("{manual}", (0, 1, 2, 3)),
    ],
)
def test_arguments_are_alike_where_their_sharding_says_it(sharding, expected):
    assert classes(argument(sharding)) == expected


SPLIT, PAIRS = argument("{devices=[4,1]<=[4]}", "s"), "replica_groups={{0,1},{2,3}}"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([SPLIT, f"  %v = f32[8,8] all-gather(%s), {PAIRS}, dimensions={{0}}"], (0, 0, 1, 1)),
        ([SPLIT, f"  %v = f32[8,8] all-reduce(%s), {PAIRS}, to_apply=%add"], (0, 0, 1, 1)),
        ([SPLIT, f"  %v = f32[8,8] all-to-all(%s), {PAIRS}, dimensions={{0}}"], (0, 1, 2, 3)),
        ([argument("{replicated}", "s"), f"  %v = f32[8,8] all-to-all(%s), {PAIRS}, dimensions={{0}}"], (0, 1, 0, 1)),
        ([argument("{replicated}", "s"), "  %v = f32[8,8] collective-permute(%s), source_target_pairs={{0,1},{1,0}}"],
         (0, 0, 1, 1)),
        ([argument("{replicated}", "s"), "  %p = u32[] partition-id()", "  %v = f32[8,8] add(%s, %p)"], (0, 1, 2, 3)),
        ([SPLIT, "  %c = f32[8,8] constant({...})", "  %t = (f32[8,8], f32[8,8]) tuple(%s, %c)",
          "  %v = f32[8,8] get-tuple-element(%t), index=1"], (0, 0, 0, 0)),
        ([SPLIT, f"  %b = (f32[8,8], f32[8,8]) all-gather-start(%s), {PAIRS}, dimensions={{0}}",
          "  %v = f32[8,8] all-gather-done(%b)"], (0, 0, 1, 1)),
    ],
    ids=["gather", "sum", "exchange", "exchange of the same", "permute", "own number", "element", "asynchronous"],
)  # fmt: skip
def test_collectives_and_own_numbers_change_what_is_alike(lines, expected):
    assert classes(*lines) == expected


def test_a_loops_state_is_alike_if_it_stays_so():
    """Each iteration moves an array on by one place of the state: after two, what is split has come to the first."""
    state = "(s32[], f32[8,8], f32[8,8], f32[8,8])"
    before = f"""\
%cond {{
  %c = {state} parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

%body {{
  %s = {state} parameter(0)
  %j = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%j, %one)
  %second = f32[8,8] get-tuple-element(%s), index=2
  %third = f32[8,8] get-tuple-element(%s), index=3
  ROOT %t = {state} tuple(%next, %second, LAST, %third)
}}
"""
    lines = [SPLIT, "  %zero = s32[] constant(0)", "  %k = f32[8,8] constant({...})",
             f"  %init = {state} tuple(%zero, %k, %k, %s)", f"  %w = {state} while(%init), condition=%cond, body=%body",
             "  %v = f32[8,8] get-tuple-element(%w), index=1"]  # fmt: skip
    assert classes(*lines, before=before.replace("LAST", "%third")) == (0, 1, 2, 3)
    assert classes(*lines, before=before.replace("LAST", "%second")) == (0, 0, 0, 0)


def test_arithmetic_in_a_loop_counts_as_often_as_it_runs():
    computations, run = loop(f"  %k = f32[8,8] constant({{...}})\n  %d = {DOT.format('%k, %k')}", trips=7)
    (found,) = find_repeated(parse_module(module(run, before=computations)))
    assert (found.flops, found.num_times) == (7 * 2 * 8**3, 4)


def step(w, x):
    return jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2))(w)


@pytest.mark.parametrize(
    ("rows", "columns", "factor"),
    [(P(("data", "model")), P(), 1), (P("data"), P(), 2), (P(), P(None, ("data", "model")), 1), (P(), P(), 4)],
    ids=["split", "over half", "tensor", "whole"],
)
def test_the_factor_is_that_of_jaxs_own_count(rows, columns, factor):
    """FLOPs of the compiled program, on all devices, over those of the lowered one."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    shapes = [((WIDTH, WIDTH), columns), ((BATCH, WIDTH), rows)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for shape, spec in shapes]
    lowered = jax.jit(step, out_shardings=arguments[0].sharding).lower(*arguments)
    compiled = lowered.compile()
    count = 4 * (compiled.cost_analysis() or {})["flops"] / (lowered.cost_analysis() or {})["flops"]
    assert count == pytest.approx(factor, rel=0.1)
    found = find_repeated(parse_module(compiled.as_text() or ""))
    assert sum(e.flops for e in found) / sum(e.flops / e.num_times for e in found) == pytest.approx(factor)
    findings = {each.rule: each for each in meshloom.inspect(compiled, target="cpu-4").report.findings}
    assert ("repeated-work" in findings) == (factor > 1)
    if factor > 1:
        assert f"4 devices do {factor} times the arithmetic" in findings["repeated-work"].what
        assert findings["repeated-work"].where.startswith("over model: " if factor == 2 else "over data, model: ")


def test_devices_of_a_pair_that_compute_the_same_on_tpus_are_found():
    """Four layers of 1024 x 1024 on 2,048 rows, three matmuls each; half of the arithmetic of each device."""
    devices = ProgramDevices(plan_own_order(target_of("v5e-4")), is_assumed=True)
    program = inspect_text(recorded_text("toys/twice_v5e"), devices)
    (finding,) = (each for each in program.findings if each.rule == "repeated-work")
    assert "4 devices do 2 times" in finding.what
    assert "2 at a time" in finding.what
    assert f"costs each {4 * 3 * 2 * 1024 * 1024 * 2048 / 2 / 1e9:.1f} GFLOPs" in finding.what
    assert finding.where.startswith("over 2 (stride 1): toys/record.py:")


@pytest.mark.parametrize("name", ["v5e_fsdp16", "v5e_tensor", "v6e_sparsecore", "h100_fsdp", "foreign/maxtext_dense"])
def test_nothing_is_repeated_in_programs_that_split_their_batch(name):
    assert {each.num_times for each in find_repeated(parse_module(recorded_text(name)))} == {1}
