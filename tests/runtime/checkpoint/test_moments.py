"""A run that goes on with moments of another type gets the numbers of the checkpoint, or the nearest ones."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from conftest import LINEAR_STACK, plan_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.runtime.checkpoint.checkpoints import Checkpoints, restore
from meshloom.runtime.checkpoint.restore_plan import plan_restore
from meshloom.runtime.start.start import find_checkpoint
from support.programs import programs_of

KEYS = (*LINEAR_STACK, "model.num_layers=2", "model.embed_dim=64")
INT8, FLOAT32 = "optimizer.moment_dtype=int8", "optimizer.moment_dtype=float32"
NAME = "layers/kernel_EM"


class NoData:
    identity: dict[str, Any] = {}  # noqa: RUF012

    def get_state(self) -> dict[str, int]:
        return {}

    def set_state(self, state: Any) -> None: ...


def _saved(run_dir: Path, *keys: str) -> Any:
    """Returns the state that was saved, with moments that are not zero."""
    plan = plan_of(*KEYS, *keys)
    programs = programs_of(plan)
    state = programs["init"]()
    chance = np.random.default_rng(0)

    def drawn(x: Any) -> Any:
        kind = np.dtype(x.dtype)
        made = chance.integers(1, 100, x.shape) if kind.kind in "iu" and x.ndim else chance.random(x.shape)
        return jax.device_put(made.astype(kind), x.sharding) if x.ndim else x

    state["optimizer"] = jax.tree.map(drawn, state["optimizer"])
    with Checkpoints(run_dir, plan.spec) as checkpoints:
        checkpoints.save(1, state, NoData(), num_tokens=1, eval_loss=None)
        checkpoints.wait()
    return state


def _restored(run_dir: Path, *keys: str) -> tuple[Any, list[str]]:
    plan = plan_of(*KEYS, *keys)
    start = find_checkpoint(run_dir, plan.spec.checkpoint, plan.abstract)
    assert start is not None
    return restore(start, programs_of(plan).state, NoData()).state, plan_restore(start, plan).lines()


def _values(state: Any, moment: str) -> np.ndarray:
    """Returns what the moments of a matrix stand for, in NumPy."""
    parts = {path.rpartition("/")[2]: np.asarray(x) for path, x in leaves_by_path(state["optimizer"]).items()
             if f"{moment}/" in path and NAME in path}  # fmt: skip
    if "elements" not in parts:
        return parts[NAME.rpartition("/")[2]].astype(np.float64)
    elements, scales = parts["elements"].astype(np.float64), parts["scales"].astype(np.float64)
    numbers = elements if moment == "mu" else (elements / 255) ** 4
    return numbers * np.repeat(scales, elements.shape[-1] // scales.shape[-1], -1)


@pytest.mark.ci
def test_moments_of_8_bits_are_restored_into_float32_without_loss_and_back_to_the_same_elements(tmp_path):
    saved = _saved(tmp_path, INT8, "target=cpu-2", "sharding=fsdp")
    restored, lines = _restored(tmp_path, FLOAT32, "target=cpu-1")
    assert any("without loss" in line for line in lines)
    for moment in ("mu", "nu"):
        np.testing.assert_allclose(_values(restored, moment), _values(saved, moment), rtol=1e-6)


@pytest.mark.ci
def test_float32_moments_are_rounded_into_8_bits_and_that_is_said(tmp_path):
    saved = _saved(tmp_path, FLOAT32, "target=cpu-1")
    restored, lines = _restored(tmp_path, INT8, "target=cpu-2", "sharding=fsdp")
    assert any("rounded" in line for line in lines)
    for moment, most in (("mu", 0.5 / 127), ("nu", 2.1 / 255)):
        exact = _values(saved, moment)
        assert np.abs(_values(restored, moment) - exact).max() <= most * exact.max() * 1.001


def test_moments_of_another_optimizer_are_refused(tmp_path):
    _saved(tmp_path, INT8, "target=cpu-1")
    with pytest.raises(ConfigError, match="another model or optimizer"):
        _restored(tmp_path, "optimizer=lion", "target=cpu-1")
