"""Finds the checkpoint that a run goes on from: the newest complete one of its own directory, or one of another run."""

from pathlib import Path
from typing import Any

from meshloom.compiler.core.errors import ConfigError, Problem, all_of, raise_if_any
from meshloom.compiler.core.format import counted
from meshloom.compiler.declare.run_spec import CheckpointSpec, RunSpec
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
from ..checkpoint.restore_plan import listed, tree_differences
from ..core.files import Folder, check_bucket, folder_at, is_remote
from ..processes.distributed import current


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
    if differences := tree_differences(saved_tree(path), saved_part(state)):
        what = f"{path} holds another model or optimizer:{listed(differences)}"
        fix = "choose the model and optimizer that were saved, or another hydra.run.dir"
        raise ConfigError([Problem("model", what, fix)])
