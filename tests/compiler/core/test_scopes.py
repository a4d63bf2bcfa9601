"""Names of operations: what the step writes around them is read back from traced and from lowered programs."""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from meshloom.compiler.core.scopes import (
    ATTENTION,
    UPDATE,
    WORKING_PARAMETERS,
    OperationName,
    end_scope,
    fact_scope,
    nested_scope,
    piece_scope,
    rows_scope,
    slot_scope,
    weight_scope,
)

COMPILER = Path(__file__).parents[3] / "compiler"
PATHS = ("layers/mlp/up_EM", "layers/mlp/up_EM_2", "embed/table_VE")
BACKWARD = "jit(train_step)/shard_map/transpose(jvp(layers))/while/body/closed_call/checkpoint"


def step(x: Array) -> Array:
    """One operation in each scope, each known by its primitive."""
    with jax.named_scope(WORKING_PARAMETERS):
        x = x.astype(jnp.bfloat16)

    def loss(x: Array) -> Array:
        with jax.named_scope(piece_scope("embed")), jax.named_scope(rows_scope("embed/table_VE")):
            x = jnp.sin(x)
        with jax.named_scope(piece_scope("blocks")):
            with jax.named_scope(weight_scope("layers/mlp/up_EM")):
                x = jnp.tanh(x)
            with jax.named_scope(ATTENTION):
                x = jnp.exp(x)
            with jax.named_scope(fact_scope("ring", "mlp_output")):
                x = jax.lax.rsqrt(x)
            with jax.named_scope(slot_scope("BW")), jax.named_scope(end_scope("last")):
                x = jax.lax.cond(x[0] > 0, jax.lax.cbrt, lambda x: x, x)
        return jnp.sum(x.astype(jnp.float32))

    gradient = jax.grad(jax.checkpoint(loss))(x)
    with jax.named_scope(UPDATE):
        return jnp.sqrt(gradient)


def traced() -> list[tuple[OperationName, str]]:
    """(its names, its primitive) of each operation of the traced step."""
    found = []

    def walk(jaxpr, outer: str) -> None:
        for equation in jaxpr.eqns:
            scope = nested_scope(outer, str(equation.source_info.name_stack))
            found.append((OperationName(scope), equation.primitive.name))
            for value in equation.params.values():
                for each in value if isinstance(value, tuple) else (value,):
                    if inner := getattr(each, "jaxpr", each if hasattr(each, "eqns") else None):
                        walk(inner, scope)

    walk(jax.make_jaxpr(step)(jnp.ones(8)).jaxpr, "")
    return found


def lowered() -> list[tuple[OperationName, str]]:
    names = re.findall(r'loc\("([^"]*)"', jax.jit(step).lower(jnp.ones(8)).as_text(debug_info=True))
    return [(OperationName(name), OperationName(name).last) for name in names]


@pytest.mark.parametrize("program", [traced, lowered])
def test_what_the_step_writes_is_read_back(program):
    operations = program()
    of = {primitive: [name for name, of in operations if of == primitive] for _, primitive in operations}

    assert all(name.parameters(PATHS) == ("layers/mlp/up_EM",) for name in of["tanh"])
    for name in of["sin"] + of["cos"]:
        assert name.parameters(PATHS) == ("embed/table_VE",)
        assert "embed" in name.words
        assert not name.reduces_gradient
    assert all(name.fact("ring") == "mlp_output" for name in of["rsqrt"])
    assert all((name.slot, name.end) == ("BW", "last") for name in of["cbrt"])
    assert all(name.slot is None and name.end is None for name in of["rsqrt"])
    assert all(name.is_attention and "blocks" in name.words for name in of["exp"])
    assert {name.is_attention for name in of["tanh"]} == {False}
    assert [name.in_pass for name in of["sqrt"]] == ["update"]
    assert any(name.is_cast_of_parameters for name in of["convert_element_type"])
    assert not any(name.fact("ring") or name.parameters(PATHS) or name.is_cast_of_parameters for name in of["sqrt"])
    for primitive in ("tanh", "exp", "rsqrt"):  # the backward pass computes them again
        assert "recomputed" in {name.in_pass for name in of[primitive]}
    assert {name.in_pass for name in of["cos"]} <= {"recomputed", "backward"}, "the derivative of sin"


@pytest.mark.parametrize(
    ("text", "in_pass"),
    [
        ("", "forward"),
        ("jit(f)/x", "forward"),
        ("jit(f)/jvp(layers)/while/body", "forward"),
        (f"{BACKWARD}/x", "backward"),
        (f"{BACKWARD}/rematted_computation/x", "recomputed"),
        ("jit(f)/optimizer/x", "update"),
        ("jit(f)/optimizer", "update"),
        ("state['optimizer'][0].mu['head']", "forward"),
    ],
)
def test_the_pass_of_an_operation(text, in_pass):
    assert OperationName(text).in_pass == in_pass


def test_the_texts_are_those_of_recorded_programs():
    written = (weight_scope("a/b"), rows_scope("a/b"), fact_scope("ring", "c"), ATTENTION, UPDATE, WORKING_PARAMETERS)
    assert written == ("weight=a/b", "rows=a/b", "ring=c", "attend", "optimizer", "working_parameters")


def test_a_path_ends_where_a_parameter_does():
    assert OperationName("jit(f)/weight=layers/mlp/up_EM_2/all_gather").parameters(PATHS) == ("layers/mlp/up_EM_2",)
    assert OperationName("jit(f)/weight=layers/mlp/up_EM/shard_map/psum").parameters(PATHS) == ("layers/mlp/up_EM",)
    assert OperationName("jit(f)/weight=layers/mlp/up_E/psum").parameters(PATHS) == ()


def test_joined_names_are_told_apart():
    joined = OperationName("jit(f)/jvp()/weight=layers/(mlp/up_EM/all_gather:mlp/up_EM_2/all_gather)")
    assert joined.parameters(PATHS) == PATHS[:2]
    assert joined.gathers_weight
    assert not joined.reduces_gradient
    assert OperationName("jit(f)/weight=layers/mlp/up_EM/reduce_scatter").reduces_gradient


def test_scopes_are_written_and_parsed_in_one_file():
    """No other file of the compiler gives `named_scope` a text of its own, or has one of a scope's texts."""
    for file in sorted(COMPILER.rglob("*.py")):
        if file == COMPILER / "core" / "scopes.py":
            continue
        tree = ast.parse(file.read_text())
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if (node.module or "").endswith("scopes") or alias.name.endswith("_scope")  # that is made by `fact_scope`
        }
        documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("named_scope"):
                (scope,) = node.args
                name = scope.func if isinstance(scope, ast.Call) else scope
                assert isinstance(name, ast.Name), f"{file}:{node.lineno}"
                is_given = (file.name, name.id) == ("operation.py", "scope")  # by `ParallelOp.scope`
                assert name.id in imported or is_given, f"{file}:{node.lineno}"
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                own = re.search(r"\b(weight|rows|ring)=$|transpose\(|jvp\(|rematted_", node.value)
                assert not own, f"{file}:{node.lineno} writes or parses the scope {node.value!r}"
