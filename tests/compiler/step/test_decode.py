"""Generation with a cache equals a forward pass over the whole sequence, which knows no cache, token by token."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import plan_of, pointwise_plan, spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.driver import plan_run
from meshloom.compiler.step.decode import BatchShape, Sampling, build_decode, build_prefill, plan_cache
from meshloom.compiler.xla.programs import build, lower_generation
from support.experts import MOE
from support.programs import of_reference
from support.reference import forward
from support.tiers import tiered

LENGTHS = (5, 11, 8)  # of the prompts of a batch; more than the windows of 4
SHAPE = BatchShape(num_sequences=3, prompt_length=16, num_slots=32)
NUM_NEW = 5
ONE_DEVICE = ("target=cpu-1", "mesh.fsdp=1")
LATENT = (
    "model.num_kv_heads=16", "model.latent_attention={query_dim:24,kv_dim:16,rope_head_dim:4,value_head_dim:6}",
)  # fmt: skip
CASES = {
    "windows in turn, soft caps, grouped queries, tied": (
        "model.num_layers=2", "model.attention_windows=[4,null]", "model.attention_soft_cap=5.0",
        "model.logit_soft_cap=3.0", "model.num_heads=4", "model.num_kv_heads=2", "model.qk_norm=rms",
        "model.attention_sinks=true", "model.embeddings=tied", "model.norm_placement=before_and_after",
        "model.embedding_scale=sqrt_embed_dim",
    ),
    "learned positions, biases": (
        "model.positions=learned", "model.rope_theta=null", "model.num_positions=24", "model.biases=all",
        "model.mlp=plain", "model.norm=layer",
    ),
    "experts": (*MOE, "model.num_experts=4", "model.num_shared_experts=1"),
    "experts in windows, biases, a layer that is left": (
        *MOE, "model.num_experts=4", "model.num_layers=3", "model.attention_windows=[4,null]", "model.biases=all",
        "model.mlp_activation=clamped_swiglu", "model.window_rope_theta=100.0",
        "model.rope_scaling={kind:linear,factor:4.0}",
    ),
    "experts, dense layers, latent attention": (
        *MOE, *LATENT, "model.num_dense_layers=1", "model.dense_mlp_dim=48", "model.attention_windows=[4]",
    ),
}  # fmt: skip


def prompts_of(vocab_size):
    draw = np.random.default_rng(1)
    return [draw.integers(0, vocab_size, length) for length in LENGTHS]


@cache
def plan_for(name):
    return plan_run(spec_of(*ONE_DEVICE, "global_batch_size=4", *CASES[name]))


@cache
def case(name):
    """The plan and its parameters, large enough that logits differ."""
    plan = plan_for(name)
    params = jax.jit(plan.model.init)(jax.random.key(3))
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)
    return plan, params


def padded(prompts, shape=SHAPE):
    tokens = np.zeros((shape.num_sequences, shape.prompt_length), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[shape.prompt_length - len(prompt) :] = prompt
    return tokens, np.array([shape.prompt_length - len(prompt) for prompt in prompts], np.int32)


def generated(plan, params, prompts):
    """The greedy tokens and their logits by the cache: (sequences, new tokens, vocabulary)."""
    with jax.set_mesh(plan.mesh.of_devices(jax.devices()[:1])):
        own = (plan.model, plan.spec.sharding, plan.mesh)
        prefill = jax.jit(build_prefill(*own, plan_cache(plan, SHAPE)[0]))
        decode = jax.jit(build_decode(*own, plan.ops, SHAPE.num_slots), donate_argnums=1)
        tokens, padding = padded(prompts)
        logits, cached = prefill(params, tokens, padding)
        steps = [logits]
        for count in range(NUM_NEW - 1):
            newest = jnp.argmax(logits, -1)
            logits, cached = decode(params, cached, newest, SHAPE.prompt_length + count, padding)
            steps.append(logits)
    return np.stack([np.asarray(step) for step in steps], axis=1)


@pytest.mark.parametrize("name", tiered(CASES, plain=()))
def test_a_cache_changes_no_logit(name):
    plan, params = case(name)
    prompts = prompts_of(plan.spec.model.vocab_size)
    logits = generated(plan, params, prompts)
    chosen = logits.argmax(-1)
    whole = jax.jit(partial(forward, plan.model))
    for prompt, own, tokens in zip(prompts, logits, chosen, strict=True):
        length = max(LENGTHS) + NUM_NEW  # one length, so that the reference is compiled once; what follows is not seen
        sequence = np.concatenate([prompt, tokens[:-1], np.zeros(length, np.int64)])[:length]
        expected = np.asarray(whole(params, sequence[None]))[0, len(prompt) - 1 : len(prompt) - 1 + NUM_NEW]
        np.testing.assert_allclose(own, expected, atol=2e-5 * np.abs(expected).max())
        assert (expected.argmax(-1) == tokens).all()


MESHES = {
    "fsdp 8": ("sharding=fsdp",),
    "fsdp 4, tensor 2": ("sharding=fsdp_tensor", "mesh.fsdp=4", "mesh.tensor=2"),
    "fsdp 2, context 4": ("sharding=fsdp_context", "mesh.fsdp=2", "mesh.context=4"),
    "fsdp 2, expert 2, tensor 2": ("sharding=fsdp_expert", "mesh.fsdp=2", "mesh.expert=2", "mesh.tensor=2"),
}
GREEDY = Sampling.of(seed=0, temperature=0.0, top_k=None, top_p=None, num_tokens=1000)


def generation_on(plan, shape):
    return lower_generation(plan, plan.mesh.of_devices(jax.devices()[: plan.target.num_devices]), shape)


def tokens_on(lowered, params, prompts, shape, sampling=GREEDY):
    """What the programs of a run generate when they are compiled."""
    programs = build(lowered)
    params = jax.device_put(params, programs["working"].input_shardings[0][0])
    params = programs["working"](params)
    tokens, padding = padded(prompts, shape)
    numbers = np.arange(shape.num_sequences, dtype=np.int32)
    arguments = jax.device_put((tokens, padding, sampling, numbers), programs["prefill"].input_shardings[0][1:])
    newest, cached = programs["prefill"](params, *arguments)
    steps, rest = [np.asarray(newest)], arguments[1:]
    for count in range(1, NUM_NEW):
        at = jax.device_put((np.int32(shape.prompt_length + count - 1), np.int32(count)))
        newest, cached = programs["decode"](params, cached, newest, at[0], *rest, at[1])
        steps.append(np.asarray(newest))
    return np.stack(steps, axis=1)


@pytest.mark.parametrize("mesh", tiered(MESHES, plain=()))
def test_eight_devices_generate_what_one_does(mesh, proof):
    name = "experts" if "expert" in mesh else next(iter(CASES))
    shape = BatchShape(4, 16, 32)
    there = plan_run(spec_of("global_batch_size=8", *CASES[name], *MESHES[mesh]))
    one, eight = generation_on(plan_for(name), shape), generation_on(there, shape)
    texts = [([*each.values()], repr(each.compiler_options)) for each in (one, eight)]
    if proof.is_known(texts, jax.tree.map(np.asarray, GREEDY), of_reference(plan_for(name))):
        return
    plan, params = case(name)
    prompts = prompts_of(plan.spec.model.vocab_size)
    prompts.append(prompts[0])
    assert (tokens_on(eight, params, prompts, shape) == tokens_on(one, params, prompts, shape)).all()


def test_layers_of_a_group_have_caches_of_their_own():
    plan = plan_of("model.num_layers=4", "model.attention_windows=[4,null]", "sharding=fsdp_tensor", "mesh.tensor=2")
    cached, specs = plan_cache(plan, SHAPE)
    assert [*cached] == ["layers"]
    assert [*cached["layers"]] == ["keys", "values", "keys_1", "values_1"]
    assert {x.shape for x in cached["layers"].values()} == {(2, 3, 32, 8, 4)}
    assert set(specs["layers"].values()) == {jax.P(None, None, None, ("tensor",), None)}


def test_a_model_without_attention_needs_no_cache():
    assert plan_cache(pointwise_plan(), SHAPE) == ({}, {})


def test_keys_that_are_not_remembered_are_an_error():
    plan = plan_of()
    (stack,) = plan.model.stacks
    piece = stack.layer

    def forgets(params, x, context):
        return piece.apply(params, x, replace(context, remember=lambda _, x, *__: x))

    stacks = (replace(stack, layer=replace(piece, apply=forgets)),)
    with pytest.raises(ValueError, match="keys of 1 of 32 tokens: pass what keys and values are made of"):
        plan_cache(replace(plan, model=replace(plan.model, stacks=stacks)), SHAPE)


def test_a_user_model_that_looks_around_otherwise_than_by_attention_is_refused():
    plan = pointwise_plan()
    (stack,) = plan.model.stacks
    piece = stack.layer

    def mixes(params, x, context):
        return jax.tree.map(lambda y: y + jnp.cumsum(x, axis=1) if y.ndim == 3 else y, piece.apply(params, x, context))

    stacks = (replace(stack, layer=replace(piece, apply=mixes)),)
    with pytest.raises(ConfigError, match="looks from one token at another otherwise than by attention"):
        plan_cache(replace(plan, model=replace(plan.model, stacks=stacks)), SHAPE)


@pytest.mark.ci
def test_a_cache_is_written_in_place_and_no_device_holds_more_than_its_part():
    """A long cache of a narrow model: whatever copied it would double the memory of the program, and show."""
    plan = plan_of("sharding=fsdp_tensor", "mesh.fsdp=4", "mesh.tensor=2")
    shape = BatchShape(num_sequences=8, prompt_length=16, num_slots=4096)
    programs = build(lower_generation(plan, plan.mesh.of_devices(jax.devices()), shape, ["decode"]))
    memory = programs["decode"].memory_analysis()
    cached = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(plan_cache(plan, shape)[0]))
    assert memory.alias_size_in_bytes == cached // 8
    assert memory.temp_size_in_bytes < cached // 8
