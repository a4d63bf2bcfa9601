"""Finds finished checkpoints, and tells the ones that are as they were saved from damaged ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.places import PUBLISHED
from meshloom.compiler.declare.published_folder import PublishedFolder

from ..core.failures import STORAGE, RunFailed
from ..core.files import FILE, Folder, VerifiedBy, absolute, damage_in, folder_at, is_remote
from ..rundir.folders import CHECKPOINTS

RESTORE_FROM = "checkpoint.restore_from"
COMMITTED = "commit_success.txt"  # finishes a save where Orbax cannot rename
EXPECTED = ("data/data.json", "state/_METADATA")  # files of every checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is as it was saved. is_own: it is in this run's directory. damaged: newer checkpoints that are
    damaged, by path, with the damage of each."""

    path: Folder
    step: int
    is_own: bool
    damaged: dict[Folder, str]


def checkpoint_folder(run_dir: Path, directory: str | None) -> Folder:
    """Returns the folder of a run's checkpoints: `checkpoint.directory`, or a folder of its run directory."""
    return absolute(run_dir / CHECKPOINTS if directory is None else folder_at(directory))


def check_is_there(place: str, key: str) -> tuple[Folder, list[Folder]]:
    """Returns the folder of checkpoints at a place, and the checkpoints that the place names, newest first. Raises
    ConfigError if there is none. key: the place of mistakes."""
    directory, step = parse_place(place)
    paths = list(finished(directory))
    if step is None and not paths and not is_remote(directory) and PublishedFolder(Path(place)).holds_weights:
        what = f"{place} holds published weights, and this names a run"
        fix = f"{key}={PUBLISHED}{place}" if key != RESTORE_FROM else f"checkpoint.weights_from={PUBLISHED}{place}"
        raise ConfigError([Problem(key, what, f"write {fix}")])
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


def newest_good(directory: Folder, paths: list[Folder], *, is_own: bool, compare: VerifiedBy = "content") -> Checkpoint:
    """Returns the first of these checkpoints that is as it was saved. Raises RunFailed if none is."""
    damaged: dict[Folder, str] = {}
    for path in paths:
        what = damage_in(path, expected=EXPECTED, step=int(path.name), compare=compare) or _unreadable(path)
        if what is None:
            return Checkpoint(absolute(path), int(path.name), is_own, damaged)
        damaged[path] = what
    fix = "bring back a copy of one, or start anew in another hydra.run.dir; nothing was changed"
    if not is_own:
        fix = "choose another checkpoint, by RUN_DIR/checkpoints/STEP"
    raise RunFailed(Problem(str(directory), f"no checkpoint can be used: {describe_damage(damaged)}", fix), STORAGE)


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
