"""Scales from earlier steps: what is rounded with them, what the state keeps, and what is counted."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from conftest import plan_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.formats.operands import operand_formats
from meshloom.compiler.parallel.quantized import Arithmetic, quantized_matmul
from meshloom.compiler.plan import Plan
from meshloom.compiler.step.train_step import build_init, build_train_step

OPERANDS = ("x", "weight", "gradient")
TYPES = {"x": ml_dtypes.float8_e4m3fn, "weight": ml_dtypes.float8_e4m3fn, "gradient": ml_dtypes.float8_e5m2}
SIZE = ("model.vocab_size=64", "model.num_layers=2", "sequence_length=32", "global_batch_size=16", "precision=fp8",
        "precision.compute=float32", "precision.emulate=true", "schedule.num_warmup_steps=0")  # fmt: skip


def _rule(history: int | None, more: str = "") -> str:
    steps = "null" if history is None else history
    return f"precision.matmuls=[{{match:null,forward:fp8,gradients:fp8_e5m2,history:{steps}{more}}}]"


def _rounded(operand: str, x: np.ndarray, scale: Any) -> np.ndarray:
    """As ml_dtypes rounds what is clipped to the largest number."""
    largest = float(ml_dtypes.finfo(TYPES[operand]).max)
    return np.clip(x / scale, -largest, largest).astype(TYPES[operand]).astype(np.float64) * scale


def test_operands_are_rounded_with_the_scales_and_their_magnitudes_are_the_gradient_of_these():
    """Also where a scale is too small for an operand, so that its largest numbers are clipped."""
    rng = np.random.default_rng(0)
    x, weight, g = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 4, 8), (8, 6), (2, 4, 6)))
    scales = np.array([1 / 448, 1 / 64, 1 / 8], np.float32)
    fp8, e5m2 = operand_formats()["fp8"], operand_formats()["fp8_e5m2"]
    arithmetic = Arithmetic(fp8, e5m2, rounds_at_random=False, emulated=True, tokens=(), history=1)

    def product(x: jax.Array, weight: jax.Array, scales: jax.Array) -> jax.Array:
        return quantized_matmul(arithmetic, x, weight, "bte,em->btm", scales=scales)

    y, pull_back = jax.vjp(product, x, weight, scales)
    dx, dw, magnitudes = pull_back(jnp.asarray(g))
    qx, qw, qg = (
        _rounded(name, each, scale) for name, each, scale in zip(OPERANDS, (x, weight, g), scales, strict=True)
    )
    assert np.abs(qx).max() == pytest.approx(1)  # 448 times the scale
    assert np.abs(x).max() > 2
    np.testing.assert_allclose(y, np.einsum("bte,em->btm", qx, qw), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, np.einsum("btm,em->bte", qg, qw), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, np.einsum("bte,btm->em", qx, qg), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(magnitudes, [np.abs(each).max() for each in (x, weight, g)])


class _Run:
    """A run on the same batch, step by step."""

    def __init__(self, *overrides: str):
        self.plan: Plan = plan_of(*SIZE, *overrides)
        self.mesh = self.plan.mesh.of_devices(jax.devices()[: self.plan.target.num_devices])
        with jax.set_mesh(self.mesh):
            self.state = jax.jit(build_init(self.plan))()
            self._step = jax.jit(build_train_step(self.plan, returns_gradients=True))
        tokens = np.random.default_rng(0).integers(0, 64, (16, 33)).astype(np.int32)
        tokens = tokens[self.plan.batch.row_order.rows()]
        self.batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def step(self, **state: Any) -> dict[str, Any]:
        """Makes a step from the state of the last one, with these parts in place of its own. Returns its metrics."""
        with jax.set_mesh(self.mesh):
            self.state, metrics = self._step(self.state | state, self.batch)
        return metrics

    @property
    def history(self) -> dict[str, np.ndarray]:
        """Returns the magnitudes by site: (layers, 3, steps)."""
        return {name: np.asarray(x) for name, x in self.state["magnitudes"]["layers"].items()}


@cache
def _settled(history: int | None) -> _Run:
    """A run whose weights stay, as its learning rate is too small for any of them. An operand depends on the scales of
    those that are computed before it, so that magnitudes have settled once each of them was in the history for as long
    as that is: of two layers four follow each other forward and four backward."""
    run = _Run("target=cpu-1", "optimizer.learning_rate=1e-30", _rule(history))
    for _ in range(0 if history is None else 16 * history):
        run.step()
    return run


@pytest.mark.ci
def test_where_nothing_changes_scales_are_those_from_the_magnitudes_now():
    expected, found = _settled(None).step(), _settled(1).step()
    assert float(found["loss"]) == float(expected["loss"])
    theirs = dict(leaves_by_path(expected["gradients"]))
    for path, gradient in leaves_by_path(found["gradients"]).items():
        np.testing.assert_array_equal(gradient, theirs[path], err_msg=path)


@pytest.mark.ci
def test_what_is_clipped_is_counted():
    """Of settled magnitudes, none. Of a quarter of them, all operands that are not smaller by what was clipped."""
    run = _settled(1)
    assert np.asarray(run.step()["layers/clipped"]).tolist() == [0, 0]
    quarter = jax.tree.map(lambda x: x / 4, run.state["magnitudes"])
    found = np.asarray(run.step(magnitudes=quarter)["layers/clipped"])
    limits = {name: np.asarray(x)[..., 0] for name, x in quarter["layers"].items()}
    above = [history[..., 0] > limits[name] for name, history in run.history.items()]
    expected = np.sum(above, axis=(0, 2))
    assert found.tolist() == expected.tolist()
    assert found.min() > 7


@cache
def _trained() -> _Run:
    """A run that skips steps, before its first."""
    return _Run("target=cpu-1", "on_nonfinite=skip", _rule(2))


@pytest.mark.ci
def test_the_state_keeps_the_magnitudes_of_so_many_steps_the_newest_first():
    run, seen = _trained(), list[dict[str, np.ndarray]]()
    for _ in range(3):
        run.step()
        seen.append(run.history)
    for name, history in seen[-1].items():
        assert history.shape == (2, 3, 2)
        np.testing.assert_array_equal(history[..., 1], seen[-2][name][..., 0])
        np.testing.assert_array_equal(seen[-2][name][..., 1], seen[-3][name][..., 0])
        assert (history[..., 0] != history[..., 1]).all()


@pytest.mark.ci
def test_a_step_with_an_operand_that_is_not_finite_is_skipped_with_its_magnitudes():
    """Infinity is rounded to the largest number of its type, which a loss or gradient would not show."""
    run = _trained()
    run.step()
    before, params = run.history, run.state["params"]
    for bad in (np.inf, np.nan):
        broken = jax.tree.map(lambda x: x, params)
        broken["layers"]["mlp"]["up_EM"] = params["layers"]["mlp"]["up_EM"].at[1, 2, 3].set(bad)
        assert float(run.step(params=broken)["skipped"]) == 1
        for name, history in run.history.items():
            np.testing.assert_array_equal(history, before[name])
    run.step(params=params)


LAYOUTS = {
    "tensor": ("target=cpu-4", "sharding=fsdp_tensor", "mesh.tensor=2", "remat=full"),
    "reduced in backward": ("target=cpu-4", "sharding=hsdp", "mesh.replica=2", "num_microbatches=2",
                            "overlap.layers.reduce_in_backward=true"),
    "gathered": pytest.param(("target=cpu-4", "sharding=fsdp", "gather"), marks=pytest.mark.release),
}  # fmt: skip


@cache
def _on_one_device(more: str) -> tuple[list[float], dict[str, np.ndarray]]:
    run = _Run("target=cpu-1", "num_microbatches=4", _rule(2, more))
    return [float(run.step()["loss"]) for _ in range(3)], run.history


@pytest.mark.ci
@pytest.mark.parametrize("overrides", LAYOUTS.values(), ids=LAYOUTS)
def test_no_mesh_and_no_microbatches_change_magnitudes(overrides):
    """The largest of microbatches and devices, and not their sum. What differs is the order of sums, which rounds few
    elements otherwise, so that magnitudes that a rounding comes before differ by one digit of an element at most."""
    more = ",gather:fp8" if "gather" in overrides else ""
    losses, expected = _on_one_device(more)
    run = _Run(*(each for each in overrides if each != "gather"), _rule(2, more))
    assert [float(run.step()["loss"]) for _ in range(3)] == pytest.approx(losses, rel=1e-3)
    for name, history in run.history.items():
        assert (history > 0).all() if not more else (history[:, 1] == 0).all()
        np.testing.assert_allclose(history, expected[name], rtol=0.125, err_msg=name)
    np.testing.assert_allclose(run.history["queries"][0, 0], expected["queries"][0, 0], rtol=1e-3)


HISTORY = "precision.matmuls[0].history"


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (("mesh.stage=2", "num_microbatches=2"), "stages hand on no magnitudes"),
        (("overlap=prefetch",), "overlap.layers.prefetch hands on no magnitudes"),
        (("overlap.layers.batch_split=2",), "the parts of overlap.layers.batch_split have magnitudes each"),
        (("on_nonfinite=replay",), "on_nonfinite=replay repeats a step with scales from the magnitudes now"),
        (("precision.matmuls=[{match:null,forward:fp8_rowwise,gradients:fp8_rowwise,history:4}]",),
         "its types have more scales than one for a tensor"),
        (("precision.matmuls=[{match:head/*,forward:fp8,gradients:fp8_e5m2,history:4}]",),
         "the head has scales from the magnitudes now"),
    ],
)  # fmt: skip
def test_scales_that_cannot_come_from_earlier_steps_are_one_error(overrides, what):
    with pytest.raises(ConfigError) as error:
        plan_of(*SIZE, "target=cpu-4", "sharding=fsdp", _rule(4), *overrides)
    (problem,) = error.value.problems
    assert (problem.where, problem.what, problem.fix) == (HISTORY, f"is 4, and {what}", "set history: null")


def test_scales_come_from_earlier_steps_where_all_products_are_in_few_bits():
    with pytest.raises(ConfigError, match="where all three products of a site are in few bits") as error:
        plan_of(*SIZE, "precision.matmuls=[{match:null,forward:fp8,gradients:null,history:4}]")
    assert [each.where for each in error.value.problems] == [HISTORY]
