"""The executor of pipelines against one device: losses and gradients, leaf by leaf."""

from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest

from conftest import plan_of
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.pipeline.schedules import build_table
from meshloom.compiler.pipeline.table import TickForm
from meshloom.compiler.step import train_step
from support.programs import Gradients, StepProgram, batch_of, schedule_of

pytestmark = pytest.mark.ci

MULTI, UNIT = TickForm.MULTI, TickForm.UNIT
FSDP = ("sharding=fsdp", "mesh.fsdp=2")
KEY = jax.random.key(7)  # of dropout
TOKENS = np.random.default_rng(0).integers(0, 257, (16, 17), dtype=np.int32)
PER_USE, IN_SHARDS = ("pipeline.gather=use",), ("sharding.gradients=optimizer",)
OFFLOAD = ("remat=offload", "remat.names=[layer_input,mlp_up]")
WINDOWS = ("model.attention_windows=[3,null]",)  # of two layers, which are one of the stack
LOOPS = "slots in loops"  # as on GPUs


def of_release(*case):
    return pytest.param(*case, marks=pytest.mark.release)


# schedule, form of ticks, stages, chunks, microbatches, other overrides; test_pipeline_cover.py has many more
CASES = [
    of_release("gpipe", MULTI, 2, 1, 4, ("sharding=zero2", "mesh.data=2")),
    of_release("1f1b", MULTI, 2, 1, 4, ("sharding=hsdp", "mesh.replica=2", "mesh.fsdp=2")),
    ("1f1b", UNIT, 2, 1, 4, (*FSDP, *PER_USE, "overlap.layers.batch_split=2", "remat=save_dots")),
    of_release("1f1b", MULTI, 4, 1, 4, (*FSDP, "model.embeddings=tied", "remat=none", LOOPS)),
    ("1f1b", MULTI, 2, 1, 4, ("sharding=ddp", "model.num_layers=5", LOOPS)),
    ("gpipe", UNIT, 4, 1, 8, (*FSDP, *IN_SHARDS)),
    ("interleaved_1f1b", MULTI, 2, 3, 4, (*FSDP, "model=tiny_moe", LOOPS)),
    ("interleaved_1f1b", UNIT, 4, 2, 8, ("sharding=ddp", *WINDOWS, "model.dropout_rate=0.2")),
    of_release("interleaved_1f1b_breadth_first", MULTI, 4, 2, 4, FSDP),
    of_release("zb_h1", UNIT, 2, 1, 4, ("sharding=fsdp_tensor", "mesh.fsdp=2", "mesh.tensor=2", *OFFLOAD)),
    ("zb_h1", UNIT, 4, 1, 8, (*FSDP, *WINDOWS, LOOPS)),
    ("zb_h2", UNIT, 2, 1, 4, ("sharding=fsdp_expert", "mesh.expert=2", "model=tiny_moe")),
    ("zb_h2", MULTI, 4, 1, 8, ("sharding=ddp", "model.embeddings=tied")),
    ("zb_v", UNIT, 2, 2, 4, (*FSDP, *WINDOWS, "remat=none")),
    of_release("zb_v", UNIT, 4, 2, 8, ("sharding=ddp", "adapter=lora", "adapter.rank=4")),
    of_release("dualpipe_v", UNIT, 2, 2, 8, ("sharding=fsdp_tensor", "mesh.fsdp=2", "mesh.tensor=2", *PER_USE, LOOPS)),
    of_release("dualpipe_v", MULTI, 4, 2, 8, (*FSDP, *PER_USE, "model=tiny_moe")),
]


@pytest.mark.parametrize(("schedule", "form", "stages", "chunks", "microbatches", "others"), CASES)
def test_gradients_of_a_pipeline_are_those_of_one_device(
    schedule, form, stages, chunks, microbatches, others, proof, monkeypatch
):
    table = build_table(schedule, stages, chunks, microbatches, form)
    check_gradients(table, others, proof, monkeypatch)


SHARED = "pipeline.head=stages"
# A part of the vocabulary is several parts of it, one of each shard that is gathered.
BY_ROWS = (
    "sharding.parameters=[{logical: [vocab, mlp], mesh: [fsdp]},"
    " {logical: [embed, heads, kv_heads, layers, head_dim], mesh: []}]"
)
# Of which all stages share the head.
SHARED_CASES = [
    ("1f1b", MULTI, 2, 1, 4, (*FSDP, SHARED)),
    ("interleaved_1f1b", MULTI, 2, 2, 4, (SHARED, "sharding=fsdp_tensor", "mesh.fsdp=2", "mesh.tensor=2")),
    ("zb_v", UNIT, 4, 2, 8, (*FSDP, SHARED, "model.embeddings=tied", BY_ROWS, LOOPS)),
]


@pytest.mark.parametrize(("schedule", "form", "stages", "chunks", "microbatches", "others"), SHARED_CASES)
def test_stages_may_share_the_head(schedule, form, stages, chunks, microbatches, others, proof, monkeypatch):
    table = build_table(schedule, stages, chunks, microbatches, form)
    check_gradients(table, others, proof, monkeypatch)


@pytest.mark.parametrize(
    ("schedule", "form", "stages", "chunks", "microbatches"), [("1f1b", MULTI, 2, 1, 4), ("zb_v", UNIT, 4, 2, 8)]
)
def test_layers_may_be_run_again_by_an_operation_of_their_own(
    schedule, form, stages, chunks, microbatches, proof, monkeypatch
):
    table = build_table(schedule, stages, chunks, microbatches, form, recomputes=True)
    check_gradients(table, FSDP, proof, monkeypatch)


@pytest.mark.parametrize("head", ["last", "stages"])
def test_a_table_runs_forward_alone(head, tokens, proof):
    """Log-probabilities of each sequence, and the targets that another token is likelier than."""
    one = plan_of("target=cpu-1", "sharding=ddp", "model.num_layers=4")
    pipeline = ("mesh.stage=2", "pipeline=dualpipe_v", f"pipeline.head={head}", "num_microbatches=4")
    plan = plan_of("target=cpu-4", *pipeline, *FSDP, "model.num_layers=4")
    build = partial(train_step.build_log_probs, counts_misses=True)
    programs = [StepProgram(each, build, batch_of(tokens[0])) for each in (one, plan)]
    if proof.is_known([program.parts for program in programs]):
        return
    params = jax.tree.map(np.asarray, one.model.init(jax.random.key(0)))
    expected, ours = (program.run(params) for program in programs)
    np.testing.assert_allclose(ours[0], expected[0], rtol=1e-5)
    np.testing.assert_array_equal(ours[1], expected[1])


def test_auxiliary_outputs_are_by_layer(tokens, proof):
    """In the order of the model, whichever stage ran them."""
    moe = ("model=tiny_moe", "model.num_layers=4", "num_microbatches=4")
    one = plan_of("target=cpu-1", "sharding=ddp", *moe)
    plan = plan_of("target=cpu-2", "sharding=ddp", "mesh.stage=2", "pipeline=zb_v", *moe)
    build = partial(train_step.build_loss, with_gradients=True)
    programs = [StepProgram(each, build, batch_of(tokens[0])) for each in (one, plan)]
    if proof.is_known([program.parts for program in programs]):
        return
    params = jax.tree.map(np.asarray, one.model.init(jax.random.key(0)))
    expected, ours = (program.run(params)[2] for program in programs)
    assert jax.tree.leaves(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), ours, expected)


@cache
def on_one_device(microbatches: int, model: tuple[str, ...]) -> Gradients:
    """Returns the program of one device on as many microbatches: a balance of experts is one of each."""
    plan = plan_of("target=cpu-1", "sharding=ddp", f"num_microbatches={microbatches}", *model)
    return Gradients(plan, batch_of(TOKENS), KEY)


@cache
def expected_of(microbatches: int, model: tuple[str, ...]) -> tuple[Any, float, Any]:
    """Returns parameters, the loss and its gradients on one device."""
    one = on_one_device(microbatches, model)
    params = jax.tree.map(np.asarray, one.plan.model.init(jax.random.key(0)))
    return params, *one(params)


def check_gradients(table, others, proof, monkeypatch):
    """Compares loss and gradients of a plan on the stages of a table with those of one device."""
    stages, microbatches = table.placement.num_stages, table.num_microbatches
    schedule = partial(schedule_of, table, by_loops=LOOPS in others)
    others = tuple(each for each in others if each != LOOPS)
    num_layers = max(4, table.placement.num_virtual * (2 if set(WINDOWS) <= set(others) else 1))
    is_declared = any(each.startswith("model.num_layers=") for each in others)
    model = (
        *([] if is_declared else [f"model.num_layers={num_layers}"]),
        *(each for each in others if each.startswith(("model", "adapter"))),
    )
    of_one = (microbatches, model)
    one = on_one_device(*of_one)
    sizes = [int(each.split("=")[1]) for each in others if each.startswith("mesh.")]
    devices = stages * int(np.prod(sizes))
    model = tuple(each for each in model if each not in others)
    plan = plan_of(f"target=cpu-{devices}", f"mesh.stage={stages}", f"num_microbatches={microbatches}", *others, *model)
    monkeypatch.setattr(train_step, "choose_schedule", schedule)
    step = Gradients(plan, batch_of(TOKENS), KEY)
    if proof.is_known(one.parts, step.parts):
        return
    params, expected_loss, expected = expected_of(*of_one)
    loss, ours = step(params)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for path, gradient in leaves_by_path(ours).items():
        reference = leaves_by_path(expected)[path]
        np.testing.assert_allclose(gradient, reference, rtol=1e-4, atol=2e-6 * np.abs(reference).max(), err_msg=path)
