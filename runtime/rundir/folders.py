"""Opens the directory of a run: each property reads one file when it is first used.

    RunFolder(path).record     run.json: the command, its beginning and its end
    RunFolder(path).spec       spec.yaml: the resolved declaration
    RunFolder(path).plan       plan.json
    RunFolder(path).report     report.json; None where nothing was compiled
    RunFolder(path).steps      metrics.jsonl, line by line
    RunFolder(path).checkpoints    the place of its checkpoints, which may be elsewhere

Reading a missing or damaged file raises ConfigError; `declared` is for readers that can do without a declaration.

`read_run` says of a run on this machine whether it still runs, its last step and its loss.

`run.json` is written here, too. The newest run directory that Hydra named by the clock also gets a link,
`outputs/latest`.
"""

import json
import logging
import os
import re
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import NonNegativeInt, ValidationError

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.known import KNOWN
from meshloom.compiler.declare.compose import Request
from meshloom.compiler.declare.problems import MISTAKES, as_config_error
from meshloom.compiler.schema import SCHEMA_VERSION, Report
from meshloom.models.record import Record

from ..core.failures import before_leaving
from ..core.files import is_held, parse_json, replace_text

RECORD_FILE = "run.json"
LINK = "latest"
_BY_THE_CLOCK = re.compile(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d")  # conf/config.yaml: hydra.run.dir
LOG = logging.getLogger("meshloom")

Ended = Literal["done", "stopped", "failed"]
METRICS, SPEC, PLAN, REPORT = "metrics.jsonl", "spec.yaml", "plan.json", "report.json"
CHECKPOINTS = "checkpoints"
SWEEP_FILE, ROWS_FILE = "sweep.json", "sweep.jsonl"  # of a sweep
TAIL_BYTES = 1 << 18  # read from the end of metrics.jsonl: some hundred steps
FIRST_LOG = "logs/process-0.log"

RunState = Literal["running", "done", "stopped", "failed", "killed"]


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


@dataclass(frozen=True)
class RunFolder:
    """The directory of a run."""

    path: Path

    @classmethod
    def around(cls, place: Path) -> Self:
        """Returns the run whose directory is at a place, or whose checkpoints are: RUN/checkpoints,
        RUN/checkpoints/STEP."""
        around = (folder for folder in (place, place.parent, place.parent.parent) if (folder / SPEC).is_file())
        return cls(next(around, place))

    @property
    def is_declared(self) -> bool:
        """Returns True for a run of a declaration; what `meshloom inspect` writes has none."""
        return any((self.path / name).exists() for name in (SPEC, PLAN))

    @cached_property
    def record(self) -> RunRecord | None:
        """Returns the record of the run; None if there is none that can be read, as in an older directory."""
        try:
            return RunRecord.model_validate_json((self.path / RECORD_FILE).read_bytes())
        except (OSError, ValidationError):
            return None

    @cached_property
    def spec(self) -> Mapping[str, Any]:
        """Returns the declaration as it was written, perhaps by an older version."""
        path = self.path / SPEC
        try:
            spec = yaml.safe_load(_text(path))
            json.dumps(spec)  # a declaration has no values that JSON lacks, such as a date or a cycle
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            raise _damaged(path, "it is not valid YAML" + (f", line {mark.line + 1}" if mark else "")) from None
        except (ValueError, TypeError, RecursionError):
            raise _damaged(path, "it holds no declaration") from None
        if not isinstance(spec, dict):
            raise _damaged(path, "it holds no declaration")
        return spec

    @cached_property
    def declared(self) -> Mapping[str, Any]:
        """Returns the declaration; {} if it cannot be read."""
        try:
            return self.spec
        except ConfigError:
            return {}

    @cached_property
    def plan(self) -> Mapping[str, Any]:
        """Returns the plan, of this version of its schema."""
        return read_json(self.path / PLAN)

    @cached_property
    def report(self) -> Report | None:
        """Returns the report of the compiled step, of this version of its schema; None without one."""
        path = self.path / REPORT
        return read_report(path) if path.exists() else None

    @property
    def num_steps(self) -> int | None:
        """Returns num_steps of the declaration, which is at its top level; parsing the whole YAML would take long."""
        try:
            found = re.search(r"^num_steps: (\d+)$", (self.path / SPEC).read_text(encoding="utf-8"), re.MULTILINE)
        except (OSError, UnicodeDecodeError):
            return None
        return int(found[1]) if found else None

    @property
    def predicted_seconds(self) -> float | None:
        """Returns the predicted seconds of a step in report.json, of any version; None if it does not say."""
        try:
            seconds = parse_json((self.path / REPORT).read_bytes())["step"]["predicted_seconds"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return seconds if isinstance(seconds, float) else None

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Returns the steps in metrics.jsonl so far."""
        path = self.path / METRICS
        return [*steps_in(path.read_bytes())] if path.exists() else []

    @property
    def checkpoints(self) -> str:
        """Returns the place of the checkpoints, which the run may have declared elsewhere."""
        checkpoint = self.declared.get("checkpoint")
        elsewhere = checkpoint.get("directory") if isinstance(checkpoint, dict) else None
        return str(elsewhere or self.path / CHECKPOINTS)


def read_report(path: Path) -> Report:
    """Returns the report in a file, of this version of its schema."""
    read_json(path)
    try:
        return Report.model_validate_json(_text(path))
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        where = ".".join(str(part) for part in first["loc"] if part != KNOWN)
        more = f", and {len(others)} more" if others else ""
        raise _damaged(path, f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}{more}") from None


def steps_in(content: bytes) -> Iterator[dict[str, Any]]:
    """Yields the steps in lines of metrics.jsonl, without cut-off lines: one that is being written, or the first."""
    for line in content.splitlines():
        try:
            value = parse_json(line)
        except ValueError:
            continue
        if isinstance(value, dict) and type(value.get("step")) is int:
            yield value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        fix = "name a run directory: `meshloom train` and `meshloom compile` write it"
        raise ConfigError([Problem(str(path), "there is no such file, so this is not a run directory", fix)]) from None
    except OSError as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error.strerror}", "make it readable")]) from None
    except UnicodeDecodeError:
        raise _damaged(path, "it is not UTF-8 text") from None


def _damaged(path: Path, how: str) -> ConfigError:
    return ConfigError([Problem(str(path), f"is damaged: {how}", "make the run again")])


def read_json(path: Path) -> dict[str, Any]:
    """Returns the content of plan.json or report.json, which have one version."""
    try:
        value = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise _damaged(path, f"it is not valid JSON, line {error.lineno}") from None
    except (ValueError, RecursionError):  # a number is too long, lists are too deep
        raise _damaged(path, "its JSON cannot be read") from None
    found = value.get("schema_version") if isinstance(value, dict) else None
    if found is None:
        raise _damaged(path, "it has no schema_version")
    if found != SCHEMA_VERSION:
        what = f"schema_version is {found}, and this version of meshloom reads {SCHEMA_VERSION}"
        raise ConfigError([Problem(str(path), what, "make the run again, or use the version that wrote it")])
    return value


@dataclass(frozen=True)
class FoundRun:
    """A run, as its directory shows it.

    state: "killed" means that no end was recorded and no process holds the directory. why: the reason of the state;
    None if it is running or done. step, loss: the last ones in metrics.jsonl. changed: the time of its end or its last
    write, in UTC.
    """

    directory: Path
    command: str
    state: RunState
    why: str | None
    step: int | None
    num_steps: int | None
    loss: float | None
    eval_loss: float | None
    predicted_seconds: float | None
    began: str | None
    changed: str

    def as_json(self, directory: Path) -> dict[str, Any]:
        """Returns the run as `--json` prints it. directory: as it is to be named."""
        return asdict(self) | {"directory": str(directory)}


def check_directory(path: Path, fix: str) -> None:
    """Raises ConfigError if a path is not a directory. fix: what to name instead; the nearest name is added to it."""
    if path.is_dir():
        return
    what = "this is a file" if path.exists() else "there is no such directory"
    names = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, names, n=1)
    raise ConfigError([Problem(str(path), what, fix + (f" (did you mean '{path.parent / near[0]}'?)" if near else ""))])


def find_directories(top: Path, *markers: str) -> Iterator[Path]:
    """Returns the directories at and below `top` that hold one of these files, without those below them: checkpoints,
    or the points of a sweep. Links are not followed."""
    if any((top / name).is_file() for name in markers):
        yield top
        return
    try:
        with os.scandir(top) as entries:
            below = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:  # a directory that may not be read
        return
    for name in below:
        if not name.startswith("."):
            yield from find_directories(top / name, *markers)


def read_run(directory: Path) -> FoundRun:
    """Returns the run of a directory, also while it is running."""
    run, is_running = RunFolder(directory), is_held(directory)
    record, num_steps = run.record, run.num_steps
    rows = [*steps_in(_tail(directory / METRICS))]
    step = rows[-1]["step"] if rows else None
    command = record.command if record else "compile" if (directory / REPORT).exists() else "train"
    is_done = (directory / REPORT).exists() if command == "compile" else step is not None and step == num_steps
    state, why = _state(directory, record, is_running=is_running, is_done=is_done)
    evaluated = [row["eval_loss"] for row in rows if row.get("eval_loss") is not None]
    return FoundRun(
        directory, command, state, why, step, num_steps if command == "train" else None,
        rows[-1].get("loss") if rows else None, evaluated[-1] if evaluated else None,
        run.predicted_seconds, record.began if record else None, _changed(directory, record),
    )  # fmt: skip


def _state(
    directory: Path, record: RunRecord | None, *, is_running: bool, is_done: bool
) -> tuple[RunState, str | None]:
    if is_running:
        return "running", None
    if record is not None and record.state != "running":
        return record.state, record.why
    if record is None and is_done:  # by a version that recorded no end
        return "done", None
    no_end = "it recorded no end: its process was killed, or the machine went down"
    if record is not None and record.host != socket.gethostname():
        no_end = f"it recorded no end, on {record.host}: killed, or its lock is not seen from here"
    return "killed", _fatal_error(directory / FIRST_LOG) or no_end


def _fatal_error(log: Path) -> str | None:
    """Returns the fatal error that Python's faulthandler wrote when the process died; None if it wrote none."""
    found = re.findall(r"^Fatal Python error: (.+)$", _tail(log).decode(errors="replace"), re.MULTILINE)
    return f"{found[-1]} ({log} has its stacks)" if found else None


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read()
    except OSError:
        return b""


def _changed(directory: Path, record: RunRecord | None) -> str:
    if record is not None and record.ended is not None:
        return record.ended
    paths = [directory / name for name in (METRICS, FIRST_LOG, RECORD_FILE, SPEC)]
    newest = max((path.stat().st_mtime for path in paths if path.exists()), default=directory.stat().st_mtime)
    return datetime.fromtimestamp(newest, UTC).isoformat(timespec="seconds")
