"""A save gives back what it takes: file descriptors and threads do not pile up over a run."""

import os
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import pytest

from conftest import spec_of
from meshloom.runtime.checkpoint.checkpoints import Checkpoints
from support.loops import NoData

MEMORY = Path("/dev/shm")  # where there is one, saves take half of the time: no disk has to sync


def _held() -> dict[str, int]:
    return {"file descriptors": len(os.listdir("/dev/fd")), "threads": threading.active_count()}


@pytest.mark.parametrize("num_saves", [6, pytest.param(500, marks=pytest.mark.release)])
def test_descriptors_and_threads_stay_flat_over_many_saves(num_saves):
    spec, state = spec_of("checkpoint.every_num_steps=10", "checkpoint.keep=1"), {"x": jax.numpy.ones(3)}
    before, held = _held(), []
    with (
        TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as run_dir,
        Checkpoints(Path(run_dir), spec) as checkpoints,
    ):
        for step in range(1, num_saves + 1):
            checkpoints.save(step, state, NoData(), num_tokens=0, eval_loss=None)
            checkpoints.wait()
            held.append(_held())
        _settles(held[0])
        assert checkpoints.latest_step == num_saves
    _settles(before)


def _settles(at: dict[str, int]) -> None:
    """Fails unless no more than this is held soon: on a busy machine, threads that have done their work end late."""
    deadline = time.monotonic() + 10
    while any(now > at[what] for what, now in _held().items()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(now <= at[what] for what, now in _held().items()), f"{_held()}, and not {at}"
