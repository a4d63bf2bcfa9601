"""Decides where a run starts, and makes the state that it starts from.

    Fresh      parameters are drawn, or of a published folder, or of another run: steps, optimizer, schedule begin anew
    Resumed    a checkpoint of this run, or the one of checkpoint.restore_from, goes on

Each has `lines()` to show, and `state(programs, ...)`.

A run goes on from the newest complete checkpoint of its own directory, or from one of another run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem, all_of, raise_if_any
from meshloom.compiler.core.format import counted
from meshloom.compiler.declare.run_spec import CheckpointSpec, RunSpec
from meshloom.compiler.optim.moments import moment_of
from meshloom.compiler.plan import Plan
from meshloom.models.adapter import saved_part

from ..checkpoint.find import (
    RESTORE_FROM,
    Checkpoint,
    check_is_there,
    checkpoint_folder,
    finished,
    newest_good,
    parse_place,
    saved_tree,
)
from ..checkpoint.meaning import meaning_of
from ..checkpoint.moments import converted_moments
from ..checkpoint.restore_plan import listed, plan_restore, tree_differences
from ..core.files import Folder, check_bucket, folder_at, is_remote
from ..processes.distributed import Processes, current
from ..weights.find import StoredWeights, describe_weights, find_weights


def find_checkpoint(run_dir: Path, checkpoint: CheckpointSpec, state: Any) -> Checkpoint | None:
    """Returns the checkpoint to continue from; None for a fresh start. Reads every byte of it, and loads nothing.

    Raises RunFailed if there are checkpoints and all are damaged, ConfigError if the arrays of the newest good one
    differ from the abstract `state`, or a checkpoint of this run is a link.
    """
    own = checkpoint_folder(run_dir, checkpoint.directory)
    if there := list(finished(own)):
        what = "is a symbolic link, which cannot be deleted when newer checkpoints take its place"
        fix = "move what it points to here, or start in another hydra.run.dir with checkpoint.restore_from="
        links = [path for path in there if not is_remote(path) and Path(path).is_symlink() and path.is_dir()]
        raise_if_any(Problem(str(path), what, f"{fix}{path}") for path in links)
        start = newest_good(own, there, is_own=True)
    elif checkpoint.continued is not None:
        start = newest_good(*_candidates(checkpoint.continued), is_own=False)
    else:
        return None
    _check_same_tree(start.path, state)
    return start


def find_restorable(checkpoint: CheckpointSpec, state: Any) -> Checkpoint | None:
    """Returns the checkpoint of `checkpoint.restore_from`; None without one. Raises what `find_checkpoint` will raise,
    as far as can be seen without reading the arrays."""
    if checkpoint.continued is None:
        return None
    start = newest_good(*_candidates(checkpoint.continued), is_own=False, compare="sizes")
    _check_same_tree(start.path, state)
    return start


def _candidates(restore_from: str) -> tuple[Folder, list[Folder]]:
    directory, step = parse_place(restore_from)
    return directory, [directory / str(step)] if step is not None else list(finished(directory))


def check_checkpoint(spec: RunSpec) -> None:
    """Raises ConfigError if `checkpoint.restore_from` names no finished checkpoint, the best checkpoints cannot be
    known, each of several processes would save by its own clock, or a bucket cannot be read."""
    checkpoint, problems = spec.checkpoint, list[Problem]()
    saves, evaluations = checkpoint.every_num_steps, spec.evaluation.every_num_steps
    if checkpoint.keep_best and not spec.data.held_out_fraction:
        what = "keep_best ranks checkpoints by held-out loss, but data.held_out_fraction is 0"
        problems.append(Problem("checkpoint.keep_best", what, "set it to 0, or hold out a part"))
    elif checkpoint.keep_best and (saves is None or saves % evaluations):
        when = f"every {counted(saves, 'step')}" if saves else "at no fixed steps"
        what = f"checkpoints are saved {when}, held-out losses are known every {evaluations}"
        fix = f"set checkpoint.every_num_steps to a multiple of {evaluations}"
        problems.append(Problem("checkpoint.keep_best", what, fix))
    if checkpoint.every_num_minutes is not None and current().count > 1:
        what = f"{current().count} processes save together, and their clocks differ"
        fix = "set checkpoint.every_num_minutes=null, and checkpoint.every_num_steps to a number of steps"
        problems.append(Problem("checkpoint.every_num_minutes", what, fix))

    def check_restored() -> None:
        if checkpoint.continued is not None:
            check_bucket(folder_at(checkpoint.continued), RESTORE_FROM)
            check_is_there(checkpoint.continued, RESTORE_FROM)

    def check_saved() -> None:
        if checkpoint.directory is not None and checkpoint.is_saving:
            check_bucket(folder_at(checkpoint.directory), "checkpoint.directory")

    all_of(lambda: raise_if_any(problems), check_restored, check_saved)


def _check_same_tree(path: Folder, state: Any) -> None:
    """Raises ConfigError with the arrays that differ; Orbax's own message would not name them."""
    there, here = saved_tree(path), saved_part(state)
    converted = converted_moments(there, here)
    differences = [line for line in tree_differences(there, here) if moment_of(line.split()[0])[0] not in converted]
    if differences:
        what = f"{path} holds another model or optimizer:{listed(differences)}"
        fix = "choose the model and optimizer that were saved, or another hydra.run.dir"
        raise ConfigError([Problem("model", what, fix)])


if TYPE_CHECKING:  # what makes a state imports Orbax and Grain, and what shows a start has no need of them
    from meshloom.compiler.xla.programs import Programs

    from ..data import BatchIterator
    from .state import Started


@dataclass(frozen=True)
class Fresh:
    """Every parameter is drawn, or weights take the place of those that they hold."""

    plan: Plan[RunSpec]
    weights: StoredWeights | None
    step: int = 0
    is_own: bool = False

    def lines(self) -> list[str]:
        """Returns the lines that say what is read, and what is not."""
        return describe_weights(self.weights) if self.weights else []

    def differences(self, _identity: Mapping[str, Any]) -> list[str]:
        """Returns no lines: no weights go on."""
        return []

    def state(
        self, programs: "Programs", _batches: "BatchIterator", console: Console, processes: Processes
    ) -> "Started":
        """Returns the state before the first step. Raises RunFailed in all processes if the weights are damaged."""
        from .state import fresh_state

        return fresh_state(self.plan, self.weights, programs, console, processes)


@dataclass(frozen=True)
class Resumed:
    """A checkpoint goes on. weights: the declared ones, which the base of adapters is loaded from; None: from where it
    was when they were saved."""

    plan: Plan[RunSpec]
    checkpoint: Checkpoint
    weights: StoredWeights | None

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def is_own(self) -> bool:
        return self.checkpoint.is_own

    def lines(self) -> list[str]:
        """Returns the plan of the restore, as lines to show, and what is read of the declared weights."""
        weights = describe_weights(self.weights) if self.weights else []
        return [*plan_restore(self.checkpoint, self.plan).lines(), *self.differences(None), *weights]

    def differences(self, identity: Mapping[str, Any] | None) -> list[str]:
        """Returns lines to show where the declaration means something else by the weights that go on. identity: of the
        data; None: the tokenizer is compared by its words."""
        return meaning_of(self.checkpoint.path).differences(self.plan.spec.as_written(), identity)

    def state(
        self, programs: "Programs", batches: "BatchIterator", console: Console, processes: Processes
    ) -> "Started":
        """Returns the state of the checkpoint, and moves the batches to its place in the data. Raises ConfigError if
        it cannot go on with this declaration."""
        from .state import resumed_state

        return resumed_state(self, programs, batches, console, processes)


RunStart = Fresh | Resumed


def declared_start(plan: Plan[RunSpec]) -> RunStart:
    """Returns where the declaration says that a new run starts, as far as can be seen without reading arrays. Raises
    ConfigError for what it cannot start from."""
    checkpoint, weights = find_restorable(plan.spec.checkpoint, plan.abstract), find_weights(plan)
    return _checked(Fresh(plan, weights) if checkpoint is None else Resumed(plan, checkpoint, weights))


def find_start(
    run_dir: Path, plan: Plan[RunSpec], weights: StoredWeights | None, console: Console, processes: Processes
) -> RunStart:
    """Returns where a run starts, the same in all processes: from a checkpoint of its directory, if there is one.

    weights: of `declared_start`. Process 0 reads each byte of the checkpoint once, and warns about a lack of disk
    space. Raises in all processes for damage, and if one of them does not see the checkpoint.
    """
    from .state import checkpoint_of_first, find_for_run

    checkpoint = checkpoint_of_first(
        lambda: find_for_run(run_dir, plan.spec.checkpoint, plan.abstract, console), processes
    )
    return _checked(Fresh(plan, weights) if checkpoint is None else Resumed(plan, checkpoint, weights))


def _checked(start: RunStart) -> RunStart:
    """Returns the start. Raises ConfigError if a checkpoint's adapter cannot go on over the declared base, before
    anything is compiled."""
    adapter = start.plan.spec.adapter
    if isinstance(start, Resumed) and adapter is not None and start.plan.model.adapters:
        from ..checkpoint.adapters import check_adapter

        check_adapter(start.checkpoint, adapter.base)
    return start


def check_steps_left(start: RunStart, num_steps: int) -> None:
    """Raises ConfigError if the checkpoint of another run has done all the steps of this one."""
    if isinstance(start, Resumed) and start.step >= num_steps:
        done = f"{counted(num_steps, 'step')} leave nothing to do after the {start.step:,}"
        fix = f"use num_steps={start.step + num_steps} for as many more, or an earlier checkpoint"
        raise ConfigError([Problem("num_steps", f"{done} of {start.checkpoint.path}", fix)])
