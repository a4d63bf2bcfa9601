"""Finds a sweep and reads what it has written so far: its request, its rows, and the loss curves of its runs.

The sweep may be running, finished, or killed. Curves are thinned out for a page. An identity tells whether a sweep is
the one that a command asks for, so that the same command continues an unfinished one.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshloom import __version__
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import counted
from meshloom.compiler.core.user_code import allow_words
from meshloom.compiler.declare.hydra_settings import SEARCH_PATH, SWEEP_DIR
from meshloom.compiler.declare.overrides import overridden_key
from meshloom.compiler.declare.sweep_request import SweepRequest
from meshloom.models.record import Record

from ..core.files import is_held, parse_json
from ..rundir.folders import METRICS, ROWS_FILE, SPEC, SWEEP_FILE, check_directory, steps_in
from .rows import SWEEP_VERSION, Row, SweepCommand, SweepFile, best_first, find_figure

_AGAIN = "type the sweep's command again: it does what is missing"
NUM_SAMPLES = 120_000  # in all curves together: a page of some megabytes
LEAST, MOST = 24, 400  # samples of one curve
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "jax-cuda12-pjrt")
# These keys say how points are run and which are run again, not what the points are.
NOT_IN_IDENTITY = (SWEEP_DIR, "hydra.launcher", "hydra/launcher", "sweep", "distributed", "launch")


@dataclass(frozen=True)
class Sweep:
    """The contents of a sweep's directory. is_running: a process holds it. notes: what a reader should know about
    it."""

    directory: Path
    file: SweepFile
    rows: tuple[Row, ...]
    is_running: bool
    notes: tuple[str, ...]

    @property
    def num_left(self) -> int:
        """Returns how many points have no row yet."""
        return max(0, (self.file.num_points or 0) - len(self.rows))


class SweepResult(Record):
    """What `meshloom sweep --json` prints: the sweep with its rows, the best first."""

    sweep: SweepFile
    is_running: bool
    notes: tuple[str, ...]
    rows: tuple[Row, ...]


def sweep_as_json(sweep: Sweep, *, sort: str | None = None) -> dict[str, Any]:
    """Returns the content of a SweepResult. sort: the figure that is best; None: the objective."""
    figure = find_figure(sort or sweep.file.objective, where="--sort")
    rows = tuple(best_first(sweep.rows, figure))
    found = SweepResult(sweep=sweep.file, is_running=sweep.is_running, notes=sweep.notes, rows=rows)
    return found.model_dump(mode="json")


def read_sweep(directory: Path) -> Sweep:
    """Returns the sweep of a directory. Raises ConfigError if there is none, or its files are damaged.

    A cut-off last row is left out with a note: its writer was killed, or is writing it.
    """
    check_directory(directory, f"name the directory of a sweep, one with {SWEEP_FILE}")
    file = _sweep_file(directory / SWEEP_FILE)
    find_figure(file.objective, where=f"{directory / SWEEP_FILE}: objective")
    rows, notes = _rows(directory / ROWS_FILE)
    sweep = Sweep(directory, file, rows, is_held(directory), ())
    left = counted(sweep.num_left, "point")
    if sweep.is_running:
        notes.append("the sweep is running" + (f", {left} left" if sweep.num_left else ""))
    elif sweep.num_left:
        notes.append(f"{left} {'has' if sweep.num_left == 1 else 'have'} no row: the sweep was stopped; {_AGAIN}")
    return replace(sweep, notes=tuple(notes))


def _sweep_file(path: Path) -> SweepFile:
    content = _content(path)
    if content is None:
        raise ConfigError([_no_sweep(path.parent)])
    try:
        value = parse_json(content)
    except ValueError:
        raise ConfigError([_damaged(path, "it is not valid JSON")]) from None
    found = value.get("schema_version") if isinstance(value, dict) else None
    if found is None:
        raise ConfigError([_damaged(path, "it has no schema_version")])
    if found != SWEEP_VERSION:
        what = f"schema_version is {found}, and this version of meshloom reads {SWEEP_VERSION}"
        raise ConfigError([Problem(str(path), what, "make the sweep again, or use the version that wrote it")])
    try:
        return SweepFile.model_validate_json(content)
    except ValidationError as error:
        raise ConfigError([_damaged(path, _first(error))]) from None


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error.strerror}", "make it readable")]) from None


def _no_sweep(directory: Path) -> Problem:
    what = f"there is no {SWEEP_FILE} in it, so this is not the directory of a sweep"
    if (directory / SPEC).exists():
        return Problem(str(directory), f"{what}: it is that of one run", f"try `meshloom runs {directory}`")
    below = sorted(directory.glob(f"*/{SWEEP_FILE}")) or sorted(directory.glob(f"*/*/{SWEEP_FILE}"))
    newest = f"the newest sweep in it is {below[-1].parent}" if below else ""
    return Problem(str(directory), what, newest or "`meshloom runs` lists the sweeps of this machine")


def _rows(path: Path) -> tuple[tuple[Row, ...], list[str]]:
    """Returns the last row of each index, in order, and notes about other lines."""
    lines = (_content(path) or b"").split(b"\n")
    found, notes = list[Row](), list[str]()
    for number, line in enumerate(lines, start=1):
        is_last = number == len(lines)
        if is_last and not line:
            break
        try:
            found.append(Row.model_validate_json(line))
        except ValidationError as error:
            if not is_last:
                raise ConfigError([_damaged(path, f"line {number}: {_first(error)}")]) from None
            notes.append(f"the last row of {path} is cut off, and left out")
    rows = {row.index: row for row in found}
    if len(rows) < len(found):
        notes.append(f"{counted(len(found) - len(rows), 'row')} of {path} came again later; the latest ones are shown")
    return tuple(rows[index] for index in sorted(rows)), notes


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    message = f"{first['msg'][0].lower()}{first['msg'][1:]}"
    return f"{where}: {message}" if where else message


def _damaged(path: Path, how: str) -> Problem:
    fix = _AGAIN if path.name == SWEEP_FILE else f"remove that line, and {_AGAIN}"
    return Problem(str(path), f"is damaged: {how}", fix)


@dataclass(frozen=True)
class Curve:
    """The losses of a run, in nats per token; None for a loss that was not finite. held_out: (step, loss) of each
    evaluation. tokens_per_step: None if unknown."""

    index: int
    tokens_per_step: int | None
    steps: tuple[int, ...]
    losses: tuple[float | None, ...]
    held_out: tuple[tuple[int, float], ...]


def running_rows(directory: Path, rows: Sequence[Row]) -> tuple[Row, ...]:
    """Returns a row for each point of a sweep that trains and has not ended. The name of its directory gives its swept
    values: "optimizer.learning_rate=0.001,seed=1"."""
    ended = {row.directory for row in rows}
    found = sorted(path.parent.name for path in directory.glob(f"*/{METRICS}") if path.parent.name not in ended)
    running = []
    for index, name in enumerate(found, start=max((row.index for row in rows), default=-1) + 1):
        words = tuple(text for text in name.split(",") if "=" in text)
        swept = {key: value for key, _, value in (text.partition("=") for text in words)}
        running.append(Row(index=index, overrides=words, swept=swept, status="running", directory=name))
    return tuple(running)


def read_curves(directory: Path, rows: Sequence[Row]) -> tuple[Curve, ...]:
    """Returns the curve of each point that trained, including those that failed later or are running."""
    found = [(row, directory / row.directory / METRICS) for row in rows if row.directory is not None]
    found = [(row, path) for row, path in found if path.is_file()]
    most = max(LEAST, min(MOST, NUM_SAMPLES // max(1, len(found))))
    curves = []
    for row, path in found:
        made = list(steps_in(path.read_bytes()))
        if not made:
            continue
        losses = [_number(step.get("loss")) for step in made]
        evaluated = ((step["step"], _number(step.get("eval_loss"))) for step in made)
        held_out = tuple((number, loss) for number, loss in evaluated if loss is not None)
        kept = thinned(losses, most)
        steps, shown = tuple(made[n]["step"] for n in kept), tuple(losses[n] for n in kept)
        curves.append(Curve(row.index, row.figures and row.figures.tokens_per_step, steps, shown, held_out))
    return tuple(curves)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def thinned(values: Sequence[float | None], most: int) -> list[int]:
    """Returns the indices of at most `most` values to draw a curve from: the least and the greatest of each stretch, so
    that no spike is lost, and the first and last of all. A stretch with a None keeps it, as a gap."""
    if len(values) <= most:
        return list(range(len(values)))
    num_stretches = (most - 2) // 3
    kept = {0, len(values) - 1}
    for n in range(num_stretches):
        stretch = range(n * len(values) // num_stretches, (n + 1) * len(values) // num_stretches)
        known = [(value, index) for index in stretch if (value := values[index]) is not None]
        kept |= {min(known)[1], max(known)[1]} if known else set()
        kept |= {next(index for index in stretch if values[index] is None)} if len(known) < len(stretch) else set()
    return sorted(kept)


def versions() -> dict[str, str]:
    """Returns the versions that figures depend on."""
    found = {"meshloom": __version__}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def identity_of(command: SweepCommand, asked: SweepRequest) -> str:
    """Returns a hash of the command, overrides, versions, and contents of the user's configs of a sweep."""
    request = asked.request
    keys = [(text, f"{overridden_key(text)}.") for text in request.overrides]
    typed = [text for text, key in keys if not any(key.startswith(f"{name}.") for name in NOT_IN_IDENTITY)]
    told = {
        "command": command,
        "overrides": typed,
        "axes": {key: list(values) for key, values in asked.axes.items()},
        "config": [request.config_name, request.config_path],
        "allowed": allow_words(),
        "first": asked.spec.as_compared() | {"sweep": None, "distributed": None, "launch": None},
        "files": {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in _users_files(asked)},
        "versions": versions(),
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _users_files(asked: SweepRequest) -> Iterator[Path]:
    """Yields each config of the user."""
    request = asked.request
    places = [request.config_path] if request.config_path else []
    for text in request.search_path:
        places += re.findall(r"file://([^,'\]]+)", text.removeprefix(f"{SEARCH_PATH}="))
    for place in places:
        yield from sorted(Path(place).rglob("*.yaml"))


def as_glob(pattern: str) -> str:
    """Returns the pattern of `hydra.sweep.dir` with `*` for each interpolation, which matches any text without a slash:
    "multirun/*/*". Without an interpolation it names a directory."""
    while (replaced := re.sub(r"\$\{[^${}]*\}", "*", pattern)) != pattern:
        pattern = replaced
    return pattern


def sweeps_in(pattern: str) -> Iterator[Sweep]:
    """Yields the sweeps in the directories that match a pattern with `*`, the newest first; damaged ones are left
    out."""
    root = Path(pattern)
    base = Path(*(part for part in root.parts[: next(i for i, part in enumerate(root.parts) if "*" in part)]))
    places = base.glob(str(root.relative_to(base) / SWEEP_FILE)) if base.is_dir() else []
    for place in sorted(places, key=lambda path: path.stat().st_mtime, reverse=True):
        with suppress(ConfigError):
            yield read_sweep(place.parent)
