"""Prices measured operations of GPUs by tables from which they were left out.

    python bench/unseen_operations.py       # mean errors, in Markdown

Each table is made anew from the operations that are left, as `measured_tables` makes it.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from statistics import mean
from typing import Any

import measured_tables
import operations
import yaml
from measured_tables import MIB, Row, group_of, matmul_of, read
from operations import Priced
from pydantic import TypeAdapter

from meshloom.compiler.spec.measured_tables import NamedCollectives, NamedMatmuls, shipped_collectives

OTHER = {"h100": "b200", "b200": "h100", "gb200": "b200"}  # whose table a chip without one would have
TYPES = (("h100", "bfloat16"), ("h100", "float32"), ("b200", "bfloat16"), ("b200", "float32"), ("b200", "float8"))


def _table(kind: Any, lines: Sequence[str]) -> Any:
    """Returns a table of these lines."""
    return TypeAdapter(kind).validate_python(yaml.safe_load("\n".join(["x:", "  source: less", *lines]))["x"])


def _folds(rows: Iterable[Row], fold_of: Callable[[Row], Hashable | None]) -> Iterator[tuple[list[Row], list[Row]]]:
    """Yields the rows that are kept and left out, for each fold; None: always kept."""
    rows = list(rows)
    for fold in dict.fromkeys(fold for row in rows if (fold := fold_of(row)) is not None):
        yield [row for row in rows if fold_of(row) != fold], [row for row in rows if fold_of(row) == fold]


def _between(
    rows: Iterable[Row], value_of: Callable[[Row], int], key_of: Callable[[Row], Hashable]
) -> dict[Hashable, list[int]]:
    """Returns the values of the rows of each key, without the least and the largest."""
    found: dict[Hashable, set[int]] = defaultdict(set)
    for row in rows:
        found[key_of(row)].add(value_of(row))
    return {key: sorted(values)[1:-1] for key, values in found.items()}


def _size(row: Row) -> int:
    return int(row["bytes_of_whole_array"])


def collectives(chip: str, left_out: str) -> list[Priced]:
    """Returns the collectives of a chip from 1 MiB on, each priced without its size, its group, or its chip."""
    measured = [row for row in read("gpu_collectives.csv") if row["chip"] == chip]
    rows = [row for row in measured if _size(row) >= MIB]
    small = [row for row in measured if _size(row) < MIB]
    if left_out == "chip":
        near = [row for row in rows if group_of(row)[1] <= 8]
        return list(operations.collectives(near, shipped_collectives()[OTHER[chip]]))
    if left_out == "size":
        sizes = _between(rows, _size, group_of)

        def fold_of(row: Row) -> Hashable | None:
            own = sizes[group_of(row)]
            return own.index(_size(row)) % 2 if _size(row) in own else None

    else:
        groups = _between(rows, lambda row: group_of(row)[1], lambda row: group_of(row)[::2])

        def fold_of(row: Row) -> Hashable | None:
            kind, near, at_once = group_of(row)
            return (kind, near, at_once) if near in groups[kind, at_once] else None

    found = list[Priced]()
    for kept, out in _folds(rows, fold_of):
        start = [row for row in small if left_out == "size" or fold_of(row) != fold_of(out[0])]
        found += operations.collectives(out, _table(NamedCollectives, measured_tables.collectives(chip, kept + start)))
    return found


def matmuls(chip: str, dtype: str, left_out: str) -> list[Priced]:
    """Returns the matmuls of a chip and a type, each priced without its shape, contracted size, or elements of the
    result."""
    rows = [row for row in read("gpu_matmuls.csv") if row["chip"] == chip and matmul_of(row)[0] == dtype]
    shapes: dict[Hashable, list[str]] = defaultdict(list)
    for row in rows:
        if (shape := _shape(row)) not in shapes[matmul_of(row)]:
            shapes[matmul_of(row)].append(shape)
    place = {"contracted size": 1, "elements of the result": 2}.get(left_out, 0)
    between = sorted({matmul_of(row)[place] for row in rows})[1:-1]

    def fold_of(row: Row) -> Hashable | None:
        if left_out == "shape":
            own = shapes[matmul_of(row)]
            return own.index(_shape(row)) if len(own) > 1 else None
        return matmul_of(row)[place] if matmul_of(row)[place] in between else None

    found = list[Priced]()
    for kept, out in _folds(rows, fold_of):
        found += operations.matmuls(out, _table(NamedMatmuls, measured_tables.matmuls(chip, kept)))
    return found


def _shape(row: Row) -> str:
    return "x".join(row[name] for name in ("batch", "m", "n"))


def collectives_table() -> str:
    """Returns the mean errors of collectives by what their price does without."""
    chips = list(OTHER)
    lines = [f"| left out | {' | '.join(chips)} |", f"|{'---|' * (1 + len(chips))}"]
    for left_out in ("size", "group", "chip"):
        lines.append(f"| {left_out} | {' | '.join(_error(collectives(chip, left_out)) for chip in chips)} |")
    return "\n".join(lines)


def matmuls_table() -> str:
    """Returns the mean errors of matmuls by what their price does without."""
    lines = [f"| left out | {' | '.join(map(' '.join, TYPES))} |", f"|{'---|' * (1 + len(TYPES))}"]
    for left_out in ("shape", "contracted size", "elements of the result"):
        lines.append(f"| {left_out} | {' | '.join(_error(matmuls(*of, left_out)) for of in TYPES)} |")
    return "\n".join(lines)


def _error(found: Sequence[Priced]) -> str:
    return f"{mean(abs(each.error) for each in found):.1%} ({mean(each.error for each in found):+.1%})"


def main() -> None:
    print(f"Collectives, mean (with signs):\n\n{collectives_table()}\n\nMatmuls:\n\n{matmuls_table()}")


if __name__ == "__main__":
    main()
