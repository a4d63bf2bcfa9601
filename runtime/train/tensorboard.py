"""Writes a run's curves for TensorBoard to `tensorboard/`: one event per step, by the thread that trains.

tensorboardX's own writer has a queue and a thread, which report a full disk by a traceback at the end. So its records
and protocol buffers are used without them.
"""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress

from tensorboardX import RecordWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue] (made at run time)
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from meshloom.compiler.core.errors import Problem

from ..core.failures import STORAGE, RunFailed
from .trackers import TrackedRun, Tracker

SECONDS_BETWEEN_FLUSHES = 10.0


class TensorBoard(Tracker):
    """An event file. TensorBoard hides events of earlier files from the first step of this start on."""

    def __init__(self, run: TrackedRun):
        super().__init__(run)
        folder = run.directory / "tensorboard"
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        with self._disk_reported():
            folder.mkdir(exist_ok=True)
            self._records = RecordWriter(str(folder / name))
            self._last_flush = time.monotonic()
            self._write(Event(file_version="brain.Event:2"))
            self._write(Event(step=run.first_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a point of each curve. Raises RunFailed if the disk refuses it or an earlier one."""
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        with self._disk_reported():
            self._write(Event(step=step, summary=Summary(value=points)))
            if time.monotonic() - self._last_flush > SECONDS_BETWEEN_FLUSHES:
                self._records.flush()
                self._last_flush = time.monotonic()

    def close(self, *, has_failed: bool) -> None:
        """Closes the file. Raises RunFailed if the disk refuses the last points, unless the run has failed already."""
        with suppress(RunFailed) if has_failed else nullcontext(), self._disk_reported():
            self._records.close()

    @contextmanager
    def _disk_reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"curves for TensorBoard could not be written: {error.strerror}"
            fix = "free disk space, and start the same command again; or leave tensorboard out of logging.trackers"
            raise RunFailed(Problem(str(self.run.directory), what, fix), STORAGE) from error

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
