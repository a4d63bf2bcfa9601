"""Declarations drawn at random: what validation accepts runs, with the loss of one device; what it rejects would have
failed in JAX, or would have left devices doing the same work."""

import json
import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from pydantic import ValidationError

from conftest import plan_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.partition_spec import axes_of
from meshloom.compiler.declare.user_code import DeclaredRun
from meshloom.compiler.driver import plan_run
from meshloom.compiler.plan import Plan
from meshloom.compiler.sharding.arrays import Array, find_arrays
from meshloom.compiler.target.mesh import plan_mesh
from meshloom.compiler.target.target import plan_target
from meshloom.compiler.xla.programs import lower
from support.reference import reference_loss

AXES = ("replica", "data", "fsdp", "tensor")
NAMES = ("batch", "length", "embed", "mlp", "heads", "kv_heads", "head_dim", "vocab", "layers")
ALL_WHOLE = {"logical": list(NAMES), "mesh": []}
BASE = ("model.num_layers=2", "model.embed_dim=16", "model.num_heads=4", "model.num_kv_heads=2", "model.mlp_dim=24",
        "sequence_length=8", "global_batch_size=8", "evaluation.num_batches=1")  # fmt: skip


def rules(first):
    """A few random rules behind a usual one; mostly with the last word that the rest is whole."""
    one = st.builds(
        lambda logical, mesh: {"logical": logical, "mesh": mesh},
        st.lists(st.sampled_from(NAMES[1:]), min_size=1, max_size=3, unique=True),
        st.lists(st.sampled_from(AXES), max_size=2, unique=True),
    )
    return st.builds(
        lambda usual, random, has_end: usual + random + ([ALL_WHOLE] if has_end else []),
        st.sampled_from(first),
        st.one_of(st.just([]), st.just([]), st.lists(one, min_size=1, max_size=2)),
        st.sampled_from([True] * 9 + [False]),
    )  # fmt: skip


BY_EMBED = [{"logical": ["embed"], "mesh": ["fsdp"]}]
BY_TENSOR = [*BY_EMBED, {"logical": ["vocab", "mlp", "heads", "kv_heads"], "mesh": ["tensor"]}]
BATCH = [{"logical": ["batch"], "mesh": ["replica", "data", "fsdp"]}]
BATCH_AND_TENSOR = [*BATCH, {"logical": ["vocab", "mlp", "heads", "kv_heads"], "mesh": ["tensor"]}]
OPTIMIZERS = ("adamw", "adafactor", "lion", "muon", "sgd")
PRECISIONS = ("float32", "bfloat16", "bfloat16_params", "bfloat16_pure", "float16")
MESHES = [sizes for sizes in np.ndindex(9, 9, 9, 9) if math.prod(sizes) == 8]


@st.composite
def declarations(draw):
    values = json.loads(plan_of(*BASE).spec.model_dump_json())
    sizes = dict(zip(AXES, map(int, draw(st.sampled_from(MESHES))), strict=True))
    values["mesh"] |= sizes
    parameters = draw(rules([BY_TENSOR, BY_TENSOR, BY_EMBED, []]))
    values["sharding"] |= {
        "parameters": parameters,
        "optimizer": parameters,
        "activations": draw(rules([BATCH_AND_TENSOR, BATCH_AND_TENSOR, BATCH, []])),
    }
    values["global_batch_size"] = draw(st.sampled_from([8, 16, 16, 12]))
    values["num_microbatches"] = draw(st.sampled_from([1, 1, 2, 2, 3]))
    values["remat"]["policy"] = draw(st.sampled_from(["none", "full", "save_dots"]))
    values |= {"precision": option("precision", draw(st.sampled_from(PRECISIONS))),
               "optimizer": option("optimizer", draw(st.sampled_from(OPTIMIZERS)))}  # fmt: skip
    values["model"]["mlp_dim"] = draw(st.sampled_from([24, 16]))
    return values


@cache
def option(group: str, name: str) -> dict:
    return json.loads(getattr(plan_of(*BASE, f"{group}={name}").spec, group).model_dump_json())


@cache
def expected_loss(model: str, global_batch_size: int) -> float:
    """On one device, in float32."""
    values = json.loads(plan_of(*BASE).spec.model_dump_json()) | {"model": json.loads(model)}
    built = DeclaredRun.model_validate_json(json.dumps(values)).model.build()
    tokens = tokens_of(global_batch_size)
    params = built.init(jax.random.key(values["seed"]))
    return float(reference_loss(built, params, jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:])))


def tokens_of(global_batch_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 257, (global_batch_size, 9), dtype=np.int32)


def loss_of_a_step(plan: Plan) -> float:
    lowered = lower(plan, plan.mesh.of_devices(jax.devices()))
    tokens = tokens_of(plan.spec.global_batch_size)
    arrays = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    batch = {name: jax.device_put(arrays[name], x.sharding) for name, x in lowered.batch.items()}
    return float(lowered["train"].compile()(lowered["init"].compile()(), batch)[1]["loss"])


def naive_spec(array: Array, table: list[dict]) -> PartitionSpec | None:
    """Returns the spec that one would write by hand: for each dimension the first rule that names it, or None."""
    entries = []
    for name in array.logical_axes:
        found = [rule["mesh"] for rule in table if name in rule["logical"]]
        if name is not None and not found:
            return None
        entries.append(tuple(found[0]) if name is not None and found[0] else None)
    return PartitionSpec(*entries)


def why_it_could_not_run(values: dict) -> str | None:
    """Found without our planner's checks: by JAX's own sharding types and by counting."""
    spec = DeclaredRun.model_validate_json(json.dumps(values))
    mesh = plan_mesh(spec.mesh, plan_target(spec.target, spec.precision.compute)).of_devices(jax.devices())
    arrays = find_arrays(spec, spec.model.build())
    computing = set()
    for table, of_table in (("parameters", arrays.parameters), ("activations", arrays.activations)):
        for array in of_table:
            layout = naive_spec(array, values["sharding"][table])
            if layout is None:
                return f"{array.path} has a dimension that no rule names: silently whole"
            try:
                NamedSharding(mesh, layout).shard_shape(array.shape)
            except Exception as error:  # its own kinds, some of them private
                return f"JAX refuses {array.path}: {error}"
            used = {axis for entry in layout for axis in axes_of(entry) if mesh.shape[axis] > 1}
            computing |= used if table == "activations" else set()
            if table == "parameters" and array.logical_axes[0] == "layers" and used & set(axes_of(layout[0])):
                return f"the layers of {array.path} are split, and run one after the other"
    idle = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in computing]
    if idle:
        return f"devices along {idle} compute the same"
    for table in ("parameters", "activations"):
        there = {name for array in getattr(arrays, table) for name in array.logical_axes}
        if any(not there & set(rule["logical"]) for rule in values["sharding"][table]):
            return "a rule that matches nothing"
    batch = next(rule["mesh"] for rule in values["sharding"]["activations"] if "batch" in rule["logical"])
    shards = math.prod(mesh.shape[axis] for axis in batch)
    if values["global_batch_size"] % (shards * values["num_microbatches"]):
        return "the batch is not divisible"
    return None


def accepted(values: dict) -> Plan | str:
    """The plan, or what is told of the declaration."""
    try:
        return plan_run(DeclaredRun.model_validate_json(json.dumps(values)))
    except (ConfigError, ValidationError) as error:
        return str(error)


@pytest.mark.release
@settings(max_examples=40, derandomize=True, phases=(Phase.generate, Phase.shrink),
          suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
@given(declarations())
def test_what_is_accepted_runs_and_what_is_rejected_could_not(values):
    plan = accepted(values)
    event("rejected" if isinstance(plan, str) else "accepted")
    if isinstance(plan, str):
        assert why_it_could_not_run(values) is not None, f"rejected without need: {plan}"
        return
    tolerance = 1e-5 if values["precision"]["compute"] == "float32" else 2e-2
    expected = expected_loss(json.dumps(values["model"]), values["global_batch_size"])
    np.testing.assert_allclose(loss_of_a_step(plan), expected, rtol=tolerance)
