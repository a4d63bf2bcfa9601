"""Shows a sweep on the terminal: while it runs, each point that has ended; then a table, the best first.

The table is exported as CSV or Parquet, too.
"""

import csv
import io
import json
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from meshloom.compiler.core.console import Column, Console, Table
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import counted, human_range, human_seconds, human_share
from meshloom.compiler.core.known import known
from meshloom.compiler.target.accuracy import best_mfu_on

from ..core.files import replace_bytes
from .rows import (
    FIGURES,
    SHOWN,
    Figure,
    Figures,
    Row,
    Status,
    SweepFile,
    best_first,
    best_of,
    figure_text,
    find_figure,
    name_of,
    range_of,
    swept_keys,
    tied_with_best,
    typed_value,
    value_of,
)

NUM_SHOWN = 20  # the best points of a longer sweep
NUM_REASONS = 12
MOST_POINT_WIDTH = 36  # a wider point is folded if the figures leave no more room
# On a narrow terminal.
LEFT_OUT_FIRST = ("tokens_per_second_per_chip", "peak_bytes", "memory_fraction", "exposed_fraction", "mfu",
                  "evaluation_loss")  # fmt: skip
STATUS_TEXT: dict[Status, str] = {
    "done": "done",
    "refused": "refused",
    "does_not_fit": "does not fit",
    "failed": "failed",
    "aborted": "aborted",
    "timed_out": "timed out",
    "out_of_memory": "out of this machine's memory",
    "running": "running",
}
TOO_FAST = "!"  # behind an MFU that no published run on the chip has reached
SECONDS_BETWEEN_LINES = 30.0  # without a terminal
MOST_LINES = 200  # for points that are done; the others are always shown


def show_table(
    console: Console,
    file: SweepFile,
    rows: Sequence[Row],
    *,
    sort: str | None = None,
    is_whole: bool = False,
    directory: Path | None = None,
    is_tie: bool = False,
) -> None:
    """Shows the points, the best first, then the number of points of each status, and the reasons.

    sort: the figure to sort by; None: the sweep's objective. is_whole: show every point, not only the best of a long
    sweep. directory: the sweep's, as a user types it. is_tie: the first points are too close to call one of them best.
    Raises ConfigError if `sort` is not a figure.
    """
    figure = find_figure(sort or file.objective, where="--sort" if sort else "objective")
    if not rows:
        console.wrapped("no point has ended")
        return
    ordered = best_first(rows, figure)
    done = [row for row in ordered if row.status == "done"]
    # If none is done, the first ones are shown, with their reasons.
    shown = ordered if is_whole or len(ordered) <= NUM_SHOWN else (done or ordered)[:NUM_SHOWN]
    best = best_of(rows, figure)
    if file.overrides:
        console.wrapped(f"every point of meshloom {file.command} has ", (" ".join(file.overrides), "bold"))
    console.table(_table(swept_keys(file, rows), shown, best, figure, console.width))
    if len(shown) < len(ordered):
        how = f"`meshloom sweep {directory or 'DIR'} --all` shows them"
        console.wrapped(f"... {counted(len(ordered) - len(shown), 'more point')}: {how}")
    _show_counts(console, rows)
    for line in _too_fast(shown):
        console.wrapped((line, "yellow"))
    if best and is_tie:
        return
    tied = tied_with_best(rows, figure)
    if best and len(tied) > 1:
        named = ", ".join(name_of(row) for row in tied)
        console.wrapped("a tie by ", (figure.name, "bold"), f": {named}: their ranges overlap, so none is the best")
        return
    if best:
        place = f", in {directory / best.directory if directory else best.directory}" if best.directory else ""
        named = (name_of(best), "bold green")
        console.wrapped("best by ", (figure.name, "bold"), ": ", named, f" at {figure_text(best, figure)}{place}")
    else:
        console.wrapped(f"no point is done with {figure.name}")


def _table(keys: Sequence[str], shown: Sequence[Row], best: Row | None, figure: Figure, width: int) -> Table:
    """Returns a table with a column for each key if the terminal is wide enough; else with one folded column for all
    keys, and fewer figures."""
    tail = dict[str, tuple[Column, Callable[[Row], str]]]()  # the columns after those of the keys, by name
    for name in dict.fromkeys([*SHOWN, figure.name]):
        if any(figure_text(row, FIGURES[name]) for row in shown):
            text = _mfu_text if name == "mfu" else partial(figure_text, figure=FIGURES[name])
            tail[name] = Column(FIGURES[name].heading, "right"), text
        if name == "step_seconds" and len({row.figures.chip for row in shown if row.figures}) > 1:
            tail["range"] = Column("range", "right"), _range_text
    if len({row.figures.basis for row in shown if row.figures}) > 1:
        tail["basis"] = Column("by"), lambda row: row.figures.basis if row.figures else ""
    if any(row.status != "done" for row in shown):
        tail["status"] = Column("status"), lambda row: STATUS_TEXT[row.status]

    def cells(row: Row, names: Sequence[str]) -> list[tuple[str, str]]:
        style = "bold green" if row is best else "" if row.status == "done" else "dim"
        texts = ["*" if row is best else "", *names, *(text(row) for _, text in tail.values())]
        return [(text, style) for text in texts]

    columns = [Column(), *(Column(key) for key in keys), *(column for column, _ in tail.values())]
    made = [cells(row, [typed_value(row, key) for key in keys]) for row in shown]
    if _width(columns, [[text for text, _ in row] for row in made]) <= width:
        return Table(columns, made)
    points = {row.index: " ".join(f"{key}={typed_value(row, key)}" for key in keys) for row in shown}
    least = min(max(len(f"{key}={typed_value(row, key)}") for row in shown for key in keys or [""]), MOST_POINT_WIDTH)
    for name in LEFT_OUT_FIRST:
        texts = [[text(row) for _, text in tail.values()] for row in shown]
        if _width([column for column, _ in tail.values()], texts) + least + 5 > width and name != figure.name:
            tail.pop(name, None)
    point = Column("point", overflow="fold", min_width=least)
    folded = [cells(row, [points[row.index]]) for row in shown]
    return Table([Column(), point, *(column for column, _ in tail.values())], folded)


def _range_text(row: Row) -> str:
    between = range_of(row, value_of(row, FIGURES["step_seconds"]))
    return human_range(between) if between else ""


def _mfu_text(row: Row) -> str:
    return figure_text(row, FIGURES["mfu"]) + (TOO_FAST if _is_above_published(row) else "")


def _is_above_published(row: Row) -> bool:
    """Returns True if no published run on the chip has reached the MFU that is predicted."""
    best = best_mfu_on(row.figures.chip) if row.figures else None
    mfu = value_of(row, FIGURES["mfu"])
    return best is not None and mfu is not None and mfu > best and row.figures is not None and not row.figures.last_step


def _too_fast(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each chip with points above all published runs on it."""
    chips = dict.fromkeys(row.figures.chip for row in rows if row.figures and _is_above_published(row))
    return [
        f"{TOO_FAST} published runs on {chip} reached an MFU of {human_share(best_mfu_on(chip) or 0.0)} at most: "
        "take these steps as too short"
        for chip in chips
    ]


def _width(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    longest = [max(len(column.name), *(len(row[n]) for row in rows)) for n, column in enumerate(columns)]
    return sum(longest) + 2 * (len(columns) - 1)


def _show_counts(console: Console, rows: Sequence[Row]) -> None:
    """Shows the number of points of each status, and why points are not done, the most frequent reason first."""
    statuses = Counter(row.status for row in rows)
    counts = [f"{number:,} {came_to(status, number)}" for status in STATUS_TEXT if (number := statuses[status])]
    console.wrapped(f"{counted(len(rows), 'point')}: {', '.join(counts)}")
    reasons = count_reasons(rows)
    for status, why, number in reasons[:NUM_REASONS]:
        console.wrapped(f"  {number:,} {came_to(status, number)}: {why}")
    if len(reasons) > NUM_REASONS:
        console.wrapped(f"  and {counted(len(reasons) - NUM_REASONS, 'more reason')}: --json has all")


def came_to(status: Status, number: int) -> str:
    """Returns the text of a status for a number of points: ("does_not_fit", 2) -> "do not fit"."""
    return "do not fit" if status == "does_not_fit" and number != 1 else STATUS_TEXT[status]


def count_reasons(rows: Sequence[Row]) -> list[tuple[Status, str, int]]:
    """Returns status, reason and number of points that are not done, the most frequent first. Reasons that differ only
    in their numbers count as one, and the first is shown: "30.1 GiB of 15.75 GiB" and "17.2 GiB of 15.75 GiB"."""
    found: dict[tuple[Status, str], list[str]] = {}
    for row in rows:
        if row.status != "done":
            why = row.why or "no reason is recorded"
            found.setdefault((row.status, re.sub(r"[\d.,]+", "0", why)), []).append(why)
    return [
        (status, whys[0] + (", and alike" if len(whys) > 1 and whys[0] != pattern else ""), len(whys))
        for (status, pattern), whys in sorted(found.items(), key=lambda each: -len(each[1]))
    ]


def flat_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns each row as a flat record: {"figures": {"mfu": 0.4}} becomes the column "figures.mfu". All rows have the
    same columns, with None for missing values; lists are JSON."""
    keys = list(dict.fromkeys(key for row in rows for key in row.swept))
    names = [name for name in dict.fromkeys((*Figures.model_fields, *FIGURES)) if name != "exposed_by_axes"]
    made = []
    for row in rows:
        plain = row.model_dump(exclude={"swept", "figures", "overrides"})
        values = {f"swept.{key}": row.swept.get(key) for key in keys}
        is_plain = {key: value is None or isinstance(value, str | int | float) for key, value in values.items()}
        swept = {key: value if is_plain[key] else json.dumps(value) for key, value in values.items()}
        parts = {f"figures.{name}": known(getattr(row.figures, name, None)) for name in names}
        made.append({"index": row.index, "overrides": json.dumps(row.overrides)} | plain | swept | parts)
    return made


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Writes CSV with a header; None is an empty field. Raises ConfigError if the file cannot be written."""
    flat = flat_rows(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(flat[0]) if flat else list(Row.model_fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    write_file(path, text.getvalue().encode(), flag="--csv")


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Writes Parquet with typed columns; a swept key with values of several types is JSON text.

    Raises ConfigError if pyarrow is missing, or the file cannot be written.
    """
    try:
        import pyarrow  # noqa: PLC0415 (an extra, and slow to import)
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError:
        fix = "pip install 'meshloom[data]', or write CSV with --csv"
        raise ConfigError([Problem("--parquet", "needs pyarrow, which is not installed", fix)]) from None
    flat = flat_rows(rows)
    columns = {name: _one_type([row[name] for row in flat]) for name in (flat[0] if flat else ())}
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    write_file(path, buffer.getvalue(), flag="--parquet")


def write_file(path: Path, content: bytes, *, flag: str) -> None:
    """Writes a whole file. Raises ConfigError if the system refuses it."""
    try:
        replace_bytes(path, content)
    except OSError as error:
        fix = f"name a file that can be written: {flag} FILE"
        raise ConfigError([Problem(str(path), f"cannot be written: {error.strerror}", fix)]) from None


def _one_type(values: list[Any]) -> list[Any]:
    """Returns the values with one type: unchanged if they share one, integers among floats as floats, else as JSON."""
    types = {type(value) for value in values if value is not None}
    if types == {int, float}:
        return [None if value is None else float(value) for value in values]
    if len(types) > 1 or any(isinstance(value, int) and abs(value) >= 2**63 for value in values):
        return [None if value is None else json.dumps(value) for value in values]
    return values


class SweepProgress:
    """Shows the counts; on a terminal, in a line that stays below all others. num_points: None if unknown. rows: of
    points that ended before."""

    def __init__(self, console: Console, *, num_points: int | None, objective: str, rows: Iterable[Row] = ()):
        self._console, self._num_points, self._figure = console, num_points, FIGURES[objective]
        self._counts = Counter(row.status for row in rows)
        self._num_said, self._last_line = 0, time.monotonic()
        self._bar = console.bar("sweep", "doing", "bar", "numbers", "elapsed", "left", is_transient=True)

    def __enter__(self) -> "SweepProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def ended(self, row: Row) -> None:
        """Shows the outcome of a point."""
        self._counts[row.status] += 1
        told = row.why or ""
        if row.status == "done":
            self._num_said += 1
            if self._num_said > MOST_LINES:
                return
            value = figure_text(row, self._figure)
            taken = f"in {human_seconds(row.seconds)}" if row.seconds is not None else ""
            told = f"{self._figure.heading} {value}, {taken}" if value else taken
        style = "green" if row.status == "done" else "red"
        point = shlex.join(row.overrides) or "the point"
        self._console.line((STATUS_TEXT[row.status], style), f"  {point}  ", (told, "dim"))

    def update(self, num_running: int) -> None:
        """Shows the counts: "12 done, 1 failed, 2 running, 85 left"; a point that does not fit has not failed."""
        num_ended, done, does_not_fit = self._counts.total(), self._counts["done"], self._counts["does_not_fit"]
        failed = num_ended - done - does_not_fit
        parts = [f"{done:,} done", *([f"{does_not_fit:,} not fitting"] if does_not_fit else []), f"{failed:,} failed"]
        parts.append(f"{num_running:,} running")
        if self._num_points is not None:
            parts.append(f"{max(0, self._num_points - num_ended - num_running):,} left")
        self._bar.update(num_ended, total=self._num_points, numbers=", ".join(parts))
        if not self._console.is_terminal and time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._console.line(", ".join(parts))
