"""Every layout computes what one device computes in float32."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from conftest import LINEAR_STACK, WHOLE_STREAM, plan_of
from meshloom.compiler.spec.compiler_traits import read_compiler_traits
from meshloom.compiler.step.train_step import build_loss
from meshloom.compiler.target import target
from meshloom.compiler.xla.programs import lower
from support.programs import evaluate, gradients_of, on_devices, programs_of
from support.reference import reference_loss, reference_steps
from support.tiers import tiered

DDP, FSDP, TENSOR, BOTH = "sharding=ddp", "sharding=fsdp", "sharding=tensor", "sharding=fsdp_tensor"
PREFETCH, IN_BACKWARD = "overlap=prefetch", "overlap.layers.reduce_in_backward=true"
ZERO1, ZERO2, HSDP = "sharding=zero1", "sharding=zero2", "sharding=hsdp"
HEAD_IN_PARTS = "parallel.lm_head=vocab_chunks"
WHOLE = "{logical:[layers,head_dim],mesh:[]}"
TENSOR_AND_ZERO = (
    f"sharding.optimizer=[{{logical:[embed],mesh:[data]}},{{logical:[vocab,mlp,heads,kv_heads],mesh:[tensor]}},{WHOLE}]"
)
FSDP_AND_ZERO = (
    "sharding.optimizer=[{logical:[embed],mesh:[fsdp,replica]},"
    "{logical:[layers,vocab,mlp,heads,kv_heads,head_dim],mesh:[]}]"
)
LAYOUTS = {
    "ddp 8": (DDP,),
    "ddp 4x2": (DDP, "mesh.replica=4", "mesh.data=2"),
    "ddp 2x2x2 with a tensor axis": (TENSOR, "mesh.replica=2", "mesh.data=2", "mesh.tensor=2"),
    "fsdp 8": (FSDP,),
    "fsdp 4x2": (FSDP, "mesh.data=4", "mesh.fsdp=2"),
    "fsdp 2x2x2": (FSDP, "mesh.replica=2", "mesh.data=2", "mesh.fsdp=2"),
    "tensor 8": (TENSOR, "mesh.data=1", "mesh.tensor=8"),
    "tensor 4x2": (TENSOR, "mesh.data=4", "mesh.tensor=2"),
    "fsdp_tensor 8": (BOTH, "mesh.fsdp=8", "mesh.tensor=1"),
    "fsdp_tensor 4x2": (BOTH, "mesh.fsdp=4", "mesh.tensor=2"),
    "fsdp_tensor 2x2x2": (BOTH, "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
    "fsdp_tensor 4x2, the residual stream whole": (*WHOLE_STREAM, "mesh.fsdp=4", "mesh.tensor=2"),
    "both axes on one dimension": (
        FSDP,
        "mesh.data=2",
        "mesh.fsdp=4",
        "sharding.parameters=[{logical:[embed],mesh:[data,fsdp]},{logical:[layers,vocab,mlp,heads,kv_heads,head_dim],mesh:[]}]",
    ),
    "a dimension over a batch axis and another": (
        BOTH,
        "mesh.fsdp=4",
        "mesh.tensor=2",
        "sharding.parameters=[{logical:[embed],mesh:[fsdp,tensor]},{logical:[layers,vocab,mlp,heads,kv_heads,head_dim],mesh:[]}]",
    ),
    "zero1 with a tensor axis": (TENSOR, "mesh.data=4", "mesh.tensor=2", TENSOR_AND_ZERO),
    "zero2 with a tensor axis": (
        TENSOR,
        "mesh.data=4",
        "mesh.tensor=2",
        TENSOR_AND_ZERO,
        "sharding.gradients=optimizer",
    ),
    "hsdp 4x2, gradients over replicas too": (HSDP, "mesh.replica=4", FSDP_AND_ZERO, "sharding.gradients=optimizer"),
    "one device": ("target=cpu-1",),
    "linear stack, fsdp 8": (FSDP, "model=linear_stack"),
}
PROGRAMS = {
    "remat full": (FSDP, "remat=full"),
    "remat save_dots": (FSDP, "remat=save_dots"),
    "remat full, tensor": (BOTH, "remat=full"),
    "2 microbatches": (FSDP, "num_microbatches=2"),
    "2 microbatches, ddp": (DDP, "num_microbatches=2"),
    "4 microbatches, ddp 4 of 8": (TENSOR, "mesh.data=4", "mesh.tensor=2", "num_microbatches=4", "remat=full"),
    "2 microbatches, zero1 2x4": (ZERO1, "mesh.replica=2", "num_microbatches=2"),
    "2 microbatches, zero2 2x4, remat full": (ZERO2, "mesh.replica=2", "num_microbatches=2", "remat=full"),
    "2 microbatches, hsdp, remat save_names": (HSDP, "num_microbatches=2", "remat=save_names"),
    "remat offload": (FSDP, "remat=offload"),
    "4 microbatches, fsdp_tensor, save_dots": (BOTH, "num_microbatches=4", "remat=save_dots"),
    "prefetch": (FSDP, PREFETCH),
    "prefetch, remat full": (FSDP, PREFETCH, "remat=full"),
    "prefetch, remat offload": (FSDP, PREFETCH, "remat=offload"),
    "prefetch, hsdp 4x2, remat save_names": (HSDP, PREFETCH, "mesh.replica=4", "remat=save_names"),
    "prefetch 2 in turns of 2, fsdp_tensor, save_dots, 2 microbatches": (
        BOTH, PREFETCH, "overlap.layers.prefetch=2", "overlap.layers.unroll=2", "remat=save_dots", "num_microbatches=2",
    ),
    "prefetch more than there is, gradients at once": (
        FSDP, PREFETCH, "overlap.layers.prefetch=5", "overlap.layers.deferred_reduce_scatter=false",
    ),
    "prefetch, zero2: gradients alone are late": (ZERO2, PREFETCH),
    "prefetch, ddp: nothing to do": (DDP, PREFETCH),
    "prefetch, linear stack": (FSDP, PREFETCH, "model=linear_stack"),
    "head in parts": (FSDP, HEAD_IN_PARTS),
    "head in parts, hsdp 4x2, 2 microbatches, in backward": (
        HSDP, HEAD_IN_PARTS, IN_BACKWARD, "mesh.replica=4", "num_microbatches=2",
    ),
    "prefetch, head in parts and blocks, gradients over replicas too": (
        HSDP, PREFETCH, HEAD_IN_PARTS, "mesh.replica=4", FSDP_AND_ZERO, "sharding.gradients=optimizer",
        "loss.max_logits_bytes=16384", "loss.max_logits_share=0.0",
    ),
}  # fmt: skip
REDUCED_IN_BACKWARD = {
    "ddp, in backward": (DDP, IN_BACKWARD),
    "hsdp 4x2, in backward": (HSDP, IN_BACKWARD, "mesh.replica=4"),
    "zero1 2x4, in backward": (ZERO1, IN_BACKWARD, "mesh.replica=2"),
    "zero2 2x4, in backward": (ZERO2, IN_BACKWARD, "mesh.replica=2"),
    "fsdp_tensor 2x2x2, in backward": (BOTH, IN_BACKWARD, "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
    "hsdp 4x2, updated over replicas too, in backward": (HSDP, IN_BACKWARD, "mesh.replica=4", FSDP_AND_ZERO),
    "prefetch, ddp, in backward": (DDP, PREFETCH, IN_BACKWARD),
    "prefetch, hsdp 2x4, in backward, remat full": (HSDP, PREFETCH, IN_BACKWARD, "remat=full"),
    "prefetch, zero1 2x4, in backward": (ZERO1, PREFETCH, IN_BACKWARD, "mesh.replica=2"),
    "prefetch, zero2 2x4, in backward": (ZERO2, PREFETCH, IN_BACKWARD, "mesh.replica=2"),
    "prefetch, fsdp_tensor 2x2x2, in backward": (
        BOTH, PREFETCH, IN_BACKWARD, "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2",
    ),
    "2 microbatches, ddp, in backward": (DDP, IN_BACKWARD, "num_microbatches=2"),
    "4 microbatches, zero1 with a tensor axis, in backward": (
        TENSOR, IN_BACKWARD, "mesh.data=4", "mesh.tensor=2", TENSOR_AND_ZERO, "num_microbatches=4",
    ),
    "2 microbatches, prefetch 2, hsdp 4x2, updated over replicas too, in backward": (
        HSDP, PREFETCH, IN_BACKWARD, "mesh.replica=4", FSDP_AND_ZERO, "overlap.layers.prefetch=2", "num_microbatches=2",
    ),
}  # fmt: skip
GPT2 = (
    "model.positions=learned", "model.rope_theta=null", "model.num_positions=16", "model.norm=layer", "model.mlp=plain",
    "model.biases=all", "model.embeddings=tied", "model.vocab_size=264",
)  # fmt: skip
GEMMA2 = ("model.norm_placement=before_and_after", "model.num_layers=4", "model.attention_windows=[4,null]")
SPLIT_STREAMS = {
    "gpt2's parts, fsdp_tensor 2x4": (BOTH, "mesh.fsdp=2", "mesh.tensor=4", *GPT2),
    "gemma2's layers, tensor 8, remat full": (TENSOR, "mesh.data=1", "mesh.tensor=8", "remat=full", *GEMMA2),
    "tensor 4x2, save_dots": (TENSOR, "mesh.data=4", "mesh.tensor=2", "remat=save_dots"),
    "prefetch, fsdp_tensor 2x4, remat full, logits in parts": (
        BOTH, PREFETCH, "mesh.fsdp=2", "mesh.tensor=4", "remat=full", "loss.max_logits_bytes=16384",
        "loss.max_logits_share=0.0",
    ),
}  # fmt: skip
RINGS, PARTS = "parallel.matmul=collective_matmul", "overlap.layers.batch_split=2"
IN_RINGS = {
    "rings, fsdp_tensor 2x4": (BOTH, RINGS, "mesh.fsdp=2", "mesh.tensor=4"),
    "rings, gpt2's parts, tensor 4x2, remat full": (
        TENSOR, RINGS, "mesh.data=4", "mesh.tensor=2", "remat=full", *GPT2,
    ),
    "rings, gemma2's layers, tensor 8, save_dots": (
        TENSOR, RINGS, "mesh.data=1", "mesh.tensor=8", "remat=save_dots", *GEMMA2,
    ),
    "prefetch, rings, fsdp_tensor 4x2, 2 microbatches": (BOTH, PREFETCH, RINGS, "num_microbatches=2"),
}  # fmt: skip
IN_PARTS = {
    "2 parts, fsdp_tensor 4x2, remat full": (BOTH, PARTS, "remat=full"),
    "4 parts, rings, tensor 4x2, save_dots": (
        TENSOR, "overlap.layers.batch_split=4", RINGS, "mesh.data=4", "mesh.tensor=2", "remat=save_dots",
    ),
    "2 parts, prefetch 2 in turns of 2, hsdp 2x4, in backward": (
        HSDP, PARTS, PREFETCH, IN_BACKWARD, "mesh.replica=2", "overlap.layers.prefetch=2", "overlap.layers.unroll=2",
    ),
    "2 parts, gemma2's layers, fsdp_tensor 2x4, 2 microbatches": (
        BOTH, PARTS, "mesh.fsdp=2", "mesh.tensor=4", "num_microbatches=2", *GEMMA2,
    ),
}  # fmt: skip
CONTEXT, RING = "sharding=fsdp_context", "parallel.context=ring"
OVER_CONTEXT = {  # with what test_context_cover.py does not have
    "ring, parameters over fsdp alone, in backward": (
        CONTEXT, RING, IN_BACKWARD, "sharding.parameters=[{logical:[embed],mesh:[fsdp]},"
        "{logical:[layers,vocab,mlp,heads,kv_heads,head_dim],mesh:[]}]",
    ),
    "ulysses, context 8, 2 parts": (CONTEXT, "parallel.context=ulysses", "mesh.context=8", PARTS),
    "ring, rings of matmuls, gpt2's parts, fsdp_context_tensor 2x2x2": (
        CONTEXT, RING, RINGS, "mesh.fsdp=2", "mesh.context=2", "mesh.tensor=2", *GPT2,
    ),
}  # fmt: skip
CASES = LAYOUTS | PROGRAMS
ALL_CASES = CASES | OVER_CONTEXT | SPLIT_STREAMS | IN_RINGS | IN_PARTS | REDUCED_IN_BACKWARD

# Every sharding, loop, remat policy, number of microbatches, option of the head and model occurs in a case of the plain
# tier, and the pairs that share code: sharding with loop, loop with remat, microbatches with reduction in backward.
COVER = (
    "one device", "fsdp_tensor 2x2x2", "fsdp_tensor 4x2, the residual stream whole", "both axes on one dimension",
    "zero2 with a tensor axis", "4 microbatches, ddp 4 of 8", "2 microbatches, zero1 2x4", "prefetch, remat offload",
    "prefetch, linear stack", "prefetch, hsdp 4x2, remat save_names",
    "prefetch 2 in turns of 2, fsdp_tensor, save_dots, 2 microbatches", "2 microbatches, ddp, in backward",
    "prefetch, head in parts and blocks, gradients over replicas too",
    "2 microbatches, prefetch 2, hsdp 4x2, updated over replicas too, in backward",
    "rings, gpt2's parts, tensor 4x2, remat full", "2 parts, gemma2's layers, fsdp_tensor 2x4, 2 microbatches",
)  # fmt: skip
# Whole steps; the other cases differ in their gradients alone.
UPDATED = [*CASES, *list(REDUCED_IN_BACKWARD)[-2:], *list(OVER_CONTEXT)[-1:]]


def _plan(case: tuple[str, ...]):
    return plan_of(*case, *(LINEAR_STACK if "model=linear_stack" in case else ()))


@pytest.fixture(scope="module")
def reference():
    """Gives, by model, parameters, and gradients of the first batch, on one device without any of our step."""
    cache = {}

    def get(plan, tokens):
        key = plan.spec.model.model_dump_json()
        if key not in cache:
            params = jax.tree.map(np.asarray, plan.model.init(jax.random.key(plan.spec.seed)))
            grad = jax.jit(jax.value_and_grad(lambda p, t: reference_loss(plan.model, p, t[:, :-1], t[:, 1:])))
            cache[key] = params, *reference_steps(plan.spec, params, tokens, grad)
        return cache[key]

    return get


@pytest.mark.parametrize("name", tiered(ALL_CASES, plain=COVER, is_halved=True))
def test_gradients_are_those_of_one_device(name, tokens, reference):
    _assert_gradients_of_one_device(_plan(ALL_CASES[name]), tokens, reference)


def _assert_gradients_of_one_device(plan, tokens, reference):
    params, (loss, grads), _ = reference(plan, tokens)
    our_loss, our_grads = gradients_of(plan, params, tokens[0])
    assert our_loss == pytest.approx(loss, rel=1e-6)
    for path, expected in jax.tree_util.tree_leaves_with_path(grads):
        ours = our_grads
        for key in path:
            ours = ours[key.key]
        if path[-1].key == "key_bias_KD":  # the softmax takes off what is added to all keys: zero but for rounding
            queries = our_grads
            for key in path[:-1]:
                queries = queries[key.key]
            np.testing.assert_array_less(np.abs(ours), 2e-6 * np.abs(queries["query_bias_HD"]).max())
            continue
        np.testing.assert_allclose(
            ours, expected, atol=3e-6 * np.abs(expected).max() + 1e-9, rtol=2e-5, err_msg=str(path)
        )


TIED = "model.embeddings=tied"
AS_ROWS = ("model.embed_dim=128", "model.initializer_stddev=0.05")
TILES = {  # rows of a tile, with shards that are none
    "mlp and vocab instead of embed": (8, (FSDP, "remat=full", "model.embed_dim=40", "model.vocab_size=512", TIED)),
    "rows as tiles, prefetch, hsdp 2x4": (64, (HSDP, PREFETCH, "mesh.replica=2", "model.mlp_dim=128", *AS_ROWS)),
    "rows as tiles, fsdp_tensor 4x2": (64, (BOTH, "mesh.fsdp=4", "mesh.tensor=2", "model.mlp_dim=256", *AS_ROWS)),
}  # fmt: skip


@pytest.mark.parametrize("name", tiered(TILES, plain=list(TILES)[:1]))
def test_gradients_of_shards_that_are_no_whole_tiles_are_those_of_one_device(name, tokens, reference, monkeypatch):
    num_rows, case = TILES[name]
    traits = read_compiler_traits("cpu", None).model_copy(update={"tile_rows": num_rows})
    monkeypatch.setattr(target, "read_compiler_traits", lambda *_: traits)
    plan = _plan(case)
    split = {array.array.path: tuple(array.spec) for array in plan.sharding.parameters}
    if name.startswith("rows as tiles"):
        assert split["layers/mlp/up_EM"][1] == "fsdp"
        batch = {name: jax.ShapeDtypeStruct((16, 16), np.int32) for name in ("inputs", "targets")}
        with jax.set_mesh(plan.mesh.of_devices(jax.devices())):
            jaxpr = jax.make_jaxpr(build_loss(plan, with_gradients=True))(plan.abstract["params"], batch)
        assert "f32[128,1,128]" in str(jaxpr)
    else:
        assert (split["layers/mlp/up_EM"], split["embed/table_VE"]) == ((None, None, "fsdp"), ("fsdp", None))
    _assert_gradients_of_one_device(plan, tokens, reference)


@pytest.mark.parametrize(
    "name",
    tiered(
        UPDATED,
        plain=("zero2 with a tensor axis",),
        release=[name for name in UPDATED if name not in LAYOUTS],
        is_halved=True,
    ),
)
def test_ten_steps_are_those_of_one_device(name, tokens, reference):
    plan = _plan(ALL_CASES[name])
    _, _, curve = reference(plan, tokens)
    programs = programs_of(plan)
    state, ours = programs["init"](), []
    for batch in tokens:
        on_mesh = on_devices(programs, batch, plan.token_order.of_sequence(batch.shape[1] - 1))
        state, metrics = programs["train"](state, on_mesh)
        ours.append([float(metrics[key]) for key in ("loss", "grad_norm", "learning_rate")])
    np.testing.assert_allclose(np.array(ours), curve, rtol=2e-4, atol=1e-7)
    assert int(state["step"]) == len(tokens)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, programs.state)


def test_bfloat16_stays_near_float32(tokens, reference):
    plan = plan_of("precision=bfloat16", BOTH)
    params, (loss, grads), _ = reference(plan, tokens)
    our_loss, our_grads = gradients_of(plan, params, tokens[0])
    assert our_loss == pytest.approx(loss, rel=1e-2)
    cosines = [
        float((a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b)))
        for a, b in zip(jax.tree.leaves(our_grads), jax.tree.leaves(grads), strict=True)
    ]
    assert min(cosines) > 0.99  # bfloat16 has 8 bits of precision
    assert all(g.dtype == np.float32 for g in jax.tree.leaves(our_grads))


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["prefetch, hsdp 2x4, in backward, remat full", "prefetch, rings, fsdp_tensor 4x2, 2 microbatches"]
)
def test_the_ends_of_a_loop_change_no_gradient(tokens, name):
    """CPUs branch around them, accelerators do not. XLA may fuse the two programs differently: to rounding."""
    plan = _plan(ALL_CASES[name])
    params = jax.tree.map(np.asarray, plan.model.init(jax.random.key(0)))
    found, branches = [], []
    for is_synchronous in (True, False):
        traits = plan.target.compiler.model_copy(update={"synchronous_collectives": is_synchronous})
        plan = replace(plan, target=replace(plan.target, compiler=traits))
        found.append(jax.tree.leaves(gradients_of(plan, params, tokens[0])))
        text = lower(plan, plan.mesh.of_devices(jax.devices()), ["train"])["train"].as_text()
        branches.append(text.count("stablehlo.case"))
    assert branches == [2, 0]
    for skipped, run in zip(*found, strict=True):
        np.testing.assert_allclose(skipped, run, rtol=1e-5, atol=2e-6 * np.abs(run).max())


def test_gradients_are_accumulated_in_float32_whatever_the_parameters():
    plan = plan_of("sharding=ddp", "precision=bfloat16", "precision.parameters=bfloat16", "num_microbatches=2")
    batch = {name: jax.ShapeDtypeStruct((16, 16), np.int32) for name in ("inputs", "targets")}
    with jax.set_mesh(plan.mesh.of_devices(jax.devices())):
        jaxpr = jax.make_jaxpr(build_loss(plan, with_gradients=True))(plan.abstract["params"], batch)
    (body,) = (equation.params["jaxpr"] for equation in jaxpr.eqns if equation.primitive.name == "shard_map")
    (loop,) = (e for e in body.eqns if e.primitive.name == "scan" and e.params["length"] == 2)
    assert {str(x.aval).split("[")[0] for x in loop.outvars} == {"float32"}
    assert {str(x).split("[")[0] for x in jaxpr.out_avals[1:]} == {"float32"}


def test_initial_values_are_the_same_on_every_mesh():
    plans = [_plan(LAYOUTS[name]) for name in ("one device", "fsdp 8", "fsdp_tensor 2x2x2")]
    states = [programs_of(plan)["init"]() for plan in plans]
    for path, expected in jax.tree_util.tree_leaves_with_path(jax.tree.map(np.asarray, states[0])):
        for other in states[1:]:
            ours = dict(jax.tree_util.tree_leaves_with_path(other))[path]
            np.testing.assert_array_equal(np.asarray(ours), expected, err_msg=str(path))


def test_every_matrix_of_every_layer_is_drawn_anew():
    one, other = (programs_of(plan_of("target=cpu-1", f"seed={seed}"))["init"]()["params"] for seed in (0, 1))
    drawn = [np.asarray(x) for tree in (one, other) for x in jax.tree.leaves(tree["layers"]) if x.ndim > 2]
    slices = [layer.tobytes() for x in drawn for layer in x]  # a matrix in one layer
    assert len(set(slices)) == len(slices) == 2 * 7 * 3
    for piece in ("embed", "head"):
        for a, b in zip(jax.tree.leaves(one[piece]), jax.tree.leaves(other[piece]), strict=True):
            assert a.ndim == 1 or not np.array_equal(a, b)


@pytest.mark.ci
def test_evaluation_is_the_loss_before_a_step(tokens):
    programs = programs_of(plan_of(BOTH, "num_microbatches=2"))
    state, batch = programs["init"](), on_devices(programs, tokens[0])
    before = evaluate(programs, state["params"], tokens[0])
    assert before == pytest.approx(float(programs["train"](state, batch)[1]["loss"]), rel=1e-6)
