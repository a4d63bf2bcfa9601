"""Finds the checkpoint that a run starts from, and checks the space for more; process 0 reads, and tells the others."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import human_bytes
from meshloom.compiler.declare.run_spec import CheckpointSpec
from meshloom.models.adapter import saved_part

from ..checkpoint.checkpoints import set_aside
from ..checkpoint.find import Checkpoint, checkpoint_folder, describe_damage
from ..core.files import Folder, absolute, check_writable, folder_at, is_remote
from ..processes.distributed import Processes, together
from ..processes.process_log import announce
from .find import find_checkpoint

LEAST_COMPRESSED = 0.5  # Orbax compresses arrays with zstd; trained float32 shrinks by a tenth, never to half


def checkpoint_of_first(find: Callable[[], Checkpoint | None], processes: Processes) -> Checkpoint | None:
    """Returns the start that process 0 finds, in all processes, once each has seen its folder."""
    found = together("checkpoint to start from", lambda: found_by_first(find, processes))
    return together("sight of the checkpoint", lambda: seen(found, processes))


def found_by_first(find: Callable[[], Checkpoint | None], processes: Processes) -> Checkpoint | None:
    """Returns the start that process 0 finds; the others get its place."""
    if not processes.is_first:
        told = json.loads(processes.from_first("start"))
        return Checkpoint(folder_at(told["path"]), told["step"], told["is_own"], {}) if told else None
    told = None  # sent in any case: the others wait for it
    try:
        start = find()
        told = start and {"path": str(start.path), "step": start.step, "is_own": start.is_own}
        return start
    finally:
        processes.from_first("start", json.dumps(told))


def find_for_run(run_dir: Path, checkpoint: CheckpointSpec, state: Any, console: Console) -> Checkpoint | None:
    """Returns the checkpoint that a run continues from, after checking the room for more; sets damaged ones aside.
    state: of the run, abstract. Raises what `find_checkpoint` and `check_space` raise."""
    start = find_checkpoint(run_dir, checkpoint, state)
    folder = checkpoint_folder(run_dir, checkpoint.directory)
    if checkpoint.is_saving:
        check_writable(folder, "checkpoint.directory")
    if warning := check_space(folder, checkpoint, state):
        announce(console, f"warning: {warning}")
    if start and start.damaged:
        kept = f"; kept as {folder.name}/STEP.damaged" if start.is_own else ""
        announce(console, f"warning: damaged, so an older one is used: {describe_damage(start.damaged)}{kept}")
        if start.is_own:
            set_aside(start.damaged)
    return start and replace(start, path=absolute(start.path))


def seen(start: Checkpoint | None, processes: Processes) -> Checkpoint | None:
    """Returns the same start. Raises ConfigError if this process does not see its folder."""
    if start and not start.path.is_dir():
        what = f"process {processes.index} does not see {start.path}, which process 0 found"
        fix = "name a directory that all hosts share"
        fix = "give all hosts the same access to it" if is_remote(start.path) else fix
        raise ConfigError([Problem("hydra.run.dir", what, fix)])
    return start


def check_space(folder: Folder, checkpoint: CheckpointSpec, state: Any) -> str | None:
    """Returns a warning if the disk cannot hold all the checkpoints that the run keeps. Raises ConfigError if it cannot
    hold a single one. folder: the folder of the checkpoints; a bucket has no limit."""
    if not checkpoint.is_saving or is_remote(folder):
        return None
    state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(saved_part(state)))
    free_bytes = shutil.disk_usage(_existing(Path(folder))).free
    has = f"{human_bytes(free_bytes)} are free on the disk of {folder}, and a checkpoint has {human_bytes(state_bytes)}"
    if free_bytes < LEAST_COMPRESSED * state_bytes:
        key = "checkpoint.directory" if checkpoint.directory else "hydra.run.dir"
        fix = f"free disk space, choose another {key}, or save nothing with checkpoint=disabled"
        raise ConfigError([Problem(key, has, fix)])
    num_at_once = checkpoint.keep + checkpoint.keep_best + 1  # the new one is there before an old one goes
    if free_bytes < num_at_once * state_bytes:
        return f"{has}: too little for the {num_at_once} that there will be at once"
    return None


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.absolute().parent)
