"""Reads and writes tables as CSV: a line for each stage, a cell for each tick.

    0F0,0F1,0F2+0B0,0F3+0B1,0B2,0B3
    ,1F0+1B0,1F1+1B1,1F2+1B2,1F3+1B3,

An operation is a virtual stage, a letter and a microbatch. Letters are those of PyTorch's schedule files: F, B for the
whole backward pass, or I for the gradient of the input and W for that of weights; and R, which recomputes. `+` joins
the operations of one tick, in the order in which they run. PyTorch's files have one operation in a cell.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from ..core.errors import ConfigError, Problem
from ..core.format import counted
from .table import (
    PipelineOp,
    PipelineTable,
    PipelineWork,
    Slot,
    StagePlacement,
    TickForm,
    find_violations,
    microbatches,
    pack_ticks,
)

_LETTERS = {
    PipelineOp.FORWARD: "F",
    PipelineOp.RECOMPUTE: "R",
    PipelineOp.BACKWARD: "B",
    PipelineOp.INPUT_GRADIENT: "I",
    PipelineOp.WEIGHT_GRADIENT: "W",
}
_OPS = {letter: op for op, letter in _LETTERS.items()}
_CELL = re.compile(r"(\d{1,6})([FRBIW])(\d{1,6})", re.ASCII)
MOST_NAMED = 20
FIX_CELL = "write a virtual stage, one of F R B I W, and a microbatch, as in 0F3; join those of one tick with +"
FIX_TABLE = "let each operation run once, after what it needs"


@dataclass(frozen=True)
class _Line:
    """A stage of a file: the operations of each tick. number: of the line."""

    number: int
    ticks: tuple[tuple[PipelineWork, ...], ...]

    @property
    def works(self) -> Iterator[tuple[int, PipelineWork]]:
        return ((tick, work) for tick, works in enumerate(self.ticks) for work in works)


def read_table(path: Path, form: TickForm | None = None) -> PipelineTable:
    """Returns the table of a file. Raises ConfigError with all that is wrong with it, by line and tick. form: cells are
    in the order of their stage, and are put into ticks of this form; None: each cell is the tick that it says."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError([Problem(str(path), f"the schedule cannot be read: {why}", "write it as CSV")]) from error
    return parse_table(text, str(path), path.stem, form)


def parse_table(text: str, where: str, name: str, form: TickForm | None = None) -> PipelineTable:
    """Returns the table of a file's text. where: the place of problems. form: as of `read_table`."""
    lines = _lines_of(text, where)
    placement = _placement(lines, where)
    num_microbatches = _num_microbatches(lines, where)
    orders = [
        [[Slot(work.op, placement.chunk(work.virtual), work.microbatch) for work in works] for works in line.ticks]
        for line in lines
    ]
    if form is None:
        rows = tuple(tuple(map(tuple, row)) for row in zip_longest(*orders, fillvalue=()))
        table = PipelineTable(name, placement, num_microbatches, rows)
    else:
        try:
            table = pack_ticks(name, placement, [list(chain.from_iterable(ticks)) for ticks in orders], form)
        except ValueError as error:
            raise ConfigError([Problem(where, str(error), FIX_TABLE)]) from error
    problems = list[Problem]()
    for each in find_violations(table):
        tick = "" if each.tick is None or form is not None else f", tick {each.tick}"
        place = _at(where, lines[each.stage].number) + tick
        problems.append(Problem(place, f"stage {each.stage}: {each.what}", FIX_TABLE))
    raise_first(problems)
    return table


def _lines_of(text: str, where: str) -> list[_Line]:
    lines, problems = list[_Line](), list[Problem]()
    for number, line in enumerate(text.splitlines(), start=1):
        cells, place = line.split(","), _at(where, number)
        if any(cell.strip() for cell in cells):
            ticks = [tuple(_cell(cell.strip(), f"{place}, tick {tick}", problems)) for tick, cell in enumerate(cells)]
            lines.append(_Line(number, tuple(ticks)))
    if not lines:
        problems.append(Problem(where, "the schedule has no line", "write a line for each stage"))
    raise_first(problems)
    return _with_split_backward(lines)


def write_table(table: PipelineTable) -> str:
    """Returns a table as the text of a file."""
    lines = []
    for stage in range(table.placement.num_stages):
        cells = ("+".join(_of_work(table.work(stage, slot)) for slot in row[stage]) for row in table.rows)
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


def _of_work(work: PipelineWork) -> str:
    return f"{work.virtual}{_LETTERS[work.op]}{work.microbatch}"


def _at(where: str, line: int) -> str:
    return f"{where}, line {line}"


def raise_first(problems: list[Problem]) -> None:
    """Raises ConfigError with the first problems of a schedule, if it has any, and the number of the others."""
    if more := problems[MOST_NAMED:]:
        what = f"{counted(len(more), 'other problem')} of the same schedule"
        problems = [*problems[:MOST_NAMED], Problem(more[0].where, what, "mend the first ones, and read it again")]
    if problems:
        raise ConfigError(problems)


def _cell(cell: str, where: str, problems: list[Problem]) -> Iterator[PipelineWork]:
    for text in cell.split("+") if cell else ():
        if (parts := _CELL.fullmatch(text.strip())) is None:
            problems.append(Problem(where, f"'{text.strip()[:40]}' is not an operation", FIX_CELL))
        else:
            yield PipelineWork(_OPS[parts[2]], int(parts[1]), int(parts[3]))


def _with_split_backward(lines: list[_Line]) -> list[_Line]:
    """Returns the lines with B as I and W if any of them has these: a table has either."""
    parts = {PipelineOp.BACKWARD: (PipelineOp.INPUT_GRADIENT, PipelineOp.WEIGHT_GRADIENT)}
    if not any(work.op in parts[PipelineOp.BACKWARD] for line in lines for _, work in line.works):
        return lines

    def split(works: tuple[PipelineWork, ...]) -> tuple[PipelineWork, ...]:
        return tuple(
            PipelineWork(op, work.virtual, work.microbatch) for work in works for op in parts.get(work.op, (work.op,))
        )

    return [_Line(line.number, tuple(map(split, line.ticks))) for line in lines]


def _placement(lines: list[_Line], where: str) -> StagePlacement:
    """Returns the placement that all lines follow: a loop or a V."""
    num_stages, num_works = len(lines), sum(1 for line in lines for _ in line.works)
    num_virtual = 1 + max(work.virtual for line in lines for _, work in line.works)
    if num_virtual > num_works or num_virtual % num_stages:
        what = f"the virtual stages are 0 to {num_virtual - 1}, on {counted(num_stages, 'line')}"
        fix = f"give each line as many virtual stages: {num_stages}, {2 * num_stages}, .. in all"
        raise ConfigError([Problem(where, what, fix)])
    kinds = [StagePlacement(num_stages, num_virtual // num_stages, is_v) for is_v in (False, True)]
    wrong = {kind: list(_misplaced(lines, kind, where)) for kind in kinds}
    best = min(kinds, key=lambda kind: len(wrong[kind]))
    raise_first(wrong[best])
    return best


def _misplaced(lines: list[_Line], placement: StagePlacement, where: str) -> Iterator[Problem]:
    shape = "in a V" if placement.is_v else "one after the other"
    for stage, line in enumerate(lines):
        for tick, work in line.works:
            if (right := placement.stage(work.virtual)) != stage:
                what = f"{_of_work(work)}: virtual stage {work.virtual} is on another line than the others, {shape}"
                fix = f"move it to line {lines[right].number}"
                yield Problem(f"{_at(where, line.number)}, tick {tick}", what, fix)


def _num_microbatches(lines: list[_Line], where: str) -> int:
    """Returns the number of microbatches, which cannot be more than the forward operations of a virtual stage."""
    last, line, tick = max(
        ((work.microbatch, line.number, tick) for line in lines for tick, work in line.works), key=lambda each: each[0]
    )
    forward = sum(work.op == PipelineOp.FORWARD for line in lines for _, work in line.works)
    if last >= forward:
        there = counted(forward, "forward operation")
        what = f"microbatch {last} is the last of {microbatches(last + 1)}, and the schedule has {there}"
        fix = "count microbatches from 0, without gaps"
        raise ConfigError([Problem(f"{_at(where, line)}, tick {tick}", what, fix)])
    return last + 1
