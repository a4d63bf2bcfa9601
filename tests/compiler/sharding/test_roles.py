"""The role of each mesh axis of declared meshes, and of one with stages, which no declaration can have."""

from dataclasses import replace
from types import MappingProxyType

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from conftest import LINEAR_STACK, plan_of, spec_of
from meshloom.compiler.jaxpr.subprograms import subprograms
from meshloom.compiler.sharding.roles import AxisRoles, plan_roles
from meshloom.compiler.step.train_step import build_loss

SIZES = dict.fromkeys(("replica", "data", "fsdp", "stage", "context", "expert", "tensor"), 2)


@pytest.mark.parametrize(
    ("sharding", "sizes", "sequence", "length", "partitioner"),
    [
        ("ddp", {"data": 8}, "data", "", ""),
        ("ddp", {"replica": 2, "data": 4}, "replica data", "", ""),
        ("fsdp", {"fsdp": 8}, "fsdp", "", ""),
        ("fsdp", {}, "", "", ""),  # one device
        ("hsdp", {"replica": 2, "fsdp": 4}, "replica fsdp", "", ""),
        ("zero1", {"data": 4, "tensor": 2}, "data", "", "tensor"),
        ("zero2", {"data": 8}, "data", "", ""),
        ("tensor", {"tensor": 8}, "", "", "tensor"),
        ("tensor", {"replica": 2, "data": 2, "tensor": 2}, "replica data", "", "tensor"),
        ("fsdp_tensor", {"data": 2, "fsdp": 2, "tensor": 2}, "data fsdp", "", "tensor"),
        ("fsdp_context", {"fsdp": 2, "context": 4}, "fsdp", "context", ""),
        ("fsdp_context", {"fsdp": 2, "context": 2, "tensor": 2}, "fsdp", "context", "tensor"),
        ("fsdp_expert", {"fsdp": 2, "expert": 4}, "fsdp expert", "", ""),
        ("fsdp_expert", {"context": 2, "expert": 2, "tensor": 2}, "expert", "context", "tensor"),
        ("fsdp", {"fsdp": 4, "stage": 2}, "fsdp", "", ""),
        ("fsdp_expert", SIZES, "replica data fsdp expert", "context", "tensor"),
    ],
)
def test_the_role_of_each_axis(sharding, sizes, sequence, length, partitioner):
    roles = plan_roles(spec_of(f"sharding={sharding}").sharding, dict.fromkeys(SIZES, 1) | sizes)
    stage = ("stage",) if "stage" in sizes else ()
    assert roles == AxisRoles(tuple(sequence.split()), tuple(length.split()), stage, tuple(partitioner.split()))
    assert roles.tokens == (*roles.sequence, *roles.length)
    assert roles.manual == (*roles.tokens, *stage)
    assert sorted((*roles.manual, *roles.partitioner)) == sorted(axis for axis, size in sizes.items() if size > 1)


def test_a_batch_lies_over_sequences_and_length():
    roles = AxisRoles(sequence=("data", "fsdp"), length=("context",), stage=("stage",), partitioner=("tensor",))
    assert roles.rows_spec == PartitionSpec(("data", "fsdp"))
    assert roles.tokens_spec == PartitionSpec(("data", "fsdp"), ("context",))
    assert replace(roles, sequence=(), length=()).tokens_spec == PartitionSpec(None)


def test_stages_are_manual_and_have_the_same_tokens():
    """The gradient of a mesh of 2 x 2, fsdp and stage: a function of local arrays over both, and summed over fsdp."""
    plan = plan_of(*LINEAR_STACK, "sharding=fsdp", "target=cpu-2")
    mesh = replace(plan.mesh, sizes=MappingProxyType({**plan.mesh.sizes, "stage": 2}))
    roles = plan_roles(plan.spec.sharding, mesh.sizes)
    staged = replace(plan, mesh=mesh, sharding=replace(plan.sharding, roles=roles))
    tokens = jax.ShapeDtypeStruct((plan.spec.global_batch_size, plan.spec.sequence_length), jnp.int32)
    with jax.sharding.use_abstract_mesh(mesh.abstract()):
        traced = jax.make_jaxpr(build_loss(staged, with_gradients=True))(
            plan.abstract["params"], {"inputs": tokens, "targets": tokens}
        )
    (split,) = (each for each in traced.eqns if each.primitive.name == "shard_map")
    rows = tokens.shape[0] // 2
    assert {"fsdp", "stage"} <= set(split.params["newly_manual_axes"])
    assert (rows, tokens.shape[1]) in {v.aval.shape for v in split.params["jaxpr"].invars}
    assert set(_reduced_over(split.params["jaxpr"])) == {"fsdp"}


def _reduced_over(jaxpr):
    for each in jaxpr.eqns:
        if each.primitive.name in ("psum", "psum_invariant", "reduce_scatter", "all_gather"):
            axes = each.params.get("axes", each.params.get("axis_name"))
            yield from (axes,) if isinstance(axes, str) else axes
        for inner in subprograms(each.params):
            yield from _reduced_over(inner)
