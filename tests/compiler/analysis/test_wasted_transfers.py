"""Transfers that another layout or order would save: programs made by hand with a known fault, and compiled ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshloom
from meshloom.compiler.analysis.compiled_step import inspect_text
from meshloom.compiler.analysis.program_devices import ProgramDevices
from meshloom.compiler.schema import CollectiveReport, Finding
from meshloom.compiler.target.placement import plan_own_order
from support.programs import target_of
from support.recorded import recorded_text
from support.schedules import GROUPS, compute, module

NUM, MIB = 2**20, 2**20  # elements of a gathered array in bfloat16: 2 MiB
RULES = {"gathered-then-sliced", "stack-gathered-whole", "upcast-transfer"}


def inspected(text: str, target: str = "v5e-4") -> tuple[dict[str, Finding], dict[str, CollectiveReport]]:
    found = inspect_text(text, ProgramDevices(plan_own_order(target_of(target)), is_assumed=True))
    wasted = {each.rule: each for each in found.findings if each.rule in RULES}
    return wasted, {each.name: each for each in found.analysis.collectives}


def gathered(*after: str, sent: str = f"bf16[{NUM // 4}]", before: str = "", dtype: str = "bf16") -> str:
    """Returns a program that gathers %y as %g."""
    lines = [f"  %y = {sent}{{0}} parameter(1)", "  %i = s32[] parameter(2)", compute("work", 5)]
    gather = f"  %g = {dtype}[{NUM}]{{0}} all-gather(%y), {GROUPS}, dimensions={{0}}"
    return module(*lines, *after, before=before).replace("  %GATHER", gather)


def part(size: int, of: str = "%g", name: str = "s", dtype: str = "bf16") -> str:
    return f"  %{name} = {dtype}[{size}]{{0}} dynamic-slice({of}, %i), dynamic_slice_sizes={{{size}}}"


def root(line: str) -> str:
    return line.replace("  %", "  ROOT %", 1)


@pytest.mark.parametrize(
    ("after", "used"),
    [
        ([root(part(NUM // 4))], 0.25),
        ([part(NUM // 4), f"  %t = bf16[{NUM // 4}]{{0}} slice(%g), slice={{[0:{NUM // 4}]}}",
          f"  ROOT %both = bf16[{NUM // 4}]{{0}} add(%s, %t)"], 0.5),
        ([f"  %c = f32[{NUM}]{{0}} convert(%g)", root(part(NUM // 4, "%c", dtype="f32"))], 0.25),
        ([f"  ROOT %last = bf16[8]{{0}} slice(%g), slice={{[{NUM - 8}:{NUM}]}}"], 8 / NUM),
        ([part(NUM // 4), f"  ROOT %n = bf16[{NUM}]{{0}} negate(%g)"], None),
        ([part(NUM // 4), f"  ROOT %t = (bf16[{NUM}]{{0}}, bf16[{NUM // 4}]{{0}}) tuple(%g, %s)"], None),
        ([f"  ROOT %s = bf16[{NUM - 8}]{{0}} slice(%g), slice={{[0:{NUM - 8}]}}"], None),
        ([part(NUM // 2), part(NUM // 4, name="u"),
          f"  ROOT %c = bf16[{NUM * 3 // 4}]{{0}} concatenate(%s, %u)"], None),
        ([part(NUM // 4), f'  %k = bf16[{NUM // 4}]{{0}} custom-call(%g), custom_call_target="k"',
          f"  ROOT %both = bf16[{NUM // 4}]{{0}} add(%s, %k)"], None),
    ],
    ids=["a part", "two parts", "after a cast", "the last", "also whole", "is a result", "all but the last", "most",
         "by a kernel"],
)  # fmt: skip
def test_a_gathered_array_of_which_a_part_is_used_is_found(after, used):
    found, collectives = inspected(gathered("  %GATHER", *after))
    assert ("gathered-then-sliced" in found) == (used is not None)
    if used is not None:
        what = found["gathered-then-sliced"].what
        seconds = (collectives["g"].exposed_seconds or 0) * (1 - used)
        assert f"{2 * (1 - used):.1f} MiB and {seconds * 1e6:.3g} µs of waiting" in what
        assert "(g, once): sliced by" in found["gathered-then-sliced"].where


@pytest.mark.parametrize(
    ("sent", "before", "after", "saved"),
    [
        ("convert(%n)", "bf16", [], "1.0 MiB"),
        ("bitcast(%c)", "bf16", ["  %c = f32[{q}]{{0}} convert(%n)"], "2.0 MiB"),
        ("negate(%c)", "bf16", ["  %c = f32[{q}]{{0}} convert(%n)"], None),  # computed in float32
        ("convert(%n)", "f64", [], None),
    ],
    ids=["cast", "cast and viewed", "computed", "narrowed"],
)
def test_a_cast_before_a_gather_is_found(sent, before, after, saved):
    quarter = NUM // 4
    lines = [f"  %n = {before}[{quarter}]{{0}} parameter(1)", *(each.format(q=quarter) for each in after),
             f"  %y = f32[{quarter}]{{0}} {sent}", f"  %g = f32[{NUM}]{{0}} all-gather(%y), {GROUPS}, dimensions={{0}}",
             f"  ROOT %out = f32[{NUM}]{{0}} negate(%g)", compute("work", 5)]  # fmt: skip
    found, collectives = inspected(module(*lines))
    assert ("upcast-transfer" in found) == (saved is not None)
    if saved is not None:
        finding, seconds = found["upcast-transfer"], collectives["g"].exposed_seconds
        assert f"2.0 MiB and {1e6 * (seconds or 0) / 2:.3g} µs of waiting a step more than needed" in finding.what
        assert finding.fix == "cast after the all-gather: bfloat16 crosses instead"


@pytest.mark.parametrize(
    ("uses", "is_found"),
    [
        (["convert(%g)"], True),
        (["convert(%g)", "convert(%v)"], True),
        (["convert(%g)", "fusion(%g), kind=kLoop, calls=%inner"], True),
        (["convert(%g)", "fusion(%g), kind=kLoop, calls=%wide"], False),
    ],
    ids=["cast", "also a view", "also in a fusion", "also as it is"],
)
def test_a_gathered_array_that_is_only_used_narrower_is_found(uses, is_found):
    wide, narrow = f"f32[{NUM}]{{0}}", f"bf16[{NUM}]{{0}}"
    fused = f"""\
%inner {{
  %p = {wide} parameter(0)
  ROOT %c = {narrow} convert(%p)
}}

%wide {{
  %p = {wide} parameter(0)
  %n = {wide} negate(%p)
  ROOT %c = {narrow} convert(%n)
}}
"""
    lines = [f"  %y = f32[{NUM // 4}]{{0}} parameter(1)", f"  %g = {wide} all-gather(%y), {GROUPS}, dimensions={{0}}",
             f"  %v = {wide} bitcast(%g)", *(f"  %u{n} = {narrow} {use}" for n, use in enumerate(uses)),
             f"  ROOT %t = ({narrow}, {narrow}) tuple(%u0, %u{len(uses) - 1})", compute("work", 5)]  # fmt: skip
    found, _ = inspected(module(*lines, before=fused))
    assert ("upcast-transfer" in found) == is_found
    if is_found:
        assert found["upcast-transfer"].fix == "cast before the all-gather: bfloat16 crosses instead"


def test_a_sum_in_float32_is_not_an_upcast():
    """It is more accurate, whatever goes in."""
    lines = [f"  %n = bf16[{NUM}]{{0}} parameter(1)", f"  %y = f32[{NUM}]{{0}} convert(%n)",
             f"  ROOT %r = f32[{NUM}]{{0}} all-reduce(%y), {GROUPS}, to_apply=%add", compute("work", 5)]  # fmt: skip
    assert inspected(module(*lines))[0] == {}


def test_a_stack_that_a_compiler_for_tpus_gathers_in_each_iteration_is_found():
    """16 layers of 2 MiB: forward and backward, each of 16 iterations gathers all, of which it needs one."""
    found, collectives = inspected(recorded_text("toys/stack_v5e"))
    assert set(found) == {"stack-gathered-whole"}
    finding = found["stack-gathered-whole"]
    gathers = [each for each in collectives.values() if each.kind == "all-gather"]
    assert sum(each.bytes for each in gathers) == 2 * 16 * 16 * 2 * MIB
    assert "32 all-gathers" in finding.what
    assert f"{2 * 16 * 15 * 2:.1f} MiB" in finding.what
    assert "layers, a stack of 16" in finding.where
    assert "toys/record.py:" in finding.where


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:4]), ("fsdp",))


def compiled(mesh: Mesh, function, *arguments: tuple[tuple[int, ...], P]) -> dict[str, Finding]:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for shape, spec in arguments]
    report = meshloom.inspect(jax.jit(function).lower(*shapes), target="cpu-4").report
    return {each.rule: each for each in report.findings if each.rule in RULES}


@pytest.mark.parametrize(("spec", "is_found"), [(P("fsdp"), True), (P(None, "fsdp"), False), (P(), False)])
def test_a_stack_is_only_found_where_it_is_split_along_its_layers(mesh, spec, is_found):
    def scanned(layers, x):
        return jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, layers)[0]

    found = compiled(mesh, scanned, ((8, 512, 512), spec), ((512, 512), P("fsdp")))
    assert set(found) == ({"stack-gathered-whole"} if is_found else set())
    if is_found:
        assert "8.0 MiB a step" in found["stack-gathered-whole"].what
        assert "layers, a stack of 8" in found["stack-gathered-whole"].where


@pytest.mark.parametrize(("after", "fix"), [(P("fsdp"), "leave it split"), (P(None, "fsdp"), "all-to-all"), (P(), "")])
def test_a_layout_that_is_whole_between_two_split_ones_is_found(mesh, after, fix):
    def step(x, w):
        x = jax.lax.with_sharding_constraint(jnp.tanh(x), NamedSharding(mesh, P("fsdp")))
        x = jax.lax.with_sharding_constraint(jax.lax.optimization_barrier(x), NamedSharding(mesh, P()))
        x = jax.lax.with_sharding_constraint(jax.lax.optimization_barrier(x), NamedSharding(mesh, after))
        return x * 2 + w

    found = compiled(mesh, step, ((1024, 1024), P("fsdp")), ((1024, 1024), after))
    assert set(found) == ({"gathered-then-sliced"} if fix else set())
    if fix:
        assert fix in found["gathered-then-sliced"].fix
        assert "3.0 MiB a step more than needed" in found["gathered-then-sliced"].what
