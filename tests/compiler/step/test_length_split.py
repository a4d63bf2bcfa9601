"""The length of sequences split over devices, for models in which no token sees another."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from conftest import pointwise_plan
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.parallel.operation import per_token_operation
from meshloom.compiler.sharding.model_check import check_length_split
from meshloom.models import Stack, build_piece
from meshloom.runtime.train.feed import local_rows, to_devices
from support.programs import Gradients, batch_of, programs_of
from support.tiers import tiered

OTHERS = "{logical: [sequence_parallel_length, vocab, embed, mlp, heads, kv_heads, head_dim], mesh: []}"
OVER_CONTEXT = ("target=cpu-4", "sharding=fsdp", "mesh.fsdp=2", "mesh.context=2",
                "sharding.mesh_axes=[replica, data, fsdp, context]",
                "sharding.activations=[{logical: [batch], mesh: [replica, data, fsdp]}, "
                f"{{logical: [length], mesh: [context]}}, {OTHERS}]")  # fmt: skip
CASES = {
    "fsdp x context, scan": (*OVER_CONTEXT, "loss.max_logits_bytes=16384", "loss.max_logits_share=0.0"),
    "fsdp x context, prefetch, parameters over both, 2 microbatches": (
        *OVER_CONTEXT, "overlap=prefetch", "num_microbatches=2", "remat=full",
        "sharding.parameters=[{logical: [embed], mesh: [fsdp, context]}, {logical: [layers, vocab, mlp], mesh: []}]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", tiered(CASES, plain=()))
def test_gradients_are_those_of_one_device(name, tokens, proof):
    plans = (pointwise_plan("target=cpu-1"), pointwise_plan(*CASES[name]))
    one, split = (Gradients(plan, batch_of(tokens[0])) for plan in plans)
    if proof.is_known(one.parts, split.parts):
        return
    params = jax.tree.map(np.asarray, one.plan.model.init(jax.random.key(0)))
    (loss, expected), (our_loss, ours) = one(params), split(params)
    assert our_loss == pytest.approx(loss, rel=1e-6)
    for path, gradient in leaves_by_path(ours).items():
        reference = leaves_by_path(expected)[path]
        np.testing.assert_allclose(gradient, reference, rtol=2e-5, atol=2e-6 * np.abs(reference).max(), err_msg=path)


def test_every_array_of_a_batch_is_split_over_both_axes():
    plan = pointwise_plan(*OVER_CONTEXT, "data.isolate_documents=true")
    batch = programs_of(plan).batch
    assert set(batch) == {"inputs", "targets", "positions", "segment_ids"}
    assert {x.sharding.spec for x in batch.values()} == {PartitionSpec(("fsdp",), ("context",))}
    assert plan.memory.batch == 4 * 16 * 16 * 4 // 4  # arrays, sequences, tokens, bytes; over 4 devices
    rows = local_rows(batch)
    assert rows == tuple(range(16))  # a process reads whole sequences
    host = {name: np.arange(16 * 16, dtype=np.int32).reshape(16, 16) for name in batch}
    for shard in to_devices(batch, rows, host)["positions"].addressable_shards:
        assert shard.data.shape == (8, 8)
        np.testing.assert_array_equal(shard.data, host["positions"][shard.index])


@pytest.mark.ci
def test_documents_have_their_own_positions(tokens):
    """Positions come with the batch where documents are isolated; else each device counts from its chunk's first."""
    targets, inputs = tokens[0][:, 1:], tokens[0][:, :-1]
    losses = []
    for overrides in (("target=cpu-1",), OVER_CONTEXT):
        programs = programs_of(pointwise_plan(*overrides, "data.isolate_documents=true"))
        host = {"inputs": inputs, "targets": targets, "segment_ids": np.ones_like(inputs)}
        host["positions"] = np.broadcast_to(np.arange(16, dtype=np.int32) % 5, inputs.shape)
        params = programs["init"]()["params"]
        losses.append(programs["evaluate"](params, to_devices(programs.batch, tuple(range(16)), host)))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


MIXED = {
    "a shift": lambda x_BTE: jnp.pad(x_BTE, ((0, 0), (1, 0), (0, 0)))[:, :-1],
    "a roll": lambda x_BTE: jnp.roll(x_BTE, 1, axis=1),
    "a running sum": lambda x_BTE: jnp.cumsum(x_BTE, axis=1),
    "a mean": lambda x_BTE: jnp.mean(x_BTE, axis=1, keepdims=True),
    "one place": lambda x_BTE: x_BTE[:, :1],
    "a matmul": lambda x_BTE: jnp.einsum("bte,bse->bts", x_BTE, x_BTE) @ x_BTE,
    "a loop": lambda x_BTE: jax.lax.scan(lambda c, x: (c + x, c), x_BTE[:, 0] * 0, x_BTE.swapaxes(0, 1))[1].swapaxes(
        0, 1
    ),
}


class Mixing(nnx.Module):
    def __init__(self, how: str):
        self.scale_E, self.how = nnx.Param(jnp.ones(32), out_sharding=("embed",)), how

    def __call__(self, x_BTE, context):
        x_BTE += self.scale_E[...] * MIXED[self.how](x_BTE)
        return context.activation("residual", x_BTE, "batch", "length", "embed")


@pytest.mark.parametrize("how", MIXED)
def test_a_layer_that_looks_at_other_tokens_is_refused(how):
    plan = pointwise_plan(*OVER_CONTEXT)
    mixing = replace(plan.model, stacks=(Stack("layers", build_piece(lambda _: Mixing(how)), 1),))
    with pytest.raises(ConfigError) as raised:
        check_length_split(plan.spec, mixing, plan.roles, per_token_operation(plan.ops))
    assert "Mixing looks from one token at another, and the length is split over context" in str(raised.value)


def test_a_length_that_does_not_divide_is_an_error():
    with pytest.raises(ConfigError) as raised:
        pointwise_plan(*OVER_CONTEXT, "sequence_length=15")
    (problem,) = raised.value.problems
    assert problem.what.startswith(
        "15 tokens cannot be cut in zigzag order over context=2: they are not divisible by 4"
    )
    assert problem.fix == "use sequence_length=12 or 16"  # the mesh is declared whole
