"""A model of a user's own with primitives that ours do not have: each is counted by a formula, or named as unknown."""

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import LINEAR_STACK, SMALL
from meshloom.compiler.analysis.compiled_step import CompiledStep
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.core.user_code import code_allowed_from
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run, report_of
from meshloom.compiler.estimate.estimate import StepEstimate, estimate_step
from meshloom.compiler.plan import Plan
from meshloom.compiler.report.explain import explain, plan_as_json
from meshloom.compiler.report.views.facts import unknown_values
from meshloom.compiler.xla.aot import Built, LoweredStep, OutOfMemory
from meshloom.compiler.xla.programs import Fingerprint

MODEL = """
import jax, jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from pydantic import PositiveInt
from meshloom.models import Model, ModelConfig, Stack, build_piece

{MIX}

class Mine(ModelConfig):
    embed_dim: PositiveInt
    num_layers: PositiveInt

    def build(self):
        return Model(
            embed=build_piece(lambda rngs: Embed(self, rngs)),
            stacks=(Stack("layers", build_piece(lambda rngs: Layer(self, rngs)), self.num_layers),),
            head=build_piece(lambda rngs: Head(self, rngs)),
        )

class Embed(nnx.Module):
    def __init__(self, config, rngs):
        self.table = nnx.Param(jnp.zeros((config.vocab_size, config.embed_dim)), out_sharding=("vocab", "embed"))

    def __call__(self, tokens, context):
        return context.activation("embedded", self.table[tokens], "batch", "length", "embed")

class Layer(nnx.Module):
    def __init__(self, config, rngs):
        self.kernel = nnx.Param(jnp.zeros((config.embed_dim, config.embed_dim)), out_sharding=("embed", "mlp"))

    def __call__(self, x, context):
        return context.activation("residual", mix(x, self.kernel[...]), "batch", "length", "embed")

class Head(nnx.Module):
    def __init__(self, config, rngs):
        self.kernel = nnx.Param(jnp.zeros((config.embed_dim, config.vocab_size)), out_sharding=("embed", "vocab"))

    def __call__(self, x, context):
        return context.activation("logits", x @ self.kernel[...], "batch", "length", "vocab")
"""
RAGGED_DOT = """
def mix(x, w):
    rows = x.reshape(-1, x.shape[-1])
    return lax.ragged_dot(rows, jnp.stack([w, w, w, w]), jnp.full((4,), len(rows) // 4)).reshape(x.shape)
"""
CONVOLUTION = """
def mix(x, w):
    return lax.conv_general_dilated(x, jnp.stack([w, w, w]), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
"""
FFT = """
def mix(x, w):
    return x @ w + lax.fft(x.astype(jnp.complex64), "FFT", (x.shape[-1],)).real
"""
WHILE = """
def mix(x, w):
    fixed = lax.stop_gradient(w)
    power = lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: x @ fixed, lax.stop_gradient(x))
    return x @ w + power
"""
SMALL_WHILE = WHILE.replace("lambda x: x @ fixed", "lambda x: x / 2")
KERNEL = """
def my_kernel(x_ref, w_ref, out_ref):
    out_ref[...] = x_ref[...] @ w_ref[...]

@jax.custom_vjp
def mix(x, w):
    return pl.pallas_call(my_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, w)

mix.defvjp(lambda x, w: (mix(x, w), (x, w)), lambda saved, y: (y @ saved[1].T, jnp.einsum("bti,btj->ij", saved[0], y)))
"""
ESTIMATE = "cost_estimate=pl.CostEstimate(flops=2 * x.size * w.shape[1], transcendentals=0, bytes_accessed=12345)"
COUNTED_KERNEL = KERNEL.replace("x.dtype))", f"x.dtype), {ESTIMATE})")
FACTORIZATION = """
def mix(x, w):
    return x @ w + x @ jnp.linalg.qr(lax.stop_gradient(w))[0]
"""
THEIR_PRIMITIVE = """
from jax.extend.core import Primitive
from jax.interpreters import mlir

def halved(x, w):
    return (x @ w) / 2

theirs = Primitive("halved_matmul")
theirs.def_abstract_eval(lambda x, w: x)
mlir.register_lowering(theirs, mlir.lower_fun(halved, multiple_results=False))

def mix(x, w):
    return x @ w + theirs.bind(lax.stop_gradient(x), lax.stop_gradient(w))
"""
SEQUENCES, LENGTH, WIDTH, LAYERS, VOCAB = 16, 16, 32, 3, 264
TOKENS = SEQUENCES * LENGTH
Plans = Callable[..., Plan]


@pytest.fixture
def plan_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plans]:
    """(definition of `mix`, overrides) -> the plan of a small run on eight chips with that in each layer."""
    monkeypatch.chdir(tmp_path)

    def plan(mix: str, *overrides: str) -> Plan:
        Path("their_mix.py").write_text(MODEL.replace("{MIX}", mix.strip()))
        declared = (*SMALL, *LINEAR_STACK, "target=v5e-8", "model.family=their_mix:Mine", "remat=none", *overrides)
        with code_allowed_from(["their_mix"]):
            return read_spec(Request(declared), then=plan_run)

    yield plan
    sys.modules.pop("their_mix", None)


def roofline_flops(plan: Plan, estimate: StepEstimate) -> int:
    """Returns the FLOPs of all devices."""
    return plan.mesh.num_devices * sum(part.flops or 0 for part in estimate.roofline)


def explained(plan: Plan) -> str:
    out = io.StringIO()
    explain(plan, Console(out, off_terminal_width=400))
    return out.getvalue()


HEAD = 2 * TOKENS * WIDTH * VOCAB
MATMUL = 2 * TOKENS * WIDTH * WIDTH
COUNTED = {  # FLOPs of one layer, by hand: forward and backward
    "ragged_dot": (RAGGED_DOT, 3 * MATMUL),  # each row meets the weights of one group
    "convolution": (CONVOLUTION, 3 * 3 * MATMUL),  # three taps
    "fft": (FFT, 3 * MATMUL + 2 * 5 * TOKENS * WIDTH * 5),  # 5 N log2 N, and as much for the transform of its gradient
    "kernel that says its cost": (COUNTED_KERNEL, 3 * MATMUL),
    "a loop of single elements": (SMALL_WHILE, 3 * MATMUL),
}


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize("case", COUNTED)
def test_flops_of_what_is_no_matmul_are_the_formulas(plan_with, case):
    mix, of_layer = COUNTED[case]
    plan = plan_with(mix)
    estimate = estimate_step(plan)
    assert plan.model_flops_per_step == LAYERS * of_layer + 3 * HEAD
    assert roofline_flops(plan, estimate) == plan.model_flops_per_step
    assert "an unknown number of FLOPs" not in explained(plan)


def test_a_kernel_moves_the_bytes_that_it_says(plan_with):
    """Once forward in each of three layers: so much more where it says ten times as many. Files of one size, written
    in one second, are the same to Python's cache of bytecode."""
    moved = []
    for said in (12345, 10 * 12345):
        sys.modules.pop("their_mix", None)
        plan = plan_with(COUNTED_KERNEL.replace("bytes_accessed=12345", f"bytes_accessed={said}"))
        moved.append(next(part.hbm_bytes or 0 for part in estimate_step(plan).roofline if part.name == "layers (x3)"))
    assert moved[1] - moved[0] == LAYERS * 9 * 12345


UNKNOWN = {  # what is named, at which line, why, and what to do
    "kernel": (KERNEL, "pallas_call 'my_kernel'", "return pl.pallas_call", "no cost estimate", "pass cost_estimate="),
    "while": (WHILE, "while", "lax.while_loop", "the number of its trips is not known", "use jax.lax.scan"),
    "factorization": (FACTORIZATION, "qr", "jnp.linalg.qr", "calls lapack_sgeqrf", "write it with"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_cannot_be_counted_is_unknown_and_named(plan_with, case):
    mix, name, line, why, fix = UNKNOWN[case]
    plan = plan_with(mix)
    place = f"their_mix.py:{1 + next(n for n, text in enumerate(source_lines()) if line in text)}"
    told = plan_as_json(plan)
    assert told["program"]["model_flops_per_step"] is None
    assert isinstance(plan.work.mfu(1.0), Unknown)
    reason = told["unknown"]["program.model_flops_per_step"]
    for part in (f"{name} at {place}, in layers", why, fix):
        assert part in reason
    estimate = told["estimate"]
    assert estimate["roofline_seconds"] is None
    assert told["unknown"]["estimate.roofline_seconds"]
    for figure in ("flops", "hbm_bytes"):
        (index,) = (n for n, part in enumerate(estimate["roofline"]) if part[figure] is None)
        assert estimate["roofline"][index]["name"] == "layers (x3)"
        assert why in told["unknown"][f"estimate.roofline[{index}].{figure}"]
    lines = [text for text in explained(plan).split("\n") if text.startswith("unknown") and name in text]
    assert len(lines) == 1
    assert place in lines[0]


def test_the_report_of_a_step_that_cannot_be_counted_says_why(plan_with):
    plan = plan_with(WHILE, "precision=bfloat16")
    built = Built(None, None, OutOfMemory(None, 1, ""), {}, {}, 1.0, ())
    programs: Any = SimpleNamespace(options_left_out=())
    lowered = LoweredStep(programs, Fingerprint({}, {}, {"jax": "", "jaxlib": ""}, {}, {}, {}), 1.0)
    unread = Unknown("it was refused")
    report = report_of(CompiledStep(plan, estimate_step(plan), lowered, built, unread, unread))
    reasons = dict(unknown_values(report))
    layers = next(n for n, part in enumerate(report.roofline) if part.name == "layers (x3)")
    for path in ("program.model_flops_per_step", "compiled.roofline_seconds", f"roofline[{layers}].flops"):
        assert reasons[path].startswith("while at their_mix.py:11, in layers")


def source_lines() -> list[str]:
    return Path("their_mix.py").read_text().split("\n")


def test_a_loop_of_unknown_length_leaves_the_bound_open(plan_with):
    """No arithmetic is none in however many trips; the bytes that it moves are not."""
    estimate = estimate_step(plan_with(SMALL_WHILE))
    layers = next(part for part in estimate.roofline if part.name.startswith("layers"))
    assert not isinstance(layers.flops, Unknown)
    assert isinstance(layers.hbm_bytes, Unknown)
    assert layers.bound is None
    (one,) = estimate.unknown
    assert one.name == "while"


def test_a_primitive_of_theirs_is_counted_by_jax(plan_with):
    """Its lowering is a matmul and a division of each element; without a lowering it is unknown."""
    plan = plan_with(THEIR_PRIMITIVE)
    own = MATMUL + TOKENS * WIDTH
    assert plan.model_flops_per_step == LAYERS * 3 * (MATMUL + own) + 3 * HEAD
    assert "halved_matmul at their_mix.py:" in explained(plan)
    sys.modules.pop("their_mix")
    plan = plan_with(THEIR_PRIMITIVE.replace("mlir.register_lowering(theirs, ", "dict(unused="))
    assert plan.model_flops_per_step is None
    assert "JAX cannot lower it by itself" in str(plan.model_flops.unknown[0])


def test_an_unknown_layout_is_whole_and_said_so(plan_with):
    """The weights of the kernel are split over tensor: they are gathered for it, and the line says so."""
    plan = plan_with(COUNTED_KERNEL, "sharding=fsdp_tensor", "mesh.tensor=2")
    estimate = estimate_step(plan)
    assert ["taken as whole on each device" in str(one) for one in estimate.unknown] == [True]
    gathered = [c for c in estimate.communication if c.origin.name == "layers: pallas_call over a split dimension"]
    assert [(c.kind, c.mesh_axes, c.bytes_each, c.count) for c in gathered] == [
        ("all-gather", ("tensor",), 4 * WIDTH * WIDTH, LAYERS)
    ]


def test_an_fft_takes_the_dimension_that_it_transforms_whole(plan_with):
    mix = FFT.replace("x @ w + lax.fft(x", "lax.fft((x @ w)")
    plan = plan_with(mix, "sharding=fsdp_tensor", "mesh.tensor=2")
    sources = {c.origin.name for c in estimate_step(plan).communication if c.kind == "all-gather"}
    assert "layers: fft over a split dimension" in sources
