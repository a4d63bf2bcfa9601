"""Measures what a manifest costs: saving and verifying a state of random float32, with and without. Medians.

python bench/checkpoint.py [gigabytes] [repeats]
"""

import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax
import numpy as np

import meshloom
from meshloom.runtime.checkpoint import checkpoints as checkpoint
from meshloom.runtime.checkpoint.checkpoints import Checkpoints
from meshloom.runtime.checkpoint.start import FOLDER
from meshloom.runtime.core.manifest import damage_in, write_manifest

NUM_ARRAYS = 8


def main() -> None:
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    jax.config.update("jax_platforms", "cpu")
    spec = meshloom.compose("checkpoint.keep=1")
    chance, size = np.random.default_rng(0), int(gigabytes * 1e9 / 4 / NUM_ARRAYS)
    state = {f"x{i}": jax.device_put(chance.standard_normal(size, np.float32)) for i in range(NUM_ARRAYS)}
    seconds: dict[str, list[float]] = {"save": [], "save, no manifest": [], "verify": [], "manifest alone": []}
    nowhere: Any = SimpleNamespace(identity={}, get_state=dict)  # a place in no data
    for _ in range(repeats):
        for name in ("save", "save, no manifest"):
            is_skipped = name != "save"
            write = (lambda directory, step: None) if is_skipped else write_manifest
            with (
                tempfile.TemporaryDirectory() as folder,
                patch.object(checkpoint, "write_manifest", write),
                Checkpoints(Path(folder), spec) as checkpoints,
            ):
                began = time.perf_counter()
                checkpoints.save(1, state, nowhere, num_tokens=0, eval_loss=None)
                checkpoints.wait()
                seconds[name].append(time.perf_counter() - began)
                saved = Path(folder) / FOLDER / "1"
                verify = partial(damage_in, expected=(), step=1)
                for part, work in (("manifest alone", partial(write_manifest, step=1)), ("verify", verify)):
                    began = time.perf_counter()
                    work(saved)
                    seconds[part].append(time.perf_counter() - began)
    for name, runs in seconds.items():
        print(f"{name:20} {statistics.median(runs):6.2f} s ({min(runs):.2f}..{max(runs):.2f}) for {gigabytes} GB")


if __name__ == "__main__":
    main()
