"""Makes the state that a run starts from: drawn, with weights, or restored from a checkpoint.

Process 0 finds the checkpoint, checks the space for more, and tells the others.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import be, counted, human_bytes
from meshloom.compiler.declare.run_spec import CheckpointSpec, RunSpec
from meshloom.compiler.plan import Plan
from meshloom.compiler.xla.programs import Programs
from meshloom.models.adapter import saved_part
from meshloom.models.config import AdapterConfig, BaseConfig

from ..checkpoint.adapters import Base, base_of, check_base, with_base
from ..checkpoint.checkpoints import Restored, restore, set_aside
from ..checkpoint.find import Checkpoint, checkpoint_folder, describe_damage
from ..checkpoint.restore_plan import describe_change, plan_restore, schedule_record
from ..core.files import Folder, absolute, check_writable, folder_at, is_remote
from ..data import BatchIterator
from ..processes.distributed import Processes, together
from ..processes.process_log import announce
from ..weights.find import StoredWeights, base_place, check_content, describe_weights, find_weights
from ..weights.load import with_weights
from .start import find_checkpoint

LEAST_COMPRESSED = 0.5  # Orbax compresses arrays with zstd; trained float32 shrinks by a tenth, never to half


if TYPE_CHECKING:
    from .start import Resumed


@dataclass(frozen=True)
class Started:
    """A state that training begins with. step, num_tokens: what it was trained for. base: of its adapters, for the
    checkpoints to come; None for a whole model."""

    state: Any
    step: int
    num_tokens: int
    base: Base | None


def fresh_state(
    plan: Plan[RunSpec], weights: StoredWeights | None, programs: Programs, console: Console, processes: Processes
) -> Started:
    """Returns the state before the first step. Raises RunFailed in all processes if the weights are damaged."""
    state = _drawn(plan, weights, programs, console, processes)
    place = weights.base if weights else None
    base = base_of(place, state["params"], _base(plan.spec.adapter)) if plan.model.adapters else None
    return Started(state, 0, 0, base)


def resumed_state(
    start: "Resumed", programs: Programs, batches: BatchIterator, console: Console, processes: Processes
) -> Started:
    """Returns the state of a checkpoint, and moves the batches to its place in the data. Raises ConfigError if it
    cannot go on with this declaration."""
    for line in plan_restore(start.checkpoint, start.plan).lines():
        announce(console, line)
    restored = restore(start.checkpoint, programs.state, batches)
    announce(console, f"continuing after step {restored.step}, from {start.checkpoint.path}")
    for line in _changes(start.plan.spec, restored, batches):
        announce(console, line)
    num_tokens = restored.num_tokens
    if num_tokens is None:
        num_tokens = restored.step * start.plan.spec.tokens_per_step
        what = "the checkpoint has no num_tokens: they count on from steps x tokens of a step"
        announce(console, f"{what}, {num_tokens:,}")
    if restored.base is None:
        return Started(restored.state, restored.step, num_tokens, None)
    weights = start.weights
    if weights is None and (named := base_place(start.plan.spec.checkpoint.base_from, restored.base["place"])):
        weights = find_weights(start.plan, named)
    drawn = _drawn(start.plan, weights, programs, console, processes)
    state = restored.state | {"params": with_base(restored.state["params"], drawn["params"])}
    check_base(start.checkpoint, state["params"], restored.base)
    place = weights.base if weights else None
    return Started(state, restored.step, num_tokens, base_of(place, state["params"], _base(start.plan.spec.adapter)))


def _base(adapter: AdapterConfig | None) -> BaseConfig | None:
    return adapter.base if adapter else None


def _drawn(
    plan: Plan[RunSpec], weights: StoredWeights | None, programs: Programs, console: Console, processes: Processes
) -> Any:
    """Returns a drawn state, with weights in the place of its parameters."""
    state = programs["init"]()
    if weights is None:
        return state
    check_content(weights, processes)
    for line in describe_weights(weights):
        announce(console, line)
    return with_weights(state, weights, plan, console)


def _changes(spec: RunSpec, restored: Restored, batches: BatchIterator) -> Iterator[str]:
    """Yields what is other than it was in the data and the schedule. Raises ConfigError if the data end before the
    run: batches that are larger now are fewer."""
    if restored.other_data:
        yield f"the data start at their beginning: not the same {', '.join(restored.other_data)}"
    elif restored.batch_before is not None:
        further = f", {counted(restored.num_skipped, 'sequence')} further, at a whole batch"
        sizes = f"batches have {counted(spec.global_batch_size, 'sequence')} in place of {restored.batch_before}"
        yield f"{sizes}; the data go on where they were{further if restored.num_skipped else ''}"
    num_steps, num_left = spec.num_steps - restored.step, batches.num_left
    if num_left < num_steps:
        left = counted(num_left, "more global batch", "more global batches")
        what = f"the data end after {left}, and {num_steps:,} {be(num_steps)} to come"
        raise ConfigError([Problem("data.num_epochs", what, "use more epochs, or null (no end), or fewer steps")])
    if change := describe_change(restored.schedule, schedule_record(spec, int(restored.state["step"]))):
        yield change


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
