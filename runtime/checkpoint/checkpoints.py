"""Saves and restores checkpoints by Orbax: the train state, the position in the data, and the identity of the data.

A save is written to a temporary directory, gets its manifest there, and is finished by one rename. So kill -9 at any
moment leaves the last finished checkpoint as it was; docs/checkpoints.md has the tests.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import jax
from orbax.checkpoint import v1 as ocp

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.declare.run_spec import CheckpointSpec, RunSpec
from meshloom.models.adapter import saved_part

from ..core.failures import STORAGE, RunFailed, is_of_one_process, storage_reason
from ..core.files import Folder, free_name, is_remote, remove_for_good, what_store_said, write_manifest
from ..data.batches import converted_state
from ..rundir.folders import RecordedRequest
from .adapters import Base
from .find import COMMITTED, Checkpoint, checkpoint_folder, finished, saved_tree
from .meaning import RECORD, meaning_record
from .moments import as_here, as_saved, converted_moments
from .orbax_context import context_for
from .restore_plan import schedule_record

logging.getLogger("absl").setLevel(
    logging.CRITICAL
)  # Orbax logs each of its steps, and also the exceptions that it raises


BATCH_SIZE = "global_batch_size"  # a key of an identity; if only it differs, a place in the data can be converted


class DataIterator(Protocol):
    """An iterator over batches, as far as checkpoints need it: a place in the data, and the identity of the data."""

    identity: dict[str, Any]

    def get_state(self) -> dict[str, int]: ...
    def set_state(self, state: Mapping[str, int]) -> None: ...


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was loaded.

    state: the train state, laid out for this run. step: the steps done. other_data: the keys in which this run's data
    differ from the checkpoint's; if there are any, the data start at their beginning. batch_before: the size of a
    global batch in the checkpoint, if it differs. num_skipped: the sequences that are left out, up to a whole batch of
    the new size. schedule: the record that restore_plan.py compares with ours. num_tokens: the tokens of all steps
    so far; None if the checkpoint does not say. base: of the adapters, which are all that `state` has of the
    parameters; None for a whole model.
    """

    state: Any
    step: int
    other_data: tuple[str, ...]
    batch_before: int | None
    num_skipped: int
    schedule: dict[str, Any]
    num_tokens: int | None
    base: Base | None


class Checkpoints:
    """Saves the checkpoints of one run directory, asynchronously; leaving the `with` waits for them. request: the words
    of the run, by which its weights are opened."""

    def __init__(self, run_dir: Path, spec: RunSpec, request: RecordedRequest | None = None):
        self.directory = checkpoint_folder(run_dir, spec.checkpoint.directory)
        self.base: Base | None = None  # of the adapters that are saved; None: whole models are
        self._last_saved: int | None = None
        self._spec, self._request = spec, request
        self._response: Any = None  # Orbax's handle of a save in progress
        self._orbax = self._open(spec.checkpoint) if spec.checkpoint.is_saving else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a crash the others may never reach its barriers.
        is_crash = error is not None and (is_of_one_process(error) or not isinstance(error, ConfigError))
        is_waited_for = not (jax.process_count() > 1 and is_crash)
        try:
            if self._orbax and is_waited_for:
                with self._told(), closing(self._orbax):
                    self._finish_save()
        finally:
            if isinstance(error, RunFailed):  # again: writers that were active when the save failed have ended now
                remove_for_good(self._unfinished)

    @property
    def latest_step(self) -> int | None:
        """Returns the steps done in the newest finished checkpoint; None if there is none."""
        newest = next(finished(self.directory), None)
        return int(newest.name) if newest else None

    def save(self, step: int, state: Any, batches: DataIterator, *, num_tokens: int, eval_loss: float | None) -> None:
        """Saves the state after `step` steps over `num_tokens` tokens, once per step. The state may be donated to the
        next step at once.

        The position in the data is saved too; any number of processes can continue from it. Raises RunFailed if this
        save or the one before it cannot be written.
        """
        if self._orbax is None or step == self._last_saved:
            return
        metrics = {"eval_loss": eval_loss} if eval_loss is not None and math.isfinite(eval_loss) else None
        num_updates = int(state["step"]) if "step" in state else step  # fewer than steps where some were skipped
        data = {
            "position": batches.get_state(),
            "identity": batches.identity,
            "schedule": schedule_record(self._spec, num_updates),
            "num_tokens": num_tokens,
            RECORD: meaning_record(self._spec.as_written(), self._request),
        }
        data |= {"base": dict(self.base)} if self.base is not None else {}
        content = {"state": saved_part(state), "data": data}
        with self._told():
            self._finish_save()
            self._last_saved = step
            self._response = self._orbax.save_checkpointables_async(step, content, force=True, metrics=metrics)

    def wait(self) -> None:
        """Waits until all saves are on disk. Raises RunFailed if one cannot be written."""
        with self._told():
            self._finish_save()

    def _finish_save(self) -> None:
        """Waits for the save in progress. Each save has its own event loop, with a thread and three file descriptors;
        Orbax closes them only in `result`."""
        response, self._response = self._response, None
        if response is not None:
            response.result()
        if self._orbax:
            self._orbax.wait()

    def _open(self, spec: CheckpointSpec) -> Any:
        context = ocp.Context(context_for(self.directory))
        # A function: Orbax copies its options, and a bound method would copy this object with them.
        context.asynchronous.post_finalization_callback = lambda: self._before_rename()
        return ocp.training.Checkpointer(
            str(self.directory),
            context=context,
            preservation_policy=_preservation_policy(spec),
            cleanup_tmp_directories=True,  # of saves that were killed
        )

    def _before_rename(self) -> None:
        """Writes the manifest. Orbax calls it when all files of a save are written, before the rename."""
        if jax.process_index() != 0:
            return
        (directory,) = self._unfinished()
        write_manifest(directory, step=self._last_saved)

    def _unfinished(self) -> list[Folder]:
        if not is_remote(self.directory):
            return list(self.directory.glob(f"{self._last_saved}.orbax-checkpoint-tmp*"))
        place = self.directory / str(self._last_saved)
        return [place] if place.is_dir() and not (place / COMMITTED).exists() else []

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turns a failed save within the `with` into RunFailed, and removes the part that was written."""
        try:
            yield
        except Exception as error:
            reason = storage_reason(error) or (what_store_said(error) if is_remote(self.directory) else None)
            if reason is None:
                raise
            remove_for_good(self._unfinished)
            what = f"the checkpoint of step {self._last_saved} could not be saved: {reason}"
            good = "none was saved before" if self.latest_step is None else f"the last good one is {self.latest_step}"
            key = "hydra.run.dir" if self._spec.checkpoint.directory is None else "checkpoint.directory"
            elsewhere = f"or choose another {key}"
            again = "and start the same command again" if self.latest_step else elsewhere
            fix = f"free disk space, or give this process access to it, {again}"
            raise RunFailed(Problem(str(self.directory), f"{what}; {good}", fix), STORAGE) from error


def restore(start: Checkpoint, state: Any, batches: DataIterator) -> Restored:
    """Returns a checkpoint, laid out like the abstract `state`, on any mesh, and moves `batches` to its place in the
    data. Moments that are stored otherwise are converted."""
    state = saved_part(state)
    there = as_saved(state, converted_moments(saved_tree(start.path), state))
    with context_for(start.path):
        content = ocp.load_checkpointables(str(start.path), {"state": there, "data": None})
    content["state"] = as_here(state, content["state"])
    here, there = batches.identity, content["data"]["identity"]
    other_data = tuple(key for key in {**here, **there} if key not in here or here[key] != there.get(key))
    batch_before, num_skipped, position = None, 0, content["data"]["position"]
    if other_data == (BATCH_SIZE,):
        other_data, batch_before = (), there[BATCH_SIZE]
        position, num_skipped = converted_state(position, batch_before, here[BATCH_SIZE])
    if not other_data:
        batches.set_state(position)
    schedule, num_tokens = content["data"]["schedule"], content["data"].get("num_tokens")
    base = content["data"].get("base")
    return Restored(content["state"], start.step, other_data, batch_before, num_skipped, schedule, num_tokens, base)


def set_aside(damaged: dict[Folder, str]) -> None:
    """Renames damaged checkpoints to `STEP.damaged`, so that their steps can be saved again and nothing is lost."""
    for path in damaged:
        path.rename(free_name(path))


def _preservation_policy(spec: CheckpointSpec) -> Any:
    """Returns the retention policy: a checkpoint is kept while any of its parts wants it. Orbax asks after each
    save."""
    policies = ocp.training.preservation_policies
    wanted: list[Any] = [policies.LatestN(spec.keep)]
    if spec.keep_best:
        wanted.append(
            policies.BestN(
                get_metric_fn=lambda metrics: metrics["eval_loss"],
                reverse=True,  # the lowest is the best
                n=spec.keep_best,
                keep_checkpoints_without_metrics=False,
            )
        )
    if spec.keep_every_num_steps:
        wanted.append(policies.EveryNSteps(spec.keep_every_num_steps))
    return policies.AnyPreservationPolicy(wanted)
