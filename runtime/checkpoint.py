"""Checkpoints, by Orbax: the train state, the position in the data, and what they belong to."""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from orbax.checkpoint import v1 as ocp

from meshloom.compiler.problems import ConfigError, Problem
from meshloom.compiler.spec import RunSpec
from meshloom.compiler.trees import leaves_by_path

FOLDER = "checkpoints"
logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells of each of its own steps


class Checkpoints:
    """The checkpoints of one run directory. Saves are asynchronous; leaving the `with` waits for them."""

    def __init__(self, run_dir: Path, spec: RunSpec):
        training = ocp.training
        self.directory = run_dir.resolve() / FOLDER
        self.is_enabled = spec.checkpoint.every_num_steps is not None
        self._identity = data_identity(spec)
        policy: Any = training.preservation_policies.LatestN(spec.checkpoint.num_kept)
        self._orbax = (
            training.Checkpointer(str(self.directory), preservation_policy=policy) if self.is_enabled else None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._orbax:
            self._orbax.close()

    @property
    def latest_step(self) -> int | None:
        """Steps done in the newest finished checkpoint."""
        return self._orbax.latest.step if self._orbax and self._orbax.latest else None

    def save(self, step: int, state: Any, batches: Any) -> None:
        """Save what `step` steps made. The state may be donated to the next step at once."""
        if self._orbax and self.latest_step != step:
            content = {"state": state, "data": batches, "identity": self._identity}
            self._orbax.save_checkpointables_async(step, content, force=True)

    def restore(self, state: Any, batches: Any) -> tuple[Any, int]:
        """The newest state, laid out as the abstract `state` says, and its step; moves `batches` to its place."""
        assert self._orbax
        assert self.latest_step is not None
        return _load(self._orbax, self.directory, state, batches, self._identity), self.latest_step

    def wait(self) -> None:
        """Until all saves are on disk."""
        if self._orbax:
            self._orbax.wait()


def restore_from(run_dir: Path, spec: RunSpec, state: Any, batches: Any) -> tuple[Any, int]:
    """The newest state of another run, on any mesh, laid out as the abstract `state` says, and its step."""
    directory = run_dir.resolve() / FOLDER
    with ocp.training.Checkpointer(str(directory)) as orbax:
        assert orbax.latest is not None  # check_restore
        return _load(orbax, directory, state, batches, data_identity(spec)), orbax.latest.step


def check_restore(spec: RunSpec) -> None:
    """Raise ConfigError where `checkpoint.restore_from` names no run with a finished checkpoint."""
    if spec.checkpoint.restore_from is None:
        return
    key, directory = "checkpoint.restore_from", Path(spec.checkpoint.restore_from).resolve() / FOLDER
    if not directory.is_dir():
        raise ConfigError([Problem(key, f"there is no directory {directory}", "name the directory of a run")])
    with ocp.training.Checkpointer(str(directory)) as orbax:
        if orbax.latest is None:
            raise ConfigError([Problem(key, f"there is no finished checkpoint in {directory}", "name another run")])


def data_identity(spec: RunSpec) -> dict[str, Any]:
    """What a position in the data means something for."""
    return {
        **spec.data.model_dump(),
        "global_batch_size": spec.global_batch_size,
        "sequence_length": spec.sequence_length,
    }


def _load(orbax: Any, directory: Path, state: Any, batches: Any, identity: Mapping[str, Any]) -> Any:
    saved = orbax.checkpointables_metadata().metadata["state"]
    _check_same_tree(saved, state, directory)
    loaded = orbax.load_checkpointables(None, {"identity": None})
    content = {"state": state}
    if {k: v for k, v in loaded["identity"].items() if v != identity.get(k) and k != "num_prefetch_threads"}:
        return orbax.load_checkpointables(None, content)["state"]  # other data: it starts at its beginning
    return orbax.load_checkpointables(None, {**content, "data": batches})["state"]


def _check_same_tree(saved: Any, wanted: Any, directory: Path) -> None:
    """Raise ConfigError with the arrays that differ; Orbax's own message would not name them."""
    there = {path: tuple(x.shape) for path, x in leaves_by_path(saved).items()}
    here = {path: tuple(x.shape) for path, x in leaves_by_path(wanted).items()}
    differences = [f"{path} is {there.get(path, 'missing')} there, {here.get(path, 'missing')} here"
                   for path in sorted(there.keys() | here.keys()) if there.get(path) != here.get(path)]  # fmt: skip
    if differences:
        shown = "; ".join(differences[:3]) + (f"; and {len(differences) - 3} more" if len(differences) > 3 else "")
        what = f"{directory} holds another model: {shown}"
        raise ConfigError([Problem("model", what, "choose the model that was saved, or another hydra.run.dir")])
