"""Sites of operations: each knows its piece and the parameters that it reads, compared with the traced program."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Literal, jaxprs_in_params

from conftest import LINEAR_STACK, plan_of, spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.parallel.choose import choice_of
from meshloom.compiler.report.explain import plan_as_json
from meshloom.compiler.sharding.arrays import build_model, find_arrays
from meshloom.models import Context, Model, Piece, split_aux

# Primitives after which an array is still the parameter, in another shape, order or type.
MOVES = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "slice", "squeeze", "transpose"})
PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "ragged_dot", "gather"})
DENSE = ("model.num_dense_layers=1", "model.dense_mlp_dim=64", "model.num_shared_experts=1", "model.mlp_dim=32")
TWO_WIDTHS = ("model=tiny_moe", *DENSE, "target=v5p-16", "sharding=fsdp_tensor", "mesh.tensor=4")
SPLIT = "collective_matmul"


def test_a_model_is_built_and_traced_once_for_all_plans_of_its_size():
    one, other, longer = (plan_run(spec_of("model=tiny", key)) for key in ("seed=0", "seed=1", "sequence_length=64"))
    assert one is not other
    assert one.model is other.model is longer.model
    assert one.arrays.activations is other.arrays.activations
    assert {x.shape[1] for x in longer.arrays.activations if x.path == "residual"} == {64}


@pytest.mark.parametrize(
    "overrides",
    [
        ("model=tiny",),
        ("model=tiny_moe",),
        ("model=gpt2_124m",),
        ("model=gemma2_2b", "model.num_layers=4"),
        ("model=deepseek_v3", "model.num_layers=4", "model.num_kv_heads=16"),
        LINEAR_STACK,
    ],
    ids=lambda overrides: overrides[0].removeprefix("model="),
)
def test_every_parameter_that_meets_an_activation_is_that_of_a_site(overrides):
    """Against the traced pieces: what a product reads, followed back to an input through changes of shape and type."""
    spec = spec_of(*overrides)
    built = build_model(spec)
    found = {path for site in find_arrays(spec, built).sites for path in site.parameters}
    assert found == set(_contracted(built))
    assert found


def _contracted(model: Model) -> Iterator[str]:
    shape_BT = (2, 16)
    context = Context(jnp.arange(16)[None], lambda _, x, *axes, **__: x)
    x = jax.ShapeDtypeStruct(shape_BT, jnp.int32)
    for name, piece in {"embed": model.embed, **{s.name: s.layer for s in model.stacks}, "head": model.head}.items():

        def apply(params: Any, x: Any, piece: Piece = piece) -> Any:
            return split_aux(piece.apply(params, x, context))[0]

        traced, x = jax.make_jaxpr(apply, return_shape=True)(piece.abstract, x)
        paths = [f"embed/{model.tied[path]}" if name == "head" and path in model.tied else f"{name}/{path}"
                 for path in leaves_by_path(piece.abstract)]  # fmt: skip
        yield from _products(traced.jaxpr, [*paths, None])


def _products(jaxpr: Any, inputs: list[str | None]) -> Iterator[str]:
    """Yields the parameters among the inputs that products within a program read."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    for equation in jaxpr.eqns:
        read = [None if isinstance(x, Literal) else known.get(x) for x in equation.invars]
        if equation.primitive.name in PRODUCTS:
            yield from filter(None, read)
        elif equation.primitive.name in MOVES:
            known[equation.outvars[0]] = read[0]
        for inner in jaxprs_in_params(equation.params):
            yield from _products(inner, read)


@pytest.mark.ci
def test_two_pieces_with_one_name_have_strategies_of_their_own():
    """The first layer has an MLP of 64, the others a shared expert of 32: one name, two sites, two choices."""
    plan = plan_of(*TWO_WIDTHS, f"parallel.matmul={{dense_layers/mlp_output:{SPLIT}}}")
    sites = {each.site.path: each for each in plan.operations_of("matmul") if each.site.name == "mlp_output"}
    assert {path: each.chosen.name for path, each in sites.items()} == {
        "dense_layers/mlp_output": SPLIT, "layers/mlp_output": "plain"
    }  # fmt: skip
    assert [each.site.operands[1].shape for each in sites.values()] == [(64, 32), (32, 32)]
    assert [each.site.parameters for each in sites.values()] == [
        ("dense_layers/mlp/down_ME",), ("layers/mlp/shared/down_ME",)
    ]  # fmt: skip
    in_rings = sum(one.count for one in estimate_step(plan).communication if "in a ring" in one.origin.name)
    assert in_rings == 2 * 3  # around four devices both ways, of one of three layers
    shown = {each["piece"]: each["parameters"] for each in plan_as_json(plan)["operations"]
             if each["site"] == "mlp_output"}  # fmt: skip
    assert shown == {each.site.piece: list(each.site.parameters) for each in sites.values()}


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        (f"dense_layer/mlp_output:{SPLIT}", "did you mean 'dense_layers/mlp_output'?"),
        (f"head/mlp_output:{SPLIT}", "mlp_output"),
        ("dense_layers/mlp_output:collective", "did you mean 'collective_matmul'?"),
        (f"layers/mlp_up:{SPLIT}", "no mesh axis splits"),
    ],
)
def test_a_choice_for_a_piece_that_cannot_be_is_one_error(choice, why):
    with pytest.raises(ConfigError, match=re.escape(why)) as error:
        plan_of(*TWO_WIDTHS, f"parallel.matmul={{{choice}}}")
    (problem,) = error.value.problems
    assert problem.where == f"parallel.matmul.{choice.rpartition(':')[0]}"


def test_a_name_is_a_choice_for_all_pieces_and_a_path_comes_before_it():
    plan = plan_of(*TWO_WIDTHS, f"parallel.matmul={{mlp_output:{SPLIT},layers/mlp_output:plain}}")
    assert choice_of(plan.operations_of("matmul"))["dense_layers/mlp_output"] == SPLIT
    chosen = {each.site.path: each.chosen.name for each in plan.operations_of("matmul")}
    assert (chosen["dense_layers/mlp_output"], chosen["layers/mlp_output"]) == (SPLIT, "plain")


def _model_with(apply_layer: Any, spec: Any) -> Model:
    built = build_model(spec)
    (stack,) = built.stacks
    return replace(built, stacks=(replace(stack, layer=replace(stack.layer, apply=apply_layer)),))


def test_a_computed_weight_is_allowed_and_has_no_parameter():
    spec = spec_of(*LINEAR_STACK)

    def apply(params: Any, x: jax.Array, context: Context) -> jax.Array:
        kernel = params["kernel_EM"]
        x = context.matmul("first", "bte,em->btm", x, kernel)
        return context.matmul("second", "bte,em->btm", x, kernel + kernel.T)

    sites = find_arrays(spec, _model_with(apply, spec)).sites
    assert {site.name: site.parameters for site in sites if site.piece == "layers"} == {
        "first": ("layers/kernel_EM",), "second": ()
    }  # fmt: skip


def test_rows_of_a_computed_table_are_read_whole_and_demanded_otherwise_an_error(monkeypatch):
    spec = spec_of(*LINEAR_STACK, "sharding=fsdp")
    built = build_model(spec)

    def apply(params: Any, tokens: jax.Array, context: Context) -> jax.Array:
        return context.embedding_lookup("halved", params["table_VE"] / 2, tokens)

    monkeypatch.setattr(type(spec.model), "build", lambda _: replace(built, embed=replace(built.embed, apply=apply)))
    assert plan_run(spec).operation("embedding").chosen.name == "all_gather"
    demanded = spec.model_copy(update={"parallel": {**spec.parallel, "embedding": "all_to_all"}})
    with pytest.raises(ConfigError, match="'all_to_all' cannot be used: halved: its table is not a parameter"):
        plan_run(demanded)


def test_one_name_for_operands_of_two_shapes_in_one_piece_is_an_error():
    spec = spec_of(*LINEAR_STACK)

    def apply(params: Any, x: jax.Array, context: Context) -> jax.Array:
        kernel = params["kernel_EM"]
        narrow = context.matmul("both", "bte,em->btm", x, kernel[:, :2])
        return context.matmul("both", "bte,em->btm", x, kernel) + narrow.sum()

    with pytest.raises(ValueError, match="matmul 'both' is called in 'layers' with operands of shapes"):
        find_arrays(spec, _model_with(apply, spec))
