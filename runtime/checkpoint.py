"""Checkpoints, by Orbax: the train state, the position in the data, and what they belong to."""

import logging
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
from orbax.checkpoint import v1 as ocp

from meshloom.compiler.problems import ConfigError, Problem
from meshloom.compiler.spec import RunSpec
from meshloom.compiler.trees import leaves_by_path

FOLDER = "checkpoints"
logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells of each of its own steps


@dataclass(frozen=True)
class Restored:
    """state: laid out for this run. step: steps done in it. other_data: the keys in which this run's data are others
    than those of the checkpoint; where there are any, the data start at their beginning."""

    state: Any
    step: int
    other_data: tuple[str, ...]


class Checkpoints:
    """The checkpoints of one run directory. Saves are asynchronous; leaving the `with` waits for them.

    A run that saves none still finds those that are there.
    """

    def __init__(self, run_dir: Path, spec: RunSpec):
        self.directory = run_dir.resolve() / FOLDER
        self._is_saving = spec.checkpoint.every_num_steps is not None
        self._identity = data_identity(spec)
        self._last_saved: int | None = None
        keep: Any = ocp.training.preservation_policies.LatestN(spec.checkpoint.num_kept)
        is_needed = self._is_saving or self.directory.is_dir()
        self._orbax = ocp.training.Checkpointer(str(self.directory), preservation_policy=keep) if is_needed else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_crash = error is not None and not isinstance(error, ConfigError)
        if self._orbax and not (is_crash and jax.process_count() > 1):  # the others may never come to its barriers
            self._orbax.close()

    @property
    def latest_step(self) -> int | None:
        """Steps done in the newest finished checkpoint."""
        return self._orbax.latest.step if self._orbax and self._orbax.latest else None

    def check(self, state: Any) -> None:
        """Raise ConfigError where the newest checkpoint is not one of the abstract `state`; reads no array."""
        if self._orbax and self.latest_step is not None:
            _check_same_tree(self._orbax.checkpointables_metadata(self.latest_step), state, self.directory)

    def save(self, step: int, state: Any, batches: Any) -> None:
        """Save what `step` steps made, once. The state may be donated to the next step at once."""
        if self._orbax and self._is_saving and step != self._last_saved:
            content = {"state": state, "data": batches.get_state(), "identity": self._identity}
            self._orbax.save_checkpointables_async(step, content, force=True)
            self._last_saved = step

    def restore(self, state: Any, batches: Any) -> Restored:
        """The newest checkpoint, laid out as the abstract `state` says; moves `batches` to its place in the data."""
        return _load(self._orbax, self.directory, state, batches, self._identity)

    def wait(self) -> None:
        """Until all saves are on disk."""
        if self._orbax:
            self._orbax.wait()


def restore_from(run_dir: Path, spec: RunSpec, state: Any, batches: Any) -> Restored:
    """The newest checkpoint of another run, on any mesh, laid out as the abstract `state` says."""
    directory = run_dir.resolve() / FOLDER
    with ocp.training.Checkpointer(str(directory)) as orbax:
        return _load(orbax, directory, state, batches, data_identity(spec))


def check_restore(spec: RunSpec) -> None:
    """Raise ConfigError where `checkpoint.restore_from` names no run with a finished checkpoint."""
    run_dir = spec.checkpoint.restore_from
    if run_dir is None:
        return
    directory = Path(run_dir).resolve() / FOLDER
    if directory.is_dir():
        with ocp.training.Checkpointer(str(directory)) as orbax:
            if orbax.latest is not None:
                return
    what = f"there is no finished checkpoint in {Path(run_dir) / FOLDER}"
    raise ConfigError([Problem("checkpoint.restore_from", what, "name the directory of a run that saved one")])


def data_identity(spec: RunSpec) -> dict[str, Any]:
    """All that a position in the data rests on, by key."""
    data = {f"data.{key}": value for key, value in spec.data.model_dump(exclude={"num_prefetch_threads"}).items()}
    return {**data, "global_batch_size": spec.global_batch_size, "sequence_length": spec.sequence_length}


def _load(orbax: Any, directory: Path, state: Any, batches: Any, identity: dict[str, Any]) -> Restored:
    step = orbax.latest.step
    _check_same_tree(orbax.checkpointables_metadata(step), state, directory)
    saved = orbax.load_checkpointables(step, {"identity": None})["identity"]
    other_data = tuple(key for key in identity if identity[key] != saved.get(key))
    content = orbax.load_checkpointables(step, {"state": state, "data": None})
    if not other_data:
        batches.set_state(content["data"])
    return Restored(content["state"], step, other_data)


def _check_same_tree(checkpoint: Any, wanted: Any, directory: Path) -> None:
    """Raise ConfigError with the arrays that differ; Orbax's own message would not name them."""
    there = {path: tuple(x.shape) for path, x in leaves_by_path(checkpoint.metadata["state"]).items()}
    here = {path: tuple(x.shape) for path, x in leaves_by_path(wanted).items()}
    differences = [f"{path} is {there.get(path, 'missing')} there, {here.get(path, 'missing')} here"
                   for path in sorted(there.keys() | here.keys()) if there.get(path) != here.get(path)]  # fmt: skip
    if differences:
        shown = "; ".join(differences[:3]) + (f"; and {len(differences) - 3} more" if len(differences) > 3 else "")
        what = f"{directory} holds another model: {shown}"
        raise ConfigError([Problem("model", what, "choose the model that was saved, or another hydra.run.dir")])
