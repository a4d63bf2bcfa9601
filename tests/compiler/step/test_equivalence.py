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
from support.pairwise import Pair, Row, all_pairs, cover_pairs, cover_values, pairs_of
from support.programs import Gradients, batch_of, evaluate, lowered_of, on_devices, on_host, programs_of
from support.reference import reference_loss, reference_steps
from support.tiers import tiered

DDP, FSDP, TENSOR, BOTH = "sharding=ddp", "sharding=fsdp", "sharding=tensor", "sharding=fsdp_tensor"
FOUR, HSDP, CONTEXT = "target=cpu-4", "sharding=hsdp", "sharding=fsdp_context"
PREFETCH, IN_BACKWARD, RINGS = (
    "overlap=prefetch",
    "overlap.layers.reduce_in_backward=true",
    "parallel.matmul=collective_matmul",
)
NOT_SPLIT = "{logical:[layers,vocab,mlp,heads,kv_heads,head_dim],mesh:[]}"
TENSOR_AND_ZERO = (
    "sharding.optimizer=[{logical:[embed],mesh:[data]},{logical:[vocab,mlp,heads,kv_heads],mesh:[tensor]},"
    "{logical:[layers,head_dim],mesh:[]}]"
)
FSDP_AND_ZERO = f"sharding.optimizer=[{{logical:[embed],mesh:[fsdp,replica]}},{NOT_SPLIT}]"
GPT2 = (
    "model.positions=learned", "model.rope_theta=null", "model.num_positions=16", "model.norm=layer", "model.mlp=plain",
    "model.biases=all", "model.embeddings=tied", "model.vocab_size=264",
)  # fmt: skip
GEMMA2 = ("model.norm_placement=before_and_after", "model.num_layers=4", "model.attention_windows=[4,null]")
CHOICES = {
    "mesh": {
        "fsdp 4": (FOUR, FSDP),
        "ddp 2x2": (FOUR, DDP, "mesh.replica=2", "mesh.data=2"),
        "zero1 2x2": (FOUR, "sharding=zero1", "mesh.replica=2"),
        "zero2 with a tensor axis": (
            TENSOR, "mesh.data=4", "mesh.tensor=2", TENSOR_AND_ZERO, "sharding.gradients=optimizer",
        ),
        "hsdp 2x2": (FOUR, HSDP, "mesh.replica=2"),
        "hsdp 2x2, gradients over replicas too": (
            FOUR, HSDP, "mesh.replica=2", FSDP_AND_ZERO, "sharding.gradients=optimizer",
        ),
        "fsdp_tensor 2x2x2": (BOTH, "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
        "fsdp_tensor 2x4 in rings": (BOTH, RINGS, "mesh.fsdp=2", "mesh.tensor=4"),
    },
    "loop": {
        "scan": (),
        "prefetch": (PREFETCH,),
        "prefetch 2 in turns of 2": (PREFETCH, "overlap.layers.prefetch=2", "overlap.layers.unroll=2"),
        "2 parts": ("overlap.layers.batch_split=2",),
    },
    "remat": {
        "no remat": (),
        **{name: (f"remat={name}",) for name in ("full", "save_dots", "save_names", "offload")},
    },
    "microbatches": {"1 microbatch": (), "2 microbatches": ("num_microbatches=2",)},
    "reduction": {"at the end": (), "in backward": (IN_BACKWARD,)},
    "family": {"llama": (), "gpt2": GPT2, "gemma2": GEMMA2},
    "head": {
        "logits": (),
        "logits in blocks": ("loss.max_logits_bytes=16384", "loss.max_logits_share=0.0"),
        "vocabulary in parts": ("parallel.lm_head=vocab_chunks",),
    },
}  # fmt: skip
NAMES = {choice: list(values) for choice, values in CHOICES.items()}


def _fits(row: Row) -> bool:
    """Only weights that are split over batch axes alone, and are the head's own, are multiplied in parts."""
    is_split = row.get("mesh", "fsdp 4").startswith(("fsdp 4", "hsdp"))
    return row.get("head") != "vocabulary in parts" or (is_split and row.get("family") != "gpt2")


COVER = {", ".join(row.values()): row for row in cover_pairs(NAMES, _fits)}
# What the cover does not have: layouts by rules of one's own, more shards or parts, rings over context.
OTHERS = {
    "one device": ("target=cpu-1",),
    "fsdp 2x2x2": (FSDP, "mesh.replica=2", "mesh.data=2", "mesh.fsdp=2"),
    "tensor 8": (TENSOR, "mesh.data=1", "mesh.tensor=8"),
    "fsdp_tensor 4x2, the residual stream whole": (*WHOLE_STREAM, "mesh.fsdp=4", "mesh.tensor=2"),
    "both axes on one dimension": (
        FSDP, "mesh.data=2", "mesh.fsdp=4",
        f"sharding.parameters=[{{logical:[embed],mesh:[data,fsdp]}},{NOT_SPLIT}]",
    ),
    "fsdp_2d, 4 chunks of the loss": ("sharding=fsdp_2d", "mesh.data=2", "mesh.fsdp=4", "loss.num_chunks=4"),
    "a dimension over a batch axis and another": (
        BOTH, "mesh.fsdp=4", "mesh.tensor=2",
        f"sharding.parameters=[{{logical:[embed],mesh:[fsdp,tensor]}},{NOT_SPLIT}]",
    ),
    "4 microbatches, zero1 with a tensor axis, in backward": (
        TENSOR, IN_BACKWARD, "mesh.data=4", "mesh.tensor=2", TENSOR_AND_ZERO, "num_microbatches=4",
    ),
    "prefetch, linear stack": (FSDP, PREFETCH, "model=linear_stack"),
    "prefetch more than there is, gradients at once": (
        FSDP, PREFETCH, "overlap.layers.prefetch=5", "overlap.layers.deferred_reduce_scatter=false",
    ),
    "4 parts, rings, tensor 4x2": (TENSOR, "overlap.layers.batch_split=4", RINGS, "mesh.data=4", "mesh.tensor=2"),
    "ring, parameters over fsdp alone, in backward": (
        CONTEXT, "parallel.context=ring", IN_BACKWARD,
        f"sharding.parameters=[{{logical:[embed],mesh:[fsdp]}},{NOT_SPLIT}]",
    ),
    "ulysses, context 8, 2 parts": (
        CONTEXT, "parallel.context=ulysses", "mesh.context=8", "overlap.layers.batch_split=2",
    ),
    "ring, rings of matmuls, gpt2's parts, fsdp_context_tensor 2x2x2": (
        CONTEXT, "parallel.context=ring", RINGS, "mesh.fsdp=2", "mesh.context=2", "mesh.tensor=2", *GPT2,
    ),
}  # fmt: skip
CASES = OTHERS | {
    name: tuple(override for choice, value in row.items() for override in CHOICES[choice][value])
    for name, row in COVER.items()
}
# Each value of each choice but the mesh occurs in a case of the plain tier; all of them do in two cases of both tiers.
PLAIN = cover_values({name: {key: row[key] for key in row if key != "mesh"} for name, row in COVER.items()})
CI = [*cover_values(COVER, times=2), *OTHERS]
# Whole steps, for what their update depends on; the other cases differ in their gradients alone.
_UPDATE = ("mesh", "microbatches", "reduction")
UPDATED = cover_values({name: {choice: row[choice] for choice in _UPDATE} for name, row in COVER.items()})


def test_the_cover_has_every_pair():
    found = set[Pair]().union(*(pairs_of(row) for row in COVER.values()))
    assert found == set(all_pairs(NAMES, _fits))


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


@pytest.mark.parametrize("name", tiered(CASES, plain=PLAIN, ci=CI), ids=str)
def test_gradients_are_those_of_one_device(name, tokens, reference, proof):
    _assert_gradients_of_one_device(_plan(CASES[name]), tokens, reference, proof)


def _assert_gradients_of_one_device(plan, tokens, reference, proof):
    step = Gradients(plan, batch_of(tokens[0]))
    if proof.is_known(step.parts):
        return
    params, (loss, grads), _ = reference(plan, tokens)
    our_loss, our_grads = step(params)
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


@pytest.mark.parametrize("name", tiered(TILES, plain=()))
def test_gradients_of_shards_that_are_no_whole_tiles_are_those_of_one_device(
    name, tokens, reference, proof, monkeypatch
):
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
    _assert_gradients_of_one_device(plan, tokens, reference, proof)


@pytest.mark.parametrize("name", tiered([*UPDATED, "one device"], plain=(), ci=UPDATED[:6]), ids=str)
def test_ten_steps_are_those_of_one_device(name, tokens, reference, proof):
    plan = _plan(CASES[name])
    programs, order = programs_of(plan), plan.batch.token_order.of_sequence(tokens.shape[2] - 1)
    layouts = jax.tree.map(lambda x: x.sharding, programs.state)
    batches = [on_host(programs, batch, order) for batch in tokens]
    if proof.is_known(lowered_of(plan, "init", "train"), batches, repr(layouts)):
        return
    _, _, curve = reference(plan, tokens)
    state, ours = programs["init"](), []
    for batch in tokens:
        state, metrics = programs["train"](state, on_devices(programs, batch, order))
        ours.append([float(metrics[key]) for key in ("loss", "grad_norm", "learning_rate")])
    np.testing.assert_allclose(np.array(ours), curve, rtol=2e-4, atol=1e-7)
    assert int(state["step"]) == len(tokens)
    assert jax.tree.map(lambda x: x.sharding, state) == layouts


@pytest.mark.ci
def test_bfloat16_stays_near_float32(tokens, reference, proof):
    plan = plan_of("precision=bfloat16", BOTH)
    step = Gradients(plan, batch_of(tokens[0]))
    if proof.is_known(step.parts):
        return
    params, (loss, grads), _ = reference(plan, tokens)
    our_loss, our_grads = step(params)
    assert our_loss == pytest.approx(loss, rel=1e-2)
    cosines = [
        float((a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b)))
        for a, b in zip(jax.tree.leaves(our_grads), jax.tree.leaves(grads), strict=True)
    ]
    assert min(cosines) > 0.99  # bfloat16 has 8 bits of precision
    assert all(g.dtype == np.float32 for g in jax.tree.leaves(our_grads))


@pytest.mark.ci
@pytest.mark.parametrize(
    "case",
    [(HSDP, PREFETCH, IN_BACKWARD, "mesh.replica=2", "remat=full"), (BOTH, PREFETCH, RINGS, "num_microbatches=2")],
)
def test_the_ends_of_a_loop_change_no_gradient(tokens, case, proof):
    """CPUs branch around them, accelerators do not. XLA may fuse the two programs differently: to rounding."""
    plan = _plan(case)
    steps, branches = [], []
    for is_synchronous in (True, False):
        traits = plan.target.compiler.model_copy(update={"synchronous_collectives": is_synchronous})
        plan = replace(plan, target=replace(plan.target, compiler=traits))
        steps.append(Gradients(plan, batch_of(tokens[0])))
        text = lower(plan, plan.mesh.of_devices(jax.devices()), ["train"])["train"].as_text()
        branches.append(text.count("stablehlo.case"))
    assert branches == [2, 0]
    if proof.is_known([step.parts for step in steps]):
        return
    params = jax.tree.map(np.asarray, plan.model.init(jax.random.key(0)))
    found = [jax.tree.leaves(step(params)) for step in steps]
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


@pytest.mark.ci
def test_initial_values_are_the_same_on_every_mesh(proof):
    plans = [plan_of(*case) for case in (("target=cpu-1",), (FSDP,), CHOICES["mesh"]["fsdp_tensor 2x2x2"])]
    if proof.is_known([lowered_of(plan, "init") for plan in plans]):
        return
    states = [programs_of(plan)["init"]() for plan in plans]
    for path, expected in jax.tree_util.tree_leaves_with_path(jax.tree.map(np.asarray, states[0])):
        for other in states[1:]:
            ours = dict(jax.tree_util.tree_leaves_with_path(other))[path]
            np.testing.assert_array_equal(np.asarray(ours), expected, err_msg=str(path))


@pytest.mark.ci
def test_every_matrix_of_every_layer_is_drawn_anew(proof):
    plans = [plan_of("target=cpu-1", f"seed={seed}") for seed in (0, 1)]
    if proof.is_known([lowered_of(plan, "init") for plan in plans]):
        return
    one, other = (programs_of(plan)["init"]()["params"] for plan in plans)
    drawn = [np.asarray(x) for tree in (one, other) for x in jax.tree.leaves(tree["layers"]) if x.ndim > 2]
    slices = [layer.tobytes() for x in drawn for layer in x]  # a matrix in one layer
    assert len(set(slices)) == len(slices) == 2 * 7 * 3
    for piece in ("embed", "head"):
        for a, b in zip(jax.tree.leaves(one[piece]), jax.tree.leaves(other[piece]), strict=True):
            assert a.ndim == 1 or not np.array_equal(a, b)


@pytest.mark.ci
def test_evaluation_is_the_loss_before_a_step(tokens, proof):
    plan = plan_of(BOTH, "num_microbatches=2")
    programs = programs_of(plan)
    if proof.is_known(lowered_of(plan, "init", "train", "evaluate"), on_host(programs, tokens[0])):
        return
    state, batch = programs["init"](), on_devices(programs, tokens[0])
    before = evaluate(programs, state["params"], tokens[0])
    assert before == pytest.approx(float(programs["train"](state, batch)[1]["loss"]), rel=1e-6)
