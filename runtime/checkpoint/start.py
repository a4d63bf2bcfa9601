"""Finds the checkpoint that a run starts from: the newest complete one of its own directory, or one of another run."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshloom.compiler.core.errors import ConfigError, Problem, all_of, raise_if_any
from meshloom.compiler.core.format import counted
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.models.adapter import saved_part

from ..core.failures import STORAGE, RunFailed
from ..core.files import Folder, absolute, check_bucket, folder_at, is_remote
from ..core.manifest import FILE, Compared, damage_in
from ..processes.distributed import current
from ..rundir.folders import CHECKPOINTS
from .differences import shown, tree_differences

RESTORE_FROM = "checkpoint.restore_from"
COMMITTED = "commit_success.txt"  # finishes a save where Orbax cannot rename
EXPECTED = ("data/data.json", "state/_METADATA")  # files of every checkpoint


@dataclass(frozen=True)
class Start:
    """A checkpoint that is as it was saved. is_own: it is in this run's directory. damaged: newer checkpoints that are
    damaged, by path, with the damage of each."""

    path: Folder
    step: int
    is_own: bool
    damaged: dict[Folder, str]


def checkpoint_folder(run_dir: Path, spec: RunSpec) -> Folder:
    """Returns the folder of a run's checkpoints: `checkpoint.directory`, or a folder of its run directory."""
    directory = spec.checkpoint.directory
    return absolute(run_dir / CHECKPOINTS if directory is None else folder_at(directory))


def find_start(run_dir: Path, spec: RunSpec, state: Any) -> Start | None:
    """Returns the checkpoint to continue from; None for a fresh start. Reads every byte of it, and loads nothing.

    Raises RunFailed if there are checkpoints and all are damaged, ConfigError if the arrays of the newest good one
    differ from the abstract `state`, or a checkpoint of this run is a link.
    """
    own = checkpoint_folder(run_dir, spec)
    if there := list(finished(own)):
        raise_if_any(_link_problem(path) for path in there if _is_link(path))
        start = newest_good(own, there, is_own=True)
    elif spec.checkpoint.continued is not None:
        start = newest_good(*_candidates(spec.checkpoint.continued), is_own=False)
    else:
        return None
    _check_same_tree(start.path, state)
    return start


def find_restorable(spec: RunSpec, state: Any) -> Start | None:
    """Returns the checkpoint of `checkpoint.restore_from`; None without one. Raises what `find_start` will raise, as
    far as can be seen without reading the arrays."""
    if spec.checkpoint.continued is None:
        return None
    start = newest_good(*_candidates(spec.checkpoint.continued), is_own=False, compare="sizes")
    _check_same_tree(start.path, state)
    return start


def check_steps_left(start: Start | None, spec: RunSpec) -> None:
    """Raises ConfigError if the checkpoint of another run has done all the steps of this one."""
    if start and start.step >= spec.num_steps:
        what = f"{counted(spec.num_steps, 'step')} leave nothing to do after the {start.step:,} of {start.path}"
        fix = f"use num_steps={start.step + spec.num_steps} for as many more, or an earlier checkpoint"
        raise ConfigError([Problem("num_steps", what, fix)])


def _candidates(restore_from: str) -> tuple[Folder, list[Folder]]:
    directory, step = parse_place(restore_from)
    return directory, [directory / str(step)] if step is not None else list(finished(directory))


def check_checkpoint(spec: RunSpec) -> None:
    """Raises ConfigError if `checkpoint.restore_from` names no finished checkpoint, the best checkpoints cannot be
    known, each of several processes would save by its own clock, or a bucket cannot be read."""
    all_of(
        lambda: _check_best(spec), lambda: _check_restore(spec), lambda: _check_clock(spec), lambda: _check_folder(spec)
    )


def _check_folder(spec: RunSpec) -> None:
    if spec.checkpoint.directory is not None and spec.checkpoint.is_saving:
        check_bucket(folder_at(spec.checkpoint.directory), "checkpoint.directory")


def _check_best(spec: RunSpec) -> None:
    if spec.checkpoint.keep_best and not spec.data.held_out_fraction:
        what = "keep_best ranks checkpoints by held-out loss, but data.held_out_fraction is 0"
        raise ConfigError([Problem("checkpoint.keep_best", what, "set it to 0, or hold out a part")])
    saves, evaluations = spec.checkpoint.every_num_steps, spec.evaluation.every_num_steps
    if spec.checkpoint.keep_best and (saves is None or saves % evaluations):
        when = f"every {counted(saves, 'step')}" if saves else "at no fixed steps"
        what = f"checkpoints are saved {when}, held-out losses are known every {evaluations}"
        fix = f"set checkpoint.every_num_steps to a multiple of {evaluations}"
        raise ConfigError([Problem("checkpoint.keep_best", what, fix)])


def _check_clock(spec: RunSpec) -> None:
    if spec.checkpoint.every_num_minutes is not None and current().count > 1:
        what = f"{current().count} processes save together, and their clocks differ"
        fix = "set checkpoint.every_num_minutes=null, and checkpoint.every_num_steps to a number of steps"
        raise ConfigError([Problem("checkpoint.every_num_minutes", what, fix)])


def _check_restore(spec: RunSpec) -> None:
    if spec.checkpoint.continued is not None:
        check_bucket(folder_at(spec.checkpoint.continued), RESTORE_FROM)
        check_is_there(spec.checkpoint.continued, RESTORE_FROM)


def check_is_there(place: str, key: str) -> tuple[Folder, list[Folder]]:
    """Returns the folder of the checkpoints at a place, and those that it names, newest first. Raises ConfigError if
    there is none. key: the place of mistakes."""
    directory, step = parse_place(place)
    paths = list(finished(directory))
    if step is None and not paths:
        fix = "name a run that saved one, or RUN_DIR/checkpoints/STEP of it"
        fix += "; to go on with a run, leave it out" if key == RESTORE_FROM else ""
        raise ConfigError([Problem(key, f"there is no finished checkpoint in {directory}", fix)])
    steps = sorted(int(path.name) for path in paths)
    if step is not None and step not in steps:
        there = f"use one of {', '.join(map(str, steps))}" if steps else "name the directory of a run with some"
        raise ConfigError([Problem(key, f"there is no checkpoint {step} in {directory}", there)])
    return directory, [directory / str(step)] if step is not None else paths


def parse_place(text: str) -> tuple[Folder, int | None]:
    """Returns a checkpoint's folder and step: RUN_DIR or RUN_DIR/checkpoints -> (RUN_DIR/checkpoints, None);
    RUN_DIR/checkpoints/STEP -> (.., STEP). A folder of another name is one of checkpoints if it holds some."""
    path = folder_at(text)
    if path.name.isdecimal() and (path.parent.name == CHECKPOINTS or (path / FILE).exists()):
        return path.parent, int(path.name)
    return (path if path.name == CHECKPOINTS or next(finished(path), None) else path / CHECKPOINTS), None


def finished(directory: Folder) -> Iterator[Folder]:
    """Yields the finished checkpoints of a run, newest first. Their names are steps; an interrupted save has another
    name, or behind a URL lacks the file that is written last."""
    steps = [path for path in directory.iterdir() if path.name.isdecimal()] if directory.is_dir() else []
    for path in sorted(steps, key=lambda path: int(path.name), reverse=True):
        if not is_remote(path) or (path / COMMITTED).exists():
            yield path


def describe_damage(damaged: dict[Folder, str]) -> str:
    """Returns the damage as text: `checkpoint 300: its damage; checkpoint 200: ...`"""
    return "; ".join(f"checkpoint {path.name}: {what}" for path, what in damaged.items())


def newest_good(directory: Folder, paths: list[Folder], *, is_own: bool, compare: Compared = "content") -> Start:
    """Returns the first of these checkpoints that is as it was saved. Raises RunFailed if none is."""
    damaged: dict[Folder, str] = {}
    for path in paths:
        what = damage_in(path, expected=EXPECTED, step=int(path.name), compare=compare) or _unreadable(path)
        if what is None:
            return Start(absolute(path), int(path.name), is_own, damaged)
        damaged[path] = what
    fix = "bring back a copy of one, or start anew in another hydra.run.dir; nothing was changed"
    if not is_own:
        fix = "choose another checkpoint, by RUN_DIR/checkpoints/STEP"
    raise RunFailed(Problem(str(directory), f"no checkpoint can be used: {describe_damage(damaged)}", fix), STORAGE)


def _is_link(path: Folder) -> bool:
    return not is_remote(path) and Path(path).is_symlink() and path.is_dir()


def _link_problem(path: Folder) -> Problem:
    fix = f"move what it points to here, or start in another hydra.run.dir with checkpoint.restore_from={path}"
    return Problem(str(path), "is a symbolic link, which cannot be deleted when newer checkpoints take its place", fix)


def _unreadable(path: Folder) -> str | None:
    """Returns why Orbax cannot read the checkpoint; None if it can. Some of Orbax's files have no hash."""
    try:
        saved_tree(path)
    except OSError:
        raise
    except Exception as error:  # of any kind: Orbax trusts these files
        return f"its metadata is damaged: {str(error).partition(chr(10))[0]}"
    return None


def saved_tree(path: Folder) -> Any:
    """Returns the shape, type and sharding of the arrays in a checkpoint."""
    from .orbax_context import read_metadata

    return read_metadata(path)["state"]


def _check_same_tree(path: Folder, state: Any) -> None:
    """Raises ConfigError with the arrays that differ; Orbax's own message would not name them."""
    if differences := tree_differences(saved_tree(path), saved_part(state)):
        what = f"{path} holds another model or optimizer:{shown(differences)}"
        fix = "choose the model and optimizer that were saved, or another hydra.run.dir"
        raise ConfigError([Problem("model", what, fix)])
