"""The one mechanism for parallel operations: how a strategy is chosen, and what a new operation needs."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from conftest import LINEAR_STACK, plan_of, spec_of
from meshloom.compiler.analysis.schedule_analysis import source_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.kernels import KernelCall, KernelCost
from meshloom.compiler.core.known import why_unknown
from meshloom.compiler.core.scopes import OperationName
from meshloom.compiler.core.traffic import ComputeKind
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.estimate.estimated_step import read_step
from meshloom.compiler.estimate.program_costs import read_costs
from meshloom.compiler.estimate.regions import price_regions
from meshloom.compiler.estimate.step_time import plan_hiding
from meshloom.compiler.parallel.choose import choose_strategy
from meshloom.compiler.parallel.operation import Cost, Exposed, Lowered, OpInputs, OpPlan, ParallelOp, Refusal, Strategy
from meshloom.compiler.parallel.registry import OPERATIONS
from meshloom.compiler.report.explain import plan_as_json
from meshloom.compiler.search.candidates import overlap_candidates
from meshloom.compiler.sharding.arrays import OpSite
from meshloom.compiler.spec.overlap_spec import StrategyChoice
from meshloom.compiler.step.train_step import build_loss
from meshloom.compiler.target.target import TargetPlan
from meshloom.compiler.xla.hlo import parse_module
from meshloom.compiler.xla.schedule.prices import Chip
from meshloom.compiler.xla.schedule.program import read_steps
from meshloom.compiler.xla.schedule.steps import Compute, every
from meshloom.models import Context, Model, Params

HERE = OpSite("op", "here", "layers")


FLOPS_EACH, NUM_BYTES = 1000, 12_345


@jax.custom_vjp
def _by_kernel(x: jax.Array) -> jax.Array:
    def doubling_kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = 2 * x_ref[...]

    return pl.pallas_call(doubling_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


_by_kernel.defvjp(lambda x: (_by_kernel(x), None), lambda _, gradient: (2 * gradient,))


class Doubling(ParallelOp):
    """An operation as a user's package would bring it: x + x, or 2 x by a strategy of its own."""

    kind = "doubling"
    title = "doubling"
    names = ("add", "multiply", "by_mean", "by_kernel")
    fallback = "add"

    def strategies(self, site: OpSite, inputs: OpInputs) -> Sequence[Strategy]:
        del site
        refusal = None if inputs.spec.precision.compute == "float32" else Refusal("it is for float32")
        multiply = Strategy("multiply", "by two", 2.0, cost=Cost(1.0, "seconds"), reason="1 s", refusal=refusal)
        by_mean = Strategy(
            "by_mean", "plus the mean over devices", refusal=Refusal("it is not the same", is_hard=False)
        )
        by_kernel = Strategy("by_kernel", "in Pallas", refusal=Refusal("it is slow", is_hard=False))
        return multiply, Strategy("add", "to itself", cost=Cost(2.0, "seconds"), reason="2 s"), by_mean, by_kernel

    def kernel_cost(self, call: KernelCall) -> KernelCost | None:
        """A kernel that nothing else knows: so many FLOPs for each element."""
        if "doubling_kernel" not in call.kernel:
            return None
        x = call.operands[0]
        return KernelCost(FLOPS_EACH * math.prod(x.shape), x.dtype, num_bytes=NUM_BYTES)

    def compute_kind(self, name: OperationName, *, is_pallas: bool) -> ComputeKind | None:
        return "matmul" if is_pallas and name.fact(self.kind) else None

    def hiding(self, plan: OpPlan, target: TargetPlan) -> Exposed | None:
        del plan, target
        return Exposed(0.5)

    def candidates(self, plans: Sequence[OpPlan]) -> Sequence[StrategyChoice]:
        return (plans[0].chosen.name, "by_mean") if plans else ()

    def lower(self, plan: OpPlan) -> Lowered | None:
        if plan.chosen.name == "by_mean":
            return lambda x: x + jax.lax.pmean(x, "fsdp")
        if plan.chosen.name == "by_kernel":
            return _by_kernel
        factor = plan.chosen.parameters
        return (lambda x: jnp.multiply(x, factor)) if factor else None


def _with_doubling(model: Model) -> Model:
    (stack,) = model.stacks

    def apply(params: Params, x: jax.Array, context: Context) -> jax.Array:
        x = context.operation("doubling", "layer", lambda x: x + x, x)
        return stack.layer.apply(params, x, context)

    return replace(model, stacks=(replace(stack, layer=replace(stack.layer, apply=apply)),))


def _planned(monkeypatch, *overrides):
    spec = spec_of("sharding=fsdp", *LINEAR_STACK, *overrides)
    build = type(spec.model).build
    monkeypatch.setattr(type(spec.model), "build", lambda self: _with_doubling(build(self)))
    return plan_run(spec, (*OPERATIONS, Doubling()))


def test_an_operation_from_outside_is_planned_shown_and_run(monkeypatch):
    plan = _planned(monkeypatch)
    chosen = plan.operation("doubling")
    assert (chosen.chosen.name, chosen.reason) == ("multiply", "1 s")
    shown = next(each for each in plan_as_json(plan)["operations"] if each["operation"] == "doubling")
    assert (shown["site"], shown["strategy"], shown["rejected"][0]["strategy"]) == ("layer", "multiply", "add")
    traced = _traced_loss(plan)
    added = _planned(monkeypatch, "parallel.doubling=add")
    assert added.operation("doubling").reason == "parallel.doubling=add"
    assert (traced["mul"] - _traced_loss(added)["mul"]) > 0


def test_an_operation_from_outside_has_its_scope_and_its_row_of_collectives(monkeypatch):
    """Its strategy adds over devices; the estimate and the table of compiled collectives say for which site."""
    plan = _planned(monkeypatch, "parallel.doubling=by_mean")
    rows = [one for one in estimate_step(plan).communication if one.origin.name == "doubling layer"]
    assert {(one.kind, one.mesh_axes) for one in rows} == {("all-reduce", ("fsdp",))}
    assert "forward" in {one.origin.in_pass for one in rows}
    shape, _ = read_costs(price_regions(read_step(plan), plan.target.compiler), frozenset(), plan.ops)
    assert "doubling layer" in {one.source for one in shape.transfers}
    assert plan_hiding(plan).of_operations["doubling layer"] == Exposed(0.5)
    psum = "jit(f)/jvp(layers)/doubling=layer/psum"
    assert str(source_of(psum, "all-reduce", (), plan.ops)) == "doubling layer, forward"
    assert str(source_of(psum, "all-reduce", ())) == "doubling=layer/psum, forward"


def test_an_operation_from_outside_prices_its_own_kernel_in_the_traced_step(monkeypatch):
    """A Pallas kernel that declares nothing: four layers of it, on a quarter of the tokens."""
    plan = _planned(monkeypatch, "parallel.doubling=by_kernel")
    estimate = estimate_step(plan)
    (layers,) = (part for part in estimate.roofline if part.name.startswith("layers"))
    (plain,) = (p for p in estimate_step(_planned(monkeypatch)).roofline if p.name.startswith("layers"))
    width = plan.operation("doubling").site.operands[0].shape[-1]
    tokens = plan.spec.global_batch_size * plan.spec.sequence_length // plan.mesh.num_devices
    assert estimate.unknown == ()
    assert (layers.flops or 0) - (plain.flops or 0) == FLOPS_EACH * tokens * width * plan.model.stacks[0].num_layers
    others = replace(plan, ops=OPERATIONS)
    assert "pallas_call" in why_unknown(estimate_step(others).figures.step_seconds)


@pytest.mark.parametrize("target", ["tpu_custom_call", "doubling_kernel_ffi"])
def test_an_operation_from_outside_prices_its_own_kernel_in_a_compiled_step(target):
    name = "jit(step)/jvp(layers)/doubling=layer/pallas_call"
    call = f'custom-call(%x), custom_call_target="{target}", metadata={{op_name="{name}"}}'
    program = parse_module(f"""HloModule m, is_scheduled=true

ENTRY %main (x: bf16[64,32]) -> bf16[64,32] {{
  %x = bf16[64,32]{{1,0}} parameter(0)
  ROOT %doubling_kernel.1 = bf16[64,32]{{1,0}} {call}
}}""")
    chip = Chip("tpu", None, {"bfloat16": 1e9}, 1e9, matmul_share=0.5)
    (found,) = every(read_steps(program, chip, (*OPERATIONS, Doubling())), Compute)
    assert found.seconds == pytest.approx(FLOPS_EACH * 64 * 32 / (0.5 * 1e9))
    assert (found.kind, found.priced_by) == ("matmul" if target == "tpu_custom_call" else "other", "flops")
    (nobodys,) = every(read_steps(program, chip, OPERATIONS), Compute)
    assert nobodys.priced_by == "nothing"


def test_an_operation_from_outside_is_refused_as_any_other(monkeypatch):
    with pytest.raises(ConfigError, match=r"parallel\.doubling: 'multiply' cannot be used: layer: it is for float32"):
        _planned(monkeypatch, "precision=bfloat16", "parallel.doubling=multiply")
    assert _planned(monkeypatch, "precision=bfloat16").operation("doubling").chosen.name == "add"
    with pytest.raises(ConfigError, match=r"parallel\.doublin: there is no such operation"):
        _planned(monkeypatch, "parallel.doublin=add")


def test_an_operation_from_outside_says_what_a_search_tries(monkeypatch):
    plan = _planned(monkeypatch, "target=v5p-16")
    first, *others = overlap_candidates(plan, estimate_step(plan))
    assert first.way.parallel["doubling"] == "multiply"
    tried = {one.way.parallel["doubling"]: one.overrides for one in others}
    assert set(tried) == {"multiply", "by_mean"}
    assert "parallel.doubling=by_mean" in tried["by_mean"]


def test_an_operation_comes_after_those_that_it_is_planned_from():
    with pytest.raises(ValueError, match="the operation 'lm_head' has to come after loss"):
        plan_run(spec_of(), OPERATIONS[::-1])


def _traced_loss(plan) -> Counter[str]:
    """Counts each primitive of the forward pass, loop bodies once."""
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), plan.abstract["params"])
    tokens = jax.ShapeDtypeStruct((plan.spec.global_batch_size, plan.spec.sequence_length), jnp.int32)
    with jax.set_mesh(plan.mesh.of_devices(jax.devices())):
        text = str(
            jax.make_jaxpr(build_loss(plan, with_gradients=False))(params, {"inputs": tokens, "targets": tokens})
        )
    return Counter({"mul": text.count(" = mul ")})


def _strategy(name: str, **values) -> Strategy:
    return Strategy(name, name, **values)


@pytest.mark.parametrize(
    ("strategies", "expected", "reason"),
    [
        ([_strategy("add", cost=Cost(3, "seconds"), reason="3"), _strategy("b", cost=Cost(2, "seconds"), reason="2")],
         "b", "2"),
        ([_strategy("add", cost=Cost(3, "seconds"), reason="the first"), _strategy("b", cost=Cost(2, "bytes"))],
         "add", "the first"),
        ([_strategy("a", refusal=Refusal("of the weather")), _strategy("add")], "add", "a is not used: of the weather"),
        ([_strategy("a", refusal=Refusal("it hides nothing", is_hard=False), cost=Cost(1, "seconds")),
          _strategy("add")],
         "add", "a is not used: it hides nothing"),
    ],
)  # fmt: skip
def test_costs_decide_where_they_compare_else_the_order(strategies, expected, reason):
    plan = choose_strategy(Doubling(), HERE, strategies, "auto")
    assert (plan.chosen.name, plan.reason) == (expected, reason)


def test_a_named_strategy_runs_although_auto_objects_and_not_where_it_is_refused():
    objected = [_strategy("multiply", refusal=Refusal("it hides nothing", is_hard=False)), _strategy("add")]
    assert choose_strategy(Doubling(), HERE, objected, "multiply").chosen.name == "multiply"
    refused = [_strategy("multiply", refusal=Refusal("of the weather", loss="speed")), _strategy("add")]
    plan = choose_strategy(Doubling(), HERE, refused, "multiply")
    assert (plan.chosen.name, plan.reason, plan.missed) == ("add", "of the weather", None)
    missed = choose_strategy(Doubling(), HERE, refused, "auto").missed
    assert missed == "speed: multiply is not used: of the weather"


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize(
    ("overrides", "kind", "kinds"),
    [
        (("sharding=fsdp", "parallel.embedding=all_to_all"), "embedding", {"all-to-all"}),
        (("sharding=fsdp", "parallel.embedding=all_gather"), "embedding", {"all-gather", "reduce-scatter"}),
        (("sharding=fsdp_tensor", "mesh.tensor=4", "parallel.matmul=collective_matmul"), "matmul",
         {"collective-permute"}),
        (("sharding=fsdp", "parallel.lm_head=whole"), "lm_head", {"all-gather", "reduce-scatter"}),
        (("sharding=fsdp", "parallel.lm_head=vocab_chunks", "model.vocab_size=264"), "lm_head",
         {"all-gather", "reduce-scatter"}),
    ],
)  # fmt: skip
def test_collectives_of_a_strategy_are_in_the_traced_step(overrides, kind, kinds):
    """The estimate reads the traced step and knows no strategy: each collective of one is there, of the same size."""
    plan = plan_of(*overrides)
    there = {(one.kind, one.mesh_axes, one.bytes_each) for one in estimate_step(plan).communication}
    promised = [one for each in plan.operations_of(kind) for one in each.chosen.collectives]
    assert {one.kind for one in promised} >= kinds
    for one in promised:
        sizes = [size for each, axes, size in there if (each, axes) == (one.kind, one.mesh_axes)]
        assert one.bytes_each in sizes, (one, sizes)
