"""The checkpoint that a run starts from: process 0 looks at the files, and tells the others."""

import json
from dataclasses import replace
from pathlib import Path

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.plan import Plan

from ..core.stores import absolute, check_writable, folder_at, is_remote
from ..processes.distributed import Processes, together
from ..processes.say import say
from ..rundir.space import check_space
from .checkpoints import set_aside
from .start import Start, checkpoint_folder, describe_damage, find_start


def find_shared_start(run_dir: Path, plan: Plan, console: Console, processes: Processes) -> Start | None:
    """Returns the checkpoint to go on from, found whole and of this model, the same in all processes; what stands in
    the way of saving is told. Each byte is read once, by process 0.

    Raises in all processes what `find_start` and `check_space` do, and where one of them does not see the checkpoint.
    """
    found = together("checkpoint to start from", lambda: found_by_first(run_dir, plan, console, processes))
    return together("sight of the checkpoint", lambda: seen(found, processes))


def found_by_first(run_dir: Path, plan: Plan, console: Console, processes: Processes) -> Start | None:
    if not processes.is_first:
        told = json.loads(processes.from_first("start"))
        return Start(folder_at(told["path"]), told["step"], told["is_own"], {}) if told else None
    told = None  # in any case: the others wait for it
    try:
        start = _find(run_dir, plan, console)
        told = start and {"path": str(start.path), "step": start.step, "is_own": start.is_own}
        return start
    finally:
        processes.from_first("start", json.dumps(told))


def _find(run_dir: Path, plan: Plan, console: Console) -> Start | None:
    start = find_start(run_dir, plan.spec, plan.abstract)
    folder = checkpoint_folder(run_dir, plan.spec)
    if plan.spec.checkpoint.is_saving:
        check_writable(folder, "checkpoint.directory")
    if warning := check_space(folder, plan.spec, plan.abstract):
        say(console, f"warning: {warning}")
    if start and start.damaged:
        kept = f"; kept as {folder.name}/STEP.damaged" if start.is_own else ""
        say(console, f"warning: damaged, so an older one is used: {describe_damage(start.damaged)}{kept}")
        if start.is_own:
            set_aside(start.damaged)
    return start and replace(start, path=absolute(start.path))


def seen(start: Start | None, processes: Processes) -> Start | None:
    if start and not start.path.is_dir():
        what = f"process {processes.index} does not see {start.path}, which process 0 found"
        fix = (
            "give all hosts the same access to it" if is_remote(start.path) else "name a directory that all hosts share"
        )
        raise ConfigError([Problem("hydra.run.dir", what, fix)])
    return start
