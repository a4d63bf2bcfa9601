"""Runs a point in a process of its own, which ends with this one.

Devices, signals and environment variables belong to one run of training alone.
"""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from .outcomes import outcome_of_death, outcome_of_timeout
from .rows import PRINTED, Outcome, Task

MODULE = "meshloom.runtime.cli.sweep_point"  # it reads a task from its input, and ends when that is closed
_POLL_SECONDS = 0.5


@dataclass
class OwnProcess:
    """Runs one point. process: set once it has started."""

    task: Task
    timeout_seconds: float | None
    process: subprocess.Popen[bytes] | None = field(default=None)
    is_interrupted: bool = False

    def run(self) -> Outcome:
        """Returns the outcome of the point. Its process has a session of its own, which a terminal's Ctrl-C does not
        reach."""
        self.task.directory.mkdir(parents=True, exist_ok=True)
        printed = self.task.directory / PRINTED
        with tempfile.TemporaryDirectory(prefix="meshloom-point-") as folder, printed.open("ab") as log:
            start, told = log.tell(), Path(folder) / "outcome.json"
            # -P: the working directory is not on the import path of this process, and must not be on the point's.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            try:
                self._tell(pickle.dumps((self.task, told)))
                exit_code = self.process.wait(self.timeout_seconds)
            except subprocess.TimeoutExpired:
                self.end(signal.SIGKILL)
                return outcome_of_timeout(self.timeout_seconds or 0)
            finally:
                self.end(signal.SIGKILL)
            with suppress(OSError, ValidationError):
                return Outcome.model_validate_json(told.read_bytes())
            with printed.open("rb") as file:
                file.seek(start)
                said = file.read().decode(errors="replace")
            return outcome_of_death(exit_code, self.task.directory, said)

    def interrupt(self) -> None:
        """Asks the process to stop, as Ctrl-C does: a training run saves a checkpoint first."""
        self.is_interrupted = True
        self._signal(signal.SIGINT)

    def end(self, number: int) -> None:
        """Ends the process and all of its children."""
        self._signal(number)
        if self.process:
            self.process.wait()
            if self.process.stdin:
                with suppress(OSError):
                    self.process.stdin.close()

    def _tell(self, message: bytes) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has died already; its exit code says how
            self.process.stdin.write(len(message).to_bytes(8, "big") + message)
            self.process.stdin.flush()

    def _signal(self, number: int) -> None:
        if self.process and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


def read_task(read: Callable[[int], bytes]) -> tuple[Task, Path]:
    """Returns the task that the parent has sent, and the file for its outcome."""
    return pickle.loads(read(int.from_bytes(read(8), "big")))


def end_with(parent: int) -> None:
    """Ends this process when its parent has died, in whatever way: nobody would take its result."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
