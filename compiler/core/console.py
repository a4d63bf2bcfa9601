"""Shows values on a terminal. No other module imports rich.

Callers pass plain text with an optional style: `console.line("on ", (name, "bold"))`. Markup is not interpreted, so a
value cannot inject any, and control characters are shown as escapes (visible.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

import rich.console
import rich.progress
import rich.table
from rich.text import Text

from .visible import visible_line

Part = str | tuple[str, str]  # plain text, or (text, style)
Line = list[Part]
BarColumn = Literal["spinner", "doing", "count", "bar", "numbers", "bytes", "bytes_per_second", "elapsed", "left"]

HANGING, LEAST_WIDTH = 2, 20  # columns: of what follows a first line, and of a line on the narrowest terminal


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
        """Prints one line, which a terminal gets between words, what follows the first line indented below it."""
        text = _text(list(parts))
        indent = len(text.plain) - len(text.plain.lstrip()) + HANGING
        if not self.is_terminal or text.cell_len <= self.width:
            self.line(*parts)
            return
        first, *rest = text.wrap(self._rich, max(self.width - indent, LEAST_WIDTH))
        self._rich.print(first, soft_wrap=True)
        for each in rest:
            self._rich.print(Text(" " * indent) + each, soft_wrap=True)

    def table(self, table: Table, *, width: int | None = None) -> None:
        """Prints a table without borders, below its title."""
        made = rich.table.Table(
            box=None, pad_edge=False, header_style="dim",
            title=Text(visible_line(table.title), "bold") if table.title else None, title_justify="left",
            show_header=any(column.name for column in table.columns),
        )  # fmt: skip
        rows = [[_text(cell) for cell in row] for row in table.rows]
        widths = _widths(table.columns, rows, min(width or self.width, self.width))
        for column, least in zip(table.columns, widths, strict=True):
            made.add_column(
                Text(visible_line(column.name)), justify=column.justify, width=least, min_width=column.min_width,
                no_wrap=column.overflow != "fold",
                overflow="fold" if column.overflow == "fold" else "ellipsis",
            )  # fmt: skip
        for row in rows:
            made.add_row(*row)
        self._rich.print(made, width=width)

    def bar(self, doing: str, *columns: BarColumn, is_transient: bool = False) -> "Bar":
        """Returns a progress bar on a terminal, nothing elsewhere."""
        made = [_BAR_COLUMNS[name]() for name in columns]
        progress = rich.progress.Progress(
            *made, console=self._rich, disable=not self.is_terminal, transient=is_transient
        )
        return Bar(progress, doing)


class Bar:
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


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[Text]], limit: int) -> list[int | None]:
    """Widths of columns, some of which are to be cut: the widest of these is cut and the others stay whole. rich would
    shrink all of them alike, the short ones to nothing. None: rich's own width, which wraps columns that fold."""
    cut = [n for n, column in enumerate(columns) if column.overflow == "cut"]
    if not cut or any(column.overflow == "fold" for column in columns):
        return [None] * len(columns)
    widths = [
        max([len(column.name), column.min_width or 0, *(row[n].cell_len for row in rows)])
        for n, column in enumerate(columns)
    ]
    while sum(widths) + 2 * (len(columns) - 1) > limit and any(widths[n] > 1 for n in cut):
        widths[max(cut, key=lambda n: widths[n])] -= 1
    return list(widths)


def _text(line: Part | Line) -> Text:
    text = Text()
    for part in line if isinstance(line, list) else [line]:
        plain, style = part if isinstance(part, tuple) else (part, "")
        text.append(visible_line(plain), style)
    return text
