"""A run's curves for TensorBoard: one event a step, written by the thread that trains.

tensorboardX's own writer has a queue and a thread, which tell of a full disk in a traceback at the end; its records and
protocol buffers are used without them.
"""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX import RecordWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue] (made at run time)
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

SECONDS_BETWEEN_FLUSHES = 10.0


class Curves:
    """An event file in `folder`. TensorBoard hides what earlier files hold of steps after `first_step`."""

    def __init__(self, folder: Path, *, first_step: int):
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(str(folder / name))
        self._last_flush = time.monotonic()
        self._write(Event(file_version="brain.Event:2"))
        self._write(Event(step=first_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a point of each curve. Raises OSError if the disk refuses it, or an earlier one."""
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(Event(step=step, summary=Summary(value=points)))
        if time.monotonic() - self._last_flush > SECONDS_BETWEEN_FLUSHES:
            self._records.flush()
            self._last_flush = time.monotonic()

    def close(self) -> None:
        self._records.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
