"""Writes `run.json`: the command of a run directory, its beginning and its end; `meshloom runs` reads it.

The newest run directory that Hydra named by the clock also gets a link, `outputs/latest`.
"""

import logging
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Self

from pydantic import NonNegativeInt

from meshloom.compiler.declare.compose import Request
from meshloom.compiler.declare.problems import MISTAKES, as_config_error
from meshloom.models.record import Record

from ..core.files import replace_text
from ..core.interruptible import before_leaving

RECORD_FILE = "run.json"
LINK = "latest"
_BY_THE_CLOCK = re.compile(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d")  # conf/config.yaml: hydra.run.dir
LOG = logging.getLogger("meshloom")

Ended = Literal["done", "stopped", "failed"]


class RecordedRequest(Record):
    """The words that declared a run, by which its weights are opened again; values from the environment stay by name.

    config_name, config_path: as in a `Request`.
    """

    overrides: tuple[str, ...]
    config_name: str
    config_path: str | None

    @classmethod
    def of(cls, request: Request) -> Self:
        """Returns the record of a request."""
        return cls(overrides=request.overrides, config_name=request.config_name, config_path=request.config_path)


class RunRecord(Record):
    """The content of `run.json`.

    state: "running" from start to end; a process that is killed leaves it so, without holding the lock. why: the reason
    if it stopped or failed. began, ended: in UTC, by ISO 8601. request: None if the run was not declared by overrides,
    or an older version wrote the record.
    """

    schema_version: Literal[1] = 1
    command: Literal["train", "compile"]
    state: Literal["running", "done", "stopped", "failed"]
    why: str | None = None
    exit_code: NonNegativeInt | None = None
    began: str
    ended: str | None = None
    host: str
    pid: NonNegativeInt
    request: RecordedRequest | None = None


class Recorder:
    """Records the end of one run, once."""

    def __init__(self, run_dir: Path, running: RunRecord):
        self._run_dir, self._running, self._has_ended = run_dir, running, False
        _write(run_dir, running)

    def end(self, exit_code: int, why: str | None = None) -> int:
        """Records the end of the command. Returns the exit code."""
        if not self._has_ended:
            state: Ended = "done" if exit_code == 0 else "stopped" if exit_code > 128 else "failed"
            why = why or (f"by {signal.Signals(exit_code - 128).name}" if state == "stopped" else None)
            ended = {"state": state, "why": why, "exit_code": exit_code, "ended": _now()}
            _write(self._run_dir, self._running.model_copy(update=ended))
        self._has_ended = True
        return exit_code

    def end_with(self, error: BaseException) -> None:
        """Records the exception that ended the command."""
        if isinstance(error, KeyboardInterrupt):
            self.end(128 + (error.args[0] if error.args else signal.SIGINT))
        elif isinstance(error, MISTAKES):
            mistake = as_config_error(error)
            self.end(mistake.exit_code, "; ".join(f"{each.where}: {each.what}" for each in mistake.problems))
        else:
            first = str(error).partition("\n")[0]
            self.end(1, f"{type(error).__name__}: {first}" if first else type(error).__name__)


@contextmanager
def recorded_run(
    run_dir: Path, command: Literal["train", "compile"], request: Request | None = None
) -> Iterator[Recorder]:
    """Records within the `with` that the command is running, and afterwards that it is done, unless it raised or
    `Recorder.end` was called. The process that holds the directory calls it."""
    running = RunRecord(
        command=command,
        state="running",
        began=_now(),
        host=socket.gethostname(),
        pid=os.getpid(),
        request=RecordedRequest.of(request) if request else None,
    )
    recorder = Recorder(run_dir, running)
    link_latest(run_dir)
    with before_leaving(recorder.end):
        try:
            yield recorder
        except BaseException as error:
            recorder.end_with(error)
            raise
    recorder.end(0)


def _write(run_dir: Path, record: RunRecord) -> None:
    """Writes the record. A write that fails does not end the run."""
    try:
        replace_text(run_dir / RECORD_FILE, record.model_dump_json(indent=1) + "\n")
    except OSError as error:
        LOG.warning(f"{run_dir / RECORD_FILE} could not be written, which `meshloom runs` reads: {error.strerror}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def link_latest(run_dir: Path) -> None:
    """Points `latest`, beside the directories of the days, to this one: outputs/latest -> 2026-11-23/22-24-33.

    Nothing happens if the user named the run directory, if `latest` is a file of the user, or if the disk has no links.
    """
    run_dir = run_dir.absolute()
    name = "/".join(run_dir.parts[-2:])
    link = run_dir.parent.parent / LINK
    if not _BY_THE_CLOCK.fullmatch(name) or (link.exists() and not link.is_symlink()):
        return
    made = link.with_name(f".{LINK}.{os.getpid()}")
    with suppress(OSError):
        made.unlink(missing_ok=True)
        made.symlink_to(name, target_is_directory=True)
        made.replace(link)  # at each moment there is the old one or the new one
