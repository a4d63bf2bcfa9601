"""Is there room for what a run will write? Asked before anything is compiled."""

import shutil
from pathlib import Path
from typing import Any

import jax

from meshloom.compiler.config.spec import RunSpec
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import human_bytes

from ..core.stores import Folder, is_remote

LEAST_COMPRESSED = 0.5  # Orbax compresses arrays with zstd; trained float32 shrinks by a tenth, and never to a half


def check_space(folder: Folder, spec: RunSpec, state: Any) -> str | None:
    """Returns a warning where the disk cannot hold all the checkpoints that the run keeps. Raises ConfigError where it
    surely cannot hold a single one. folder: where they are saved; a bucket has no limit."""
    if not spec.checkpoint.is_saving or is_remote(folder):
        return None
    state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    free_bytes = shutil.disk_usage(_existing(Path(folder))).free
    has = f"{human_bytes(free_bytes)} are free on the disk of {folder}, and a checkpoint has {human_bytes(state_bytes)}"
    if free_bytes < LEAST_COMPRESSED * state_bytes:
        key = "checkpoint.directory" if spec.checkpoint.directory else "hydra.run.dir"
        fix = f"free disk space, choose another {key}, or save nothing with checkpoint=disabled"
        raise ConfigError([Problem(key, has, fix)])
    num_at_once = spec.checkpoint.keep + spec.checkpoint.keep_best + 1  # the new one beside those kept
    if free_bytes < num_at_once * state_bytes:
        return f"{has}: too little for the {num_at_once} that there will be at once"
    return None


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.absolute().parent)
