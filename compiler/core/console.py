"""Shows values on a terminal. No other module imports rich.

Callers pass plain text with an optional style: `console.line("on ", (name, "bold"))`. Markup is not interpreted, so a
value cannot inject any, and control characters are shown as escapes (visible.py).
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

import rich.console
import rich.progress
import rich.table
from rich.cells import cell_len
from rich.text import Text

from .folding import CONTINUED, LEAST_WIDTH, breaks
from .visible import visible_line

Part = str | tuple[str, str]  # plain text, or (text, style)
Line = list[Part]
BarColumn = Literal["spinner", "doing", "count", "bar", "numbers", "bytes", "bytes_per_second", "elapsed", "left"]

HANGING = 2  # columns before what follows a first line


@dataclass(frozen=True)
class Column:
    """A column of a table. fold: a long cell is wrapped; cut: it ends in an ellipsis; keep: it is shown whole if the
    terminal is wide enough."""

    name: str = ""
    justify: Literal["left", "right"] = "left"
    overflow: Literal["keep", "cut", "fold"] = "keep"
    min_width: int | None = None


@dataclass(frozen=True)
class Table:
    """Rows under columns, which may have names."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Part | Line]]
    title: str = ""


class Console:
    """Standard output, standard error or a file. width: the width of tables; None: the terminal's, or 80 without one.
    off_terminal_width: the width without a terminal. is_terminal: None: detected."""

    def __init__(
        self,
        file: TextIO | None = None,
        *,
        is_error: bool = False,
        is_quiet: bool = False,
        width: int | None = None,
        off_terminal_width: int | None = None,
        is_terminal: bool | None = None,
    ):
        # In a notebook rich would show each line as a cell's output, whatever file it is for, and warn of each spinner.
        self._rich = rich.console.Console(
            file=file, stderr=is_error, quiet=is_quiet, width=width, force_terminal=is_terminal, force_jupyter=False
        )
        if off_terminal_width is not None and not self._rich.is_terminal:
            self.width = off_terminal_width

    @property
    def is_terminal(self) -> bool:
        return self._rich.is_terminal

    @property
    def is_quiet(self) -> bool:
        return self._rich.quiet

    @property
    def width(self) -> int:
        return self._rich.width

    @width.setter
    def width(self, width: int) -> None:
        self._rich.width = width

    def line(self, *parts: Part, style: str = "") -> None:
        """Prints one line without wrapping it, so that it can be searched and copied."""
        text = _text(list(parts))
        text.style = style
        self._rich.print(text, soft_wrap=True)

    def wrapped(self, *parts: Part) -> None:
        """Prints one line, which a terminal gets in several, broken between words and indented below the first."""
        text = _text(list(parts))
        indent = len(text.plain) - len(text.plain.lstrip()) + HANGING
        if not self.is_terminal or text.cell_len <= self.width:
            self.line(*parts)
            return
        first, *rest = _in_lines(text, max(self.width - indent, LEAST_WIDTH))
        self._rich.print(first, soft_wrap=True)
        for each in rest:
            self._rich.print(Text(" " * indent) + each, soft_wrap=True)

    def command(self, label: str, words: Sequence[str]) -> None:
        """Prints a command to paste after its label. Where a terminal is too narrow for one line, it begins
        below the label, and its lines end in backslashes."""
        for line in command_lines(label, words, self.width if self.is_terminal else None):
            self.line(line)

    def table(self, table: Table, *, width: int | None = None) -> None:
        """Prints a table without borders, below its title. Where it is too wide, a row's last texts go below the row;
        words stay whole, but in columns that are cut."""
        limit = min(width or self.width, self.width)
        rows = [[_text(cell) for cell in row] for row in table.rows]
        beside, below = _split(table.columns, rows, limit)
        columns = [table.columns[n] for n in beside]
        widths = _widths(columns, [[row[n] for n in beside] for row in rows], limit)
        for n, column, wide in zip(beside, columns, widths, strict=True):
            for row in rows:
                if column.overflow == "fold" and wide and row[n].cell_len > wide:
                    row[n] = Text("\n").join(_in_lines(row[n], wide))
        made = _empty(columns, widths, title=table.title, has_header=True)
        if below:
            self._rich.print(made, width=width)
            self._below([Text(table.columns[n].name, "dim") for n in below], limit)
            made = _empty(columns, widths, title="", has_header=False)
        for row in rows:
            made.add_row(*(row[n] for n in beside))
            if below:
                self._rich.print(made, width=width)
                self._below([row[n] for n in below], limit)
                made = _empty(columns, widths, title="", has_header=False)
        if not below:
            self._rich.print(made, width=width)

    def _below(self, texts: Sequence[Text], limit: int) -> None:
        """Prints what has no room in its row, indented."""
        text = Text("; ").join(each for each in texts if each.plain)
        width = max(limit - 2 * HANGING, LEAST_WIDTH)
        for line in _in_lines(text, width) if text.plain else ():
            self._rich.print(Text(" " * 2 * HANGING) + line, soft_wrap=True)

    def bar(self, doing: str, *columns: BarColumn, is_transient: bool = False) -> "ProgressBar":
        """Returns a progress bar on a terminal, nothing elsewhere."""
        made = [_BAR_COLUMNS[name]() for name in columns]
        progress = rich.progress.Progress(
            *made, console=self._rich, disable=not self.is_terminal, transient=is_transient
        )
        return ProgressBar(progress, doing)


class ProgressBar:
    """The progress bar of one task."""

    def __init__(self, progress: rich.progress.Progress, doing: str):
        self._progress = progress
        self._task = progress.add_task(visible_line(doing), total=None, numbers="")

    def start(self) -> None:
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()

    def begin(self, doing: str) -> None:
        """Begins anew, with another text and no time elapsed."""
        self._progress.reset(self._task, description=visible_line(doing), total=None, numbers="")

    def update(self, completed: float, *, total: float | None, numbers: str = "") -> None:
        """Moves the bar. total: None if it is not known. numbers: the text of the column of this name."""
        self._progress.update(self._task, completed=completed, total=total, numbers=visible_line(numbers))


_BAR_COLUMNS: dict[BarColumn, Callable[[], rich.progress.ProgressColumn]] = {
    "spinner": rich.progress.SpinnerColumn,
    "doing": lambda: rich.progress.TextColumn("{task.description}", "bold", markup=False),
    "count": rich.progress.MofNCompleteColumn,
    "bar": rich.progress.BarColumn,
    "numbers": lambda: rich.progress.TextColumn("{task.fields[numbers]}", markup=False),
    "bytes": rich.progress.DownloadColumn,
    "bytes_per_second": rich.progress.TransferSpeedColumn,
    "elapsed": rich.progress.TimeElapsedColumn,
    "left": rich.progress.TimeRemainingColumn,
}


def command_lines(label: str, words: Sequence[str], width: int | None) -> list[str]:
    """Returns a command in lines of at most this width, as far as its words are not longer, and its label."""
    quoted = [shlex.quote(word) for word in words]
    whole = f"{label}: {' '.join(quoted)}"
    if width is None or len(whole) <= width:
        return [whole]
    lines = [quoted[0]]  # below the label, so that all that is copied is the command
    for word in quoted[1:]:
        if len(lines[-1]) + 1 + len(word) + len(CONTINUED) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"{' ' * 2 * HANGING}{word}")
    return [f"{label}:", *(f"{line}{CONTINUED}" for line in lines[:-1]), lines[-1]]


def _empty(
    columns: Sequence[Column], widths: Sequence[int | None], *, title: str, has_header: bool
) -> rich.table.Table:
    made = rich.table.Table(
        box=None, pad_edge=False, header_style="dim",
        title=Text(visible_line(title), "bold") if title else None, title_justify="left",
        show_header=has_header and any(column.name for column in columns),
    )  # fmt: skip
    for column, width in zip(columns, widths, strict=True):
        made.add_column(
            Text(visible_line(column.name)), justify=column.justify, width=width, min_width=column.min_width,
            no_wrap=column.overflow != "fold",
            overflow="fold" if column.overflow == "fold" else "ellipsis",
        )  # fmt: skip
    return made


def _in_lines(text: Text, width: int) -> list[Text]:
    """Returns the text in lines, broken between words. A word that is wider than a line has its own, whole."""
    found = breaks(text.plain, width, cell_len)
    lines = list(text.divide([place for place, _ in found]))
    for line, is_command in zip(lines, [*(is_command for _, is_command in found), False], strict=True):
        line.rstrip()
        line.append(CONTINUED if is_command else "")
    return lines


def _split(columns: Sequence[Column], rows: Sequence[Sequence[Text]], limit: int) -> tuple[list[int], list[int]]:
    """Returns the columns that have room beside each other with their words whole, and those that go below: texts,
    from the last on. The first column and numbers stay."""
    beside, below = list(range(len(columns))), list[int]()
    least = [_least(column, [row[n] for row in rows]) for n, column in enumerate(columns)]
    texts = [n for n, column in enumerate(columns) if n and column.justify == "left" and column.overflow != "cut"]
    while texts and sum(least[n] for n in beside) + 2 * (len(beside) - 1) > limit:
        below.insert(0, texts.pop())
        beside.remove(below[0])
    return beside, below


def _least(column: Column, cells: Sequence[Text]) -> int:
    """Returns the least width of a column in which no word is cut."""
    words = [len(column.name), column.min_width or 0]
    for cell in cells:
        parts = cell.plain.split() if column.overflow == "fold" else [cell.plain]
        words += [Text(part).cell_len for part in parts]
    return 1 if column.overflow == "cut" else max(words)


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[Text]], limit: int) -> list[int | None]:
    """Returns the widths of columns: the widest of those that may be folded or cut is made narrower, as far as its
    words allow, and the others stay whole. rich would shrink all alike, the short ones to nothing."""
    cells = [[row[n] for row in rows] for n in range(len(columns))]
    widths = [
        max([len(column.name), column.min_width or 0, *(cell.cell_len for cell in each)])
        for column, each in zip(columns, cells, strict=True)
    ]
    least = [
        _least(column, each) if column.overflow != "keep" else width
        for column, each, width in zip(columns, cells, widths, strict=True)
    ]
    while sum(widths) + 2 * (len(columns) - 1) > limit:
        if not (free := [n for n in range(len(columns)) if widths[n] > least[n]]):
            break  # a single word is wider than the terminal, which breaks it
        widths[max(free, key=lambda n: widths[n])] -= 1
    return list(widths)


def _text(line: Part | Line) -> Text:
    text = Text()
    for part in line if isinstance(line, list) else [line]:
        plain, style = part if isinstance(part, tuple) else (part, "")
        text.append(visible_line(plain), style)
    return text
