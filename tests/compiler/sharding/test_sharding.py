"""The resolver of logical axis rules, and the plan against what JAX itself makes of it."""

import math
import random

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from conftest import plan_of, spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.trees import leaves_by_path, like
from meshloom.compiler.sharding.arrays import Array
from meshloom.compiler.sharding.rules import ArrayPlan, resolve
from meshloom.compiler.spec.compiler_traits import CompilerTraits
from meshloom.compiler.spec.plan_spec import MeshSpec
from meshloom.compiler.spec.sharding_spec import Rule
from meshloom.compiler.spec.target_spec import CpuTarget
from meshloom.compiler.target.mesh import MeshPlan, plan_mesh
from meshloom.compiler.target.target import TargetPlan, plan_target
from support.programs import programs_of

AXES = ("replica", "data", "fsdp", "stage", "context", "expert", "tensor")


def _mesh(**sizes: int) -> MeshPlan:
    return plan_mesh(
        MeshSpec.model_validate({axis: sizes.get(axis, 1) for axis in AXES}),
        _simulated(math.prod(sizes.values())),
    )


def _simulated(num_devices: int) -> TargetPlan:
    return plan_target(CpuTarget(kind="cpu", num_devices=num_devices), "float32")


def _rules(*pairs: tuple[str, str]) -> tuple[Rule, ...]:
    return tuple(Rule.model_validate({"logical": tuple(a.split()), "mesh": tuple(b.split())}) for a, b in pairs)


def _spec(shape, names, mesh, *pairs):
    plan = resolve(Array("x", shape, "float32", tuple(names.split())), "parameters", _rules(*pairs), mesh, SPLIT_WELL)
    assert isinstance(plan, ArrayPlan), plan
    return tuple(plan.spec), plan.reason


def test_the_example_of_the_docstring():
    spec, reason = _spec(
        (4, 128, 8, 16), "layers embed heads head_dim", _mesh(fsdp=4, tensor=2),
        ("embed", "fsdp"), ("heads", "tensor"), ("layers head_dim", ""),
    )  # fmt: skip
    assert spec == (None, "fsdp", "tensor", None)
    assert reason == (
        "layers, head_dim whole by parameters[2]; embed over fsdp by parameters[0]; heads over tensor by parameters[1]"
    )


def test_the_first_rule_that_is_free_takes_a_dimension():
    mesh, rules = _mesh(fsdp=4, tensor=2), (("mlp", "fsdp"), ("embed", "fsdp"), ("embed", "tensor"))
    spec, reason = _spec((8, 8), "embed mlp", mesh, *rules)
    assert spec == ("tensor", "fsdp")
    assert "embed over tensor by parameters[2] (fsdp is taken by mlp)" in reason
    assert _spec((8,), "embed", mesh, *rules)[0] == ("fsdp",)


def test_a_dimension_that_does_not_divide_falls_to_the_next_rule():
    spec, reason = _spec((6,), "embed", _mesh(fsdp=4, tensor=2), ("embed", "fsdp"), ("embed", "tensor"))
    assert spec == ("tensor",)
    assert "6 is not divisible by 4 shards" in reason


def test_an_axis_of_size_one_is_said():
    spec, reason = _spec((6,), "embed", _mesh(), ("embed", "fsdp"))
    assert spec == (None,)
    assert reason == "embed whole by parameters[0] (fsdp being of size 1)"


SPLIT_WELL = CompilerTraits()
TPU = CompilerTraits(tile_rows=8, max_reduce_scatter=100)


@pytest.mark.parametrize(
    ("names", "shape", "is_tied", "spec", "why"),
    [
        ("layers embed mlp", (2, 256, 512), False, (None, "fsdp", None), ""),  # 32 rows of embed, whole tiles
        ("layers embed mlp", (2, 224, 512), False, (None, None, "fsdp"), "shards of 28 would be padded"),  # 64 of mlp
        ("vocab embed", (512, 224), False, ("fsdp", None), "shards of 28 would be padded"),
        ("embed mlp", (224, 480), False, ("fsdp", None), ""),  # 28, and 60: of these, the first dimension
        ("mlp embed", (480, 224), False, ("fsdp", None), "shards of 28 would be padded"),
        ("embed mlp", (224, 500), False, ("fsdp", None), ""),  # 500 does not divide
        ("mlp embed", (500, 224), False, (None, "fsdp"), ""),
        ("layers embed heads head_dim", (2, 224, 4, 16), False, (None, "fsdp", None, None), ""),
        ("layers embed", (2, 224), False, (None, "fsdp"), ""),
        ("vocab embed", (15 * 64, 256), False, (None, "fsdp"), ""),
        ("vocab embed", (15 * 64, 256), True, ("fsdp", None), "its gradient would be all-reduced"),  # 8 x 15 > 100
        ("vocab embed", (5 * 64, 256), True, (None, "fsdp"), ""),
        ("vocab embed", (15 * 64, 13 * 64), True, ("fsdp", None), "its gradient would be all-reduced"),  # either way
    ],
)
def test_an_alternative_is_split_where_the_compiler_handles_shards_badly(names, shape, is_tied, spec, why):
    rules = (
        Rule(logical=("embed",), mesh=("fsdp",), alternatives=("mlp", "vocab")),
        Rule(logical=("layers", "vocab", "mlp", "heads", "head_dim"), mesh=()),
    )
    array = Array("x", shape, "float32", tuple(names.split()), is_tied=is_tied)
    plan, plain = (resolve(array, "parameters", rules, _mesh(fsdp=8), each) for each in (TPU, SPLIT_WELL))
    assert isinstance(plan, ArrayPlan)
    assert isinstance(plain, ArrayPlan)
    assert tuple(plan.spec) == spec
    assert tuple(plain.spec) == tuple("fsdp" if name == "embed" else None for name in names.split())
    assert ("over fsdp by parameters[0] (instead of embed)" in plan.reason) == (plan != plain)
    assert not why or f"embed whole by parameters[0] ({why})" in plan.reason


def test_random_rules_give_legal_layouts_or_refusals():
    """Whatever the rules: no mesh axis twice in an array, every shard whole, and no dimension replicated unasked."""
    chance = random.Random(0)
    names = ("a", "b", "c")
    outcomes = {"planned": 0, "refused": 0}
    for _ in range(2000):
        mesh = _mesh(data=chance.choice([1, 2]), fsdp=chance.choice([1, 2, 4]), tensor=chance.choice([1, 3]))
        rules = _rules(*((" ".join(chance.sample(names, chance.randint(1, 2))),
                          " ".join(chance.sample(("data", "fsdp", "tensor"), chance.randint(0, 2))))
                         for _ in range(chance.randint(1, 5))))  # fmt: skip
        rules = tuple(rule.model_copy(update={"alternatives": chance.choice([(), names])}) for rule in rules)
        own = names[: chance.choice([2, 3])]
        shape = tuple(chance.choice([2, 3, 4, 6, 12]) for _ in own)
        result = resolve(
            Array("x", shape, "float32", own),
            "parameters",
            rules,
            mesh,
            CompilerTraits(tile_rows=chance.choice([1, 2])),
        )
        if not isinstance(result, ArrayPlan):
            outcomes["refused"] += 1
            assert all(refusal.problem(mesh, 0).fix for refusal in result)
            continue
        outcomes["planned"] += 1
        entries = [() if e is None else (e,) if isinstance(e, str) else e for e in result.spec]
        used = [axis for entry in entries for axis in entry]
        assert len(used) == len(set(used))
        assert all(size % mesh.num_shards(entry) == 0 for size, entry in zip(shape, entries, strict=True))
        assert result.bytes_per_device == 4 * math.prod(shape) // math.prod(mesh.sizes[a] for a in used)
        may_be_split_instead = len(own) == 2 and bool(used)
        for name, entry in zip(own, entries, strict=True):
            asked = any(
                name in rule.logical
                and (all(mesh.sizes[a] == 1 for a in rule.mesh) or (may_be_split_instead and rule.alternatives))
                for rule in rules
            )
            assert entry or asked, "replicated, and no rule says so"
    assert min(outcomes.values()) > 200


@pytest.mark.parametrize(
    "overrides", [("sharding=fsdp",), ("sharding=fsdp_tensor", "mesh.data=2"), ("sharding=tensor",)]
)
def test_planned_bytes_are_those_on_the_devices(overrides):
    plan = plan_of(*overrides)
    state = programs_of(plan)["init"]()
    device = jax.devices()[0]

    def bytes_on_device(tree):
        shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards if shard.device == device]
        return sum(shard.data.nbytes for shard in shards)

    assert bytes_on_device(state["params"]) == plan.memory.parameters
    scalars = sum(x.nbytes for x in jax.tree.leaves(state["optimizer"]) if x.ndim == 0)
    assert bytes_on_device(state["optimizer"]) == plan.memory.optimizer + scalars


def test_optimizer_state_follows_its_own_table():
    whole = "{logical:[layers,vocab,mlp,heads,kv_heads,head_dim],mesh:[]}"
    plan = plan_of("sharding=ddp", f"sharding.optimizer=[{{logical:[embed],mesh:[data]}},{whole}]")
    specs = leaves_by_path(plan.specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
    assert specs["params/embed/table_VE"] == PartitionSpec(None, None)
    moments = [
        spec for path, spec in specs.items() if path.endswith("/embed/table_VE") and path.startswith("optimizer")
    ]
    assert moments == [PartitionSpec(None, "data")] * 2


def test_every_array_has_a_reason():
    for overrides in (("sharding=ddp",), ("sharding=fsdp_tensor",), ("model=tiny", "sharding=tensor")):
        sharding = plan_of(*overrides).sharding
        for plan in (*sharding.parameters, *sharding.activations):
            assert all(str(name) in plan.reason for name in plan.array.logical_axes)
            assert all(dimension.rule is not None for dimension in plan.dimensions)


@pytest.mark.parametrize(
    ("sizes", "devices", "expected"),
    [({"fsdp": -1}, 8, {"fsdp": 8}), ({"fsdp": -1, "tensor": 2}, 8, {"fsdp": 4, "tensor": 2}), ({}, 1, {}),
     ({"data": 2, "fsdp": 2, "tensor": 2}, 8, {"data": 2, "fsdp": 2, "tensor": 2})],
)  # fmt: skip
def test_mesh_fills_in_what_is_left(sizes, devices, expected):
    target = _simulated(devices)
    mesh = plan_mesh(MeshSpec(**{axis: sizes.get(axis, 1) for axis in AXES}), target)
    assert dict(mesh.sizes) == {axis: expected.get(axis, 1) for axis in AXES}
    assert mesh.num_devices == devices


def test_mesh_of_another_product_is_refused():
    for sizes in ({"fsdp": 3}, {"fsdp": -1, "data": -1}, {"fsdp": -1, "tensor": 3}, {"data": 16}):
        with pytest.raises(ConfigError):
            plan_mesh(MeshSpec(**{axis: sizes.get(axis, 1) for axis in AXES}), _simulated(8))


def test_trees_by_path_and_back():
    tree = {"b": {"y": 1, "x": (2, 3)}, "a": 4}
    leaves = leaves_by_path(tree)
    assert list(leaves) == ["a", "b/x/0", "b/x/1", "b/y"]
    assert like(tree, leaves) == tree


def test_spec_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        spec_of().seed = 1  # type: ignore[misc]


def test_abstract_parameters_are_those_of_init():
    for model in ("model=tiny", "model=llama3_8b"):
        plan = plan_of(model, "model.num_layers=2", "model.embed_dim=64", "model.mlp_dim=32", "model.vocab_size=264")
        made = jax.eval_shape(plan.model.init, jax.random.key(0))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(
            lambda x: (x.shape, np.dtype(x.dtype)), plan.model.abstract()
        )
