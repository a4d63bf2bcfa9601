"""How rows of the embedding's table reach the tokens: what is decided, what crosses, and that gradients are those of
the whole table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from conftest import plan_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.parallel.embedding import exchange_rows
from meshloom.models.family_configs import DecoderConfig
from support.collectives import written_collectives
from support.programs import Gradients, batch_of
from support.proofs import Computation

EXCHANGE, GATHER = "parallel.embedding=all_to_all", "parallel.embedding=all_gather"
LLAMA3_V6E = (
    "target=v6e-64", "sharding=fsdp", "precision=bfloat16", "model.embed_dim=4096", "model.vocab_size=128256",
    "sequence_length=2048",
)  # fmt: skip


@pytest.mark.parametrize("axes", [("a",), ("a", "b"), ("b",)])
def test_exchanged_rows_and_their_gradient_are_those_of_the_whole_table(axes, proof):
    """Against indexing on one device in float64."""
    rng = np.random.default_rng(0)
    table, weights = rng.normal(size=(11, 16)), rng.normal(size=(16, 3, 16))
    ids = rng.integers(0, 11, (16, 3))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))

    def loss(table, ids, weights):
        rows = exchange_rows(table, ids, axes)
        return jnp.sum(rows * weights), rows

    def gradient_and_rows(table, ids, weights):
        gradient, rows = jax.grad(loss, has_aux=True)(table, ids, weights)
        others = tuple(axis for axis in ("a", "b") if axis not in axes)
        return jax.lax.psum(gradient, others), rows

    of_table, of_tokens = P(None, axes), P(("a", "b"))
    split = jax.shard_map(
        gradient_and_rows, mesh=mesh, in_specs=(of_table, of_tokens, of_tokens), out_specs=(of_table, of_tokens),
        check_vma=False,
    )  # fmt: skip
    computation = Computation(split, table.astype(np.float32), ids, weights.astype(np.float32))
    if proof.is_known(computation.parts):
        return
    gradient, rows = computation.run()
    expected = np.zeros_like(table)
    np.add.at(expected, ids, weights)
    np.testing.assert_array_equal(rows, table.astype(np.float32)[ids])
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_frequent_row_is_summed_in_float32():
    """4,096 tokens of one row, each of a gradient of 1: in bfloat16 the sum stands still at 256."""
    mesh = Mesh(np.array(jax.devices()), ("a",))
    gradient = jax.shard_map(
        jax.grad(lambda table, ids: jnp.sum(exchange_rows(table, ids, ("a",)).astype(jnp.float32))),
        mesh=mesh, in_specs=(P(None, "a"), P("a")), out_specs=P(None, "a"), check_vma=False,
    )  # fmt: skip
    found = jax.jit(gradient)(jnp.zeros((3, 8), jnp.bfloat16), jnp.ones((8, 512), jnp.int32))
    np.testing.assert_array_equal(found.astype(np.float32), [[0] * 8, [4096] * 8, [0] * 8])


@pytest.mark.ci
@pytest.mark.parametrize(
    "layout",
    [
        ("target=cpu-4", "sharding=hsdp", "mesh.replica=2"),
        pytest.param(("sharding=fsdp_tensor", "mesh.fsdp=4", "mesh.tensor=2"), marks=pytest.mark.ci),
        pytest.param(("sharding=fsdp", "num_microbatches=2"), marks=pytest.mark.release),
        pytest.param(("sharding=fsdp",), marks=pytest.mark.release),
    ],
)
def test_both_ways_make_the_same_gradients(layout, tokens, proof):
    gathered, exchanged = (Gradients(plan_of(*layout, way), batch_of(tokens[0])) for way in (GATHER, EXCHANGE))
    if proof.is_known(gathered.parts, exchanged.parts):
        return
    params = gathered.plan.model.init(jax.random.key(0))
    (loss, gradients), (other_loss, other_gradients) = gathered(params), exchanged(params)
    np.testing.assert_allclose(loss, other_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), gradients, other_gradients)


def test_an_exchange_sends_rows_and_no_table():
    """Of eight devices each has 2 of the 16 sequences of 16 tokens."""
    found = {}
    for way in (GATHER, EXCHANGE):
        plan = plan_of("sharding=fsdp", way)
        found[way] = written_collectives(plan)
    spec = plan.spec
    assert isinstance(spec.model, DecoderConfig)
    (gathers, gathered), (exchanges, exchanged) = found[GATHER], found[EXCHANGE]
    assert gathers["all-to-all"] == 0
    assert exchanges["all-to-all"] == 2, "forward and backward"
    assert exchanged["all-to-all"] == 2 * 2 * spec.sequence_length * spec.model.embed_dim
    table, ids = spec.model.vocab_size * spec.model.embed_dim, 16 * spec.sequence_length
    assert gathered["all-gather"] - exchanged["all-gather"] == table - ids
    assert gathers["reduce-scatter"] - exchanges["reduce-scatter"] == 1


def test_what_takes_less_time_on_the_links_is_chosen():
    """8,192 tokens of a chip, a table of 128,256 rows of 4,096 in bfloat16; v6e 8 x 8, 90 GB/s a link both ways.

    All-gather: 1002 MiB x 63/64 over 4 links. All-to-all: 64 MiB, each eighth of it 8 / 4 chips far along an axis."""
    few = plan_of(*LLAMA3_V6E, "global_batch_size=256").operation("embedding")
    assert (few.chosen.name, few.chosen.parameters) == ("all_to_all", ("fsdp",))
    assert few.reason == "64.0 MiB of rows, 1002.0 MiB of table; 1.51 ms and 5.77 ms on the links"
    many = plan_of(*LLAMA3_V6E, "global_batch_size=2048").operation("embedding")
    assert many.chosen.name == "all_gather", many.reason
    forced = plan_of(*LLAMA3_V6E, "global_batch_size=2048", EXCHANGE).operation("embedding")
    assert (forced.chosen.name, forced.chosen.parameters) == ("all_to_all", ("fsdp",))


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("sharding=ddp", "sharding.on_replicated=allow"), "no axis that splits the batch splits the table"),
        (("model.embeddings=tied",), "the head multiplies with all of it"),
        (
            ("sharding.parameters=[{logical:[vocab],mesh:[fsdp]},{logical:[layers,embed,mlp,heads,kv_heads,head_dim],mesh:[]}]",
             "model.vocab_size=264"),
            "its rows are split over fsdp",
        ),
    ],
)  # fmt: skip
def test_where_rows_cannot_be_exchanged_the_reason_is_told(overrides, why):
    plan = plan_of("sharding=fsdp", *overrides).operation("embedding")
    assert (plan.chosen.name, plan.reason) == ("all_gather", f"all_to_all is not used: {why}")
    with pytest.raises(ConfigError, match=why):
        plan_of("sharding=fsdp", *overrides, EXCHANGE)
