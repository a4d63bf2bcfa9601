"""A weight may cross the network in another type than it is stored or used in, and one file lists the types."""

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import meshloom
from conftest import plan_of
from meshloom.compiler.parallel.encodings import Encoding
from meshloom.compiler.parallel.weight_plan import plan_weight
from meshloom.compiler.parallel.weights import Reduction, Weights, hoist
from meshloom.compiler.sharding.roles import AxisRoles

ROOT = Path(meshloom.__file__).resolve().parent
FLOATS = {"float32", "bfloat16", "float16", "float8", "f32", "bf16", "f16", "F32", "BF16", "F16"}
LISTS_THEM = {
    "compiler/core/float_types.py",
    "compiler/declare/gguf_file.py",  # as GGUF names them
    "runtime/weights/folder.py",  # as safetensors names them
    "runtime/weights/export.py",
}
OF_OTHERS = ("models/published/", "compiler/peers/")  # what other tools say, in their words
NUM_LAYERS = 3


@pytest.mark.parametrize("use", ["gathered", "hoisted", "held"])
def test_a_weight_travels_in_its_own_type_and_is_decoded_once(use):
    """Stored in float32, gathered in bfloat16, used in float32: a type for travelling that no declaration has yet."""
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    spec, roles = PartitionSpec(None, "fsdp"), AxisRoles(("fsdp",), (), (), ())
    decoded = Counter()

    class Scaled(Encoding):
        """A decoding that is seen if it runs twice."""

        def decode(self, gathered):
            decoded[self.travel] += 1
            return super().decode(gathered) * (2 if self.travel == "bfloat16" else 1)

    plan = plan_weight("w", spec, spec, spec, roles, is_stacked=True, encoding=Scaled("float32", "bfloat16", "float32"))
    plan = replace(plan, use=use)
    reduction = Reduction(jnp.float32, "float32", is_last=True)

    def whole(shard):
        weights = hoist(Weights({"w": None}, None, {"w": plan.encoding.encode(shard)}, {"w": plan}, reduction))
        layers = [
            replace(weights, working=jax.tree.map(lambda x, i=i: x[i], weights.working)).gathered()["w"]
            for i in range(NUM_LAYERS)
        ]
        return jnp.stack(layers)

    run = jax.jit(jax.shard_map(whole, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False))
    stored = np.linspace(-1, 1, NUM_LAYERS * 8 * 128, dtype=np.float32).reshape(NUM_LAYERS, 8, 128)
    np.testing.assert_array_equal(run(stored), 2 * stored.astype(jnp.bfloat16).astype(np.float32))
    gathers = [line for line in run.lower(stored).as_text().splitlines() if "all_gather" in line]
    assert gathers
    assert all("bf16>" in line and "f32>" not in line for line in gathers)


def test_the_plan_of_a_weight_has_its_types():
    plan = plan_of("target=cpu-8", "precision=bfloat16", "model=tiny_moe")
    encodings = {weight.path: weight.encoding for weight in jax.tree.leaves(plan.weights)}
    assert encodings["embed/table_VE"] == Encoding("float32", "bfloat16", "bfloat16")
    assert encodings["layers/mlp/router_EX"] == Encoding("float32", "float32", "float32")


def test_one_file_lists_the_types_of_floats():
    """Two of them in one literal: a list that a new type would have to be added to."""
    files = [file for folder in ("models", "compiler", "runtime") for file in (ROOT / folder).glob("**/*.py")]
    named = {str(file.relative_to(ROOT)) for file in files if _lists_floats(ast.parse(file.read_text()))}
    assert {name for name in named if not name.startswith(OF_OTHERS)} == LISTS_THEM


def _lists_floats(tree: ast.AST) -> bool:
    groups = (node for node in ast.walk(tree) if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict))
    return any(len(FLOATS & {_value(each) for each in ast.iter_child_nodes(group)}) > 1 for group in groups)


def _value(node: ast.AST) -> object:
    return node.value if isinstance(node, ast.Constant) else None
