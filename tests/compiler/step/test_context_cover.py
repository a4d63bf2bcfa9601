"""Context parallelism with everything that it works with: a pairwise cover against one float32 device."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from conftest import plan_of
from meshloom.models import Context, Model, split_aux
from support.pairwise import all_pairs, cover_pairs, cover_values, pairs_of
from support.programs import Gradients
from support.tiers import tiered

CHOICES = {
    "mesh": {
        "context 4": ("mesh.fsdp=1", "mesh.context=4"),
        "fsdp 2 x context 2": ("mesh.fsdp=2", "mesh.context=2"),
        "replica 2 x context 2": ("mesh.replica=2", "mesh.fsdp=1", "mesh.context=2"),
        "context 2 x tensor 2": ("mesh.fsdp=1", "mesh.context=2", "mesh.tensor=2"),
    },
    "strategy": {
        "ring": ("parallel.context=ring",),
        "gathered": ("parallel.context=all_gather",),
        "ulysses": ("parallel.context=ulysses",),
    },
    "remat": {"no remat": (), "remat full": ("remat=full",), "save_names": ("remat=save_names",)},
    "family": {
        "llama": (),
        "gpt2": (
            "model.positions=learned", "model.rope_theta=null", "model.num_positions=16", "model.norm=layer",
            "model.mlp=plain", "model.biases=all", "model.embeddings=tied", "model.vocab_size=264",
        ),
        "gemma2": (
            "model.norm_placement=before_and_after", "model.num_layers=4", "model.attention_windows=[4,null]",
            "model.attention_soft_cap=3.0",
        ),
    },
    "documents": {"whole": (), "packed": ("data.isolate_documents=true",)},
    "microbatches": {"1 microbatch": (), "2 microbatches": ("num_microbatches=2",)},
    "loop": {"scan": (), "prefetch": ("overlap=prefetch",)},
    "order": {"zigzag": (), "contiguous": ("token_order=contiguous",)},
}  # fmt: skip
COMMON = ("target=cpu-4", "sharding=fsdp_context", "model.num_heads=8", "model.num_kv_heads=4", "global_batch_size=8")
COVER = {", ".join(row.values()): row for row in cover_pairs({name: list(of) for name, of in CHOICES.items()})}
NUM_STEPS, RATE = 3, 0.1


def test_the_cover_has_every_pair():
    found = set[Any]().union(*(pairs_of(row) for row in COVER.values()))
    assert found == set(all_pairs({name: list(of) for name, of in CHOICES.items()}))
    assert len(COVER) <= 14  # 12 have all pairs of meshes and strategies alone


def batches_of(*, is_packed: bool) -> list[dict[str, np.ndarray]]:
    tokens = np.random.default_rng(0).integers(0, 257, (NUM_STEPS, 8, 17), dtype=np.int32)
    found = [{"inputs": each[:, :-1], "targets": each[:, 1:]} for each in tokens]
    if is_packed:  # documents that chunks cut, each of its own length
        starts = np.arange(8)[:, None] % 5 + 3
        ids = 1 + (np.arange(16) >= starts) + (np.arange(16) >= 2 * starts)
        positions = np.stack(
            [np.concatenate([np.arange(n) for n in np.unique(row, return_counts=True)[1]]) for row in ids]
        )
        more = {"segment_ids": ids.astype(np.int32), "positions": positions.astype(np.int32)}
        found = [each | more for each in found]
    return found


def reference_loss(model: Model, params: Any, batch: dict[str, Any]) -> jax.Array:
    """On one device: layers unrolled, no scan, no remat, no sharding; optax's own loss."""
    positions = batch.get("positions", jnp.arange(16)[None])
    context = Context(positions, lambda _, x, *axes, **__: x, segment_ids_BT=batch.get("segment_ids"))
    x = model.embed.apply(params["embed"], batch["inputs"], context)
    for stack in model.stacks:
        for i in range(stack.num_layers):
            x, _ = split_aux(stack.layer.apply(jax.tree.map(lambda w, i=i: w[i], params[stack.name]), x, context))
    logits = model.head.apply(model.head_params(params["head"], params["embed"]), x, context)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


Step = Callable[[Any, dict[str, np.ndarray]], tuple[float, Any]]  # (loss, gradients) of parameters and a batch


def trained(step: Step, params: Any, batches: list[dict[str, np.ndarray]]) -> tuple[list[float], Any]:
    """(the loss of each step, the gradients of the first)."""
    losses, first = [], None
    for batch in batches:
        loss, grads = step(params, batch)
        losses.append(loss)
        first = grads if first is None else first
        params = jax.tree.map(lambda p, g: p - np.float32(RATE) * g, params, grads)
    return losses, first


@cache
def on_one_device(family: str, documents: str) -> tuple[Any, list[float], Any]:
    """(initial parameters, losses, gradients of the first step)."""
    plan = plan_of(*COMMON[2:], "target=cpu-1", *CHOICES["family"][family])
    params = jax.tree.map(np.asarray, plan.model.init(jax.random.key(0)))
    run = jax.jit(jax.value_and_grad(lambda params, batch: reference_loss(plan.model, params, batch)))

    def step(params: Any, batch: dict[str, np.ndarray]) -> tuple[float, Any]:
        loss, grads = run(params, batch)
        return float(loss), jax.tree.map(np.asarray, grads)

    return params, *trained(step, params, batches_of(is_packed=documents == "packed"))


PACKED = "fsdp 2 x context 2, ring, save_names, llama, packed, 1 microbatch, scan, zigzag"


@pytest.mark.parametrize("name", tiered(COVER, plain=(), ci=[PACKED, *cover_values(COVER)]))
def test_gradients_and_losses_are_those_of_one_device(name, proof):
    row = COVER[name]
    plan = plan_of(*COMMON, *(override for choice, value in row.items() for override in CHOICES[choice][value]))
    first, *_ = batches = batches_of(is_packed=row["documents"] == "packed")
    step = Gradients(plan, first)
    if proof.is_known(step.parts, [step.on_host(batch) for batch in batches]):
        return
    params, expected_losses, expected = on_one_device(row["family"], row["documents"])
    losses, grads = trained(step, params, batches)
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-6)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected))
    for path, exact in jax.tree_util.tree_leaves_with_path(expected):
        ours = grads
        for key in path:
            ours = ours[key.key]
        # what is added to all keys has no gradient but for rounding
        least = 1e-7 * largest if path[-1].key == "key_bias_KD" else 1e-9
        atol = 4e-6 * np.abs(exact).max() + least
        np.testing.assert_allclose(ours, exact, atol=atol, rtol=2e-5, err_msg=str(path))
