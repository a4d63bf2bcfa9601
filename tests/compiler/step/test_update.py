"""The update half of the step: what is skipped, the loss scale, master weights, and state on a mesh."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import LINEAR_STACK, plan_of
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.plan import Plan
from meshloom.compiler.spec.step_spec import LossScaleSpec
from meshloom.compiler.step.train_step import build_init, build_update, next_loss_scale
from meshloom.compiler.xla.programs import lower
from meshloom.runtime.checkpoint.checkpoints import Checkpoints, restore
from meshloom.runtime.checkpoint.find import Checkpoint
from meshloom.runtime.data import open_data
from support.programs import lowered_of, on_devices, on_host, programs_of

ONE = "target=cpu-1"


def _bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@cache
def _updating(*overrides: str):
    """A plan on one device, its compiled update, and the state before it."""
    plan = plan_of(ONE, *overrides)
    state = jax.jit(build_init(plan))()
    return plan, jax.jit(build_update(plan)), state


def _gradients(plan: Plan[RunSpec], value: float | None = None) -> Any:
    chance = np.random.default_rng(0)
    grads = jax.tree.map(
        lambda x: jnp.asarray(chance.normal(size=x.shape), plan.spec.precision.gradients), plan.abstract["params"]
    )
    if value is not None:
        grads["layers"]["mlp"]["up_EM"] = grads["layers"]["mlp"]["up_EM"].at[1, 2, 3].set(value)
    return grads


@pytest.mark.parametrize(("loss", "gradient"), [(np.nan, None), (np.inf, None), (1.0, np.nan), (1.0, -np.inf)])
def test_a_skipped_update_leaves_every_bit(loss, gradient):
    plan, update, state = _updating("on_nonfinite=skip", "precision=bfloat16_params")
    state, metrics = update(state, jnp.float32(1.0), _gradients(plan), {}, {})
    assert metrics["skipped"] == 0
    after, metrics = update(state, jnp.float32(loss), _gradients(plan, gradient), {}, {})
    assert metrics["skipped"] == 1
    assert _bits(after) == _bits(state)
    resumed, metrics = update(after, jnp.float32(1.0), _gradients(plan), {}, {})
    assert metrics["skipped"] == 0
    assert int(resumed["step"]) == 2
    assert not set(_bits(resumed["master"])) & set(_bits(after["master"]))


def test_without_skip_nothing_is_selected_away():
    plan, update, state = _updating("on_nonfinite=stop")
    after, metrics = update(state, jnp.float32(np.nan), _gradients(plan, np.nan), {}, {})
    assert metrics["skipped"] == 0
    assert int(after["step"]) == 1
    assert np.isnan(after["params"]["layers"]["mlp"]["up_EM"]).any()


def test_a_loss_scale_is_lowered_by_an_overflow_and_raised_behind_enough_steps():
    spec = LossScaleSpec(initial=1024.0, growth_factor=2.0, growth_interval=3, backoff_factor=0.25)
    state, scales = {"scale": jnp.float32(spec.initial), "num_finite_steps": jnp.int32(0)}, []
    for is_finite in (True, True, False, True, True, True, False, False, False, False, False, False):
        state = next_loss_scale(spec, state, jnp.bool_(is_finite))
        scales.append(float(state["scale"]))
    assert scales == [1024, 1024, 256, 256, 256, 512, 128, 32, 8, 2, 1, 1]


@pytest.fixture(scope="module")
def float16():
    """A run in float16 from a scale that overflows: programs, the states' scales, metrics and losses."""
    keys = ("precision=float16", f"precision.loss_scale.initial={2.0**40}", f"precision.loss_scale.backoff_factor={2.0**-8}")  # fmt: skip  # noqa: E501
    plan = plan_of("sharding=zero2", *LINEAR_STACK, *keys)
    return plan, programs_of(plan)


@pytest.mark.ci
def test_training_recovers_from_an_overflow(float16, tokens, proof):
    plan, programs = float16
    plain = plan_of("sharding=zero2", *LINEAR_STACK)
    inputs = [on_host(programs, batch) for batch in tokens]
    if proof.is_known(lowered_of(plan, "init", "train"), lowered_of(plain, "init", "train"), inputs):
        return
    state, seen = programs["init"](), []
    before = _bits(state["params"])
    for batch in tokens:
        state, metrics = programs["train"](state, on_devices(programs, batch))
        seen.append({name: float(value) for name, value in metrics.items()})
        if seen[-1]["skipped"]:
            assert _bits(state["params"]) == before
    num_skipped = sum(m["skipped"] for m in seen)
    assert 1 <= num_skipped <= 5
    assert [m["skipped"] for m in seen] == sorted((m["skipped"] for m in seen), reverse=True)
    assert seen[-1]["loss_scale"] == 2.0 ** (40 - 8 * num_skipped)
    assert int(state["step"]) == len(tokens) - num_skipped
    exact = programs_of(plain)
    state, losses = exact["init"](), []
    for batch in tokens[int(num_skipped) :]:
        state, metrics = exact["train"](state, on_devices(exact, batch))
        losses.append([float(metrics[key]) for key in ("loss", "grad_norm")])
    ours = [[m["loss"], m["grad_norm"]] for m in seen[int(num_skipped) :]]
    np.testing.assert_allclose(ours, losses, rtol=2e-2)  # the scale is gone from both


@pytest.mark.ci
def test_a_master_moves_where_bfloat16_cannot():
    """Steps of a thousandth of a weight's spacing in bfloat16: a hundred of them are lost, or none."""
    fixed = ("schedule=constant", "schedule.num_warmup_steps=0", "optimizer.learning_rate=1e-6", "optimizer=lion",
             "optimizer.weight_decay=0.0", "model.initializer_stddev=1.0")  # fmt: skip
    for option, moves in (("bfloat16_params", True), ("bfloat16_pure", False)):
        plan, update, state = _updating(f"precision={option}", *fixed)
        before, grads = state, _gradients(plan)
        for _ in range(3):
            state, _ = update(state, jnp.float32(1.0), grads, {}, {})
        large = np.abs(np.asarray(before["params"]["embed"]["table_VE"], np.float32)) > 0.1
        kept = np.asarray(state["params"]["embed"]["table_VE"]) == np.asarray(before["params"]["embed"]["table_VE"])
        assert kept[large].mean() > 0.99
        assert ("master" in state) == moves
        if moves:
            moved = state["master"]["embed"]["table_VE"] - before["master"]["embed"]["table_VE"]
            np.testing.assert_allclose(np.abs(moved)[large], 3e-6, rtol=0.1)
            rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state["master"])
            assert _bits(rounded) == _bits(state["params"])


THREE_BATCHES = np.random.default_rng(1).integers(0, 257, (3, 16, 17), dtype=np.int32)


@pytest.mark.ci
@pytest.mark.parametrize(
    "layout",
    [
        ("sharding=fsdp_tensor", "mesh.data=2", "mesh.fsdp=2"),
        pytest.param(("sharding=ddp",), marks=pytest.mark.ci),
        pytest.param(("sharding=zero2",), marks=pytest.mark.ci),
    ],
)
def test_bfloat16_gradients_cross_the_network(layout, proof):
    """All-reduced, reduce-scattered, beside a tensor axis: XLA's CPU compiler dies of each where it is told wrongly."""
    declared = (("sharding=ddp", "precision=float32"), (*layout, "precision=bfloat16_params"))
    plans = [plan_of(*LINEAR_STACK, *overrides) for overrides in declared]
    inputs = [[on_host(programs_of(plan), batch) for batch in THREE_BATCHES] for plan in plans]
    if proof.is_known([lowered_of(plan, "init", "train") for plan in plans], inputs):
        return
    (exact, _), (loss, state) = map(_third_loss, plans)
    assert loss == pytest.approx(exact, rel=2e-2, abs=1e-6)
    assert _bits(jax.tree.map(lambda x: x.astype(jnp.bfloat16), state["master"])) == _bits(state["params"])


def _third_loss(plan: Plan[RunSpec]) -> tuple[float, Any]:
    """Loss of the third step, and the state behind it."""
    programs, metrics = programs_of(plan), {}
    state = programs["init"]()
    for batch in THREE_BATCHES:
        state, metrics = programs["train"](state, on_devices(programs, batch))
    return float(metrics["loss"]), state


ADAFACTOR = ("optimizer=adafactor", "optimizer.min_dim_size_to_factor=8", "optimizer.weight_decay=0.1")
MUON = ("optimizer=muon",)
SPLIT_MATRICES = ("sharding=fsdp_tensor", "mesh.fsdp=4", "mesh.tensor=2")
# One and two layers: each stage stores a part of all three (compiler/step/placement_order.py).
UNEVEN_STAGES = ("target=cpu-4", "mesh.stage=2", "mesh.fsdp=2", "num_microbatches=4")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("optimizer", "num_layers", "layout"),
    [(ADAFACTOR, 2, SPLIT_MATRICES), (MUON, 2, SPLIT_MATRICES), (MUON, 3, UNEVEN_STAGES)],
    ids=["adafactor", "muon", "muon-stages"],
)
def test_state_over_two_mesh_axes_steps_as_on_one_device(optimizer, num_layers, layout, tokens, proof):
    """What takes means and products over whole matrices is not changed by how they lie."""
    fixed = (*optimizer, f"model.num_layers={num_layers}", "schedule.num_warmup_steps=0")
    curves, finals, plans = [], [], [plan_of(*fixed, *mesh) for mesh in ((ONE,), layout)]
    inputs = [[on_host(programs_of(plan), batch) for batch in tokens[:4]] for plan in plans]
    sizes = [str(plan.memory.state_bytes) for plan in plans]
    if proof.is_known([lowered_of(plan, "init", "train") for plan in plans], inputs, sizes):
        return
    for plan in plans:
        programs = programs_of(plan)
        state, curve = programs["init"](), []
        for batch in tokens[:4]:
            state, metrics = programs["train"](state, on_devices(programs, batch))
            curve.append(float(metrics["loss"]))
        assert _bytes_on_device(state) == plan.memory.state_bytes
        curves.append(curve)
        finals.append(leaves_by_path(jax.tree.map(np.asarray, state)))
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-4)
    for path, expected in finals[0].items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(finals[1][path], expected, atol=2e-3 * scale, err_msg=path)


def _bytes_on_device(tree: Any) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def _argument_bytes(programs) -> int:
    return programs["train"].memory_analysis().argument_size_in_bytes


def test_the_planned_state_is_what_the_program_takes(float16):
    plan, programs = float16
    assert plan.memory.scalars == 4 * 5  # steps made, of Adam, of its schedule; scale, steps since it changed
    assert _argument_bytes(programs) == plan.memory.state_bytes + plan.memory.batch


@pytest.mark.ci
def test_every_part_of_the_state_goes_on_from_a_checkpoint_bit_by_bit(tmp_path, tokens):
    """Masters, a partitioned optimizer's moments, the loss scale: restored as they were, on this layout and another."""
    keys = (*LINEAR_STACK, "optimizer=muon", "precision=float16", "precision.parameters=bfloat16",
            "precision.master=float32", "precision.loss_scale.growth_interval=2")  # fmt: skip
    plan = plan_of("sharding=zero1", *keys)
    programs, other = programs_of(plan), plan_of("sharding=fsdp", *keys)
    state, batches = programs["init"](), iter(open_data(plan.spec)["train"])
    for batch in tokens[:2]:
        state, _ = programs["train"](state, on_devices(programs, batch))
    with Checkpoints(tmp_path, plan.spec) as checkpoints:
        checkpoints.save(2, state, batches, num_tokens=0, eval_loss=None)
    start = Checkpoint(tmp_path / "checkpoints" / "2", 2, is_own=False, damaged={})
    saved = jax.tree.map(np.asarray, state)
    undisturbed, _ = programs["train"](state, on_devices(programs, tokens[2]))
    restored = restore(start, programs.state, batches).state
    assert _bits(restored) == _bits(saved)
    again, metrics = programs["train"](restored, on_devices(programs, tokens[2]))
    assert _bits(again) == _bits(undisturbed)
    assert float(metrics["loss_scale"]) == 2 * 65536
    elsewhere = lower(other, other.mesh.of_devices(jax.devices())).state
    assert _bits(restore(start, elsewhere, batches).state) == _bits(saved)


# Bytes per parameter: parameters, master, moments, gradients. K = 12 of them are split by ZeRO-1, 14 by ZeRO-2.
@pytest.mark.parametrize(
    ("sharding", "expected"),
    [("ddp", (2, 4, 8, 2)), ("zero1", (2, 4 / 8, 8 / 8, 2)), ("zero2", (2, 4 / 8, 8 / 8, 2 / 8)),
     ("fsdp", (2 / 8, 4 / 8, 8 / 8, 2 / 8)), ("hsdp", (2 / 4, 4 / 4, 8 / 4, 2 / 4))],
)  # fmt: skip
def test_mixed_precision_adam_is_sixteen_bytes_a_parameter_split_as_named(sharding, expected):
    plan = plan_of(f"sharding={sharding}", "precision=bfloat16_params")
    m, n = plan.memory, plan.num_parameters
    assert tuple(x / n for x in (m.parameters, m.master, m.optimizer, m.gradients)) == expected
    assert m.working_parameters == 0
