"""A sweep's rows as a flat table in a file, CSV or Parquet: a column for each field, named as in sweep.jsonl."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshloom.compiler.core.errors import ConfigError, Problem

from ..core.files import replace_bytes
from .rows import Figures, Row


def flat_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns each row with its parts beside it: {"figures": {"mfu": 0.4}} is the column "figures.mfu". All have the
    same columns, with None for what a row lacks; lists are JSON."""
    keys = list(dict.fromkeys(key for row in rows for key in row.swept))
    made = []
    for row in rows:
        plain = row.model_dump(exclude={"swept", "figures", "overrides"})
        swept = {f"swept.{key}": _plain(row.swept.get(key)) for key in keys}
        figures = row.figures.model_dump() if row.figures else {}
        parts = {f"figures.{name}": figures.get(name) for name in Figures.model_fields}
        made.append({"index": row.index, "overrides": json.dumps(row.overrides)} | plain | swept | parts)
    return made


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Writes CSV with a heading; None is an empty field. Raises ConfigError where the file cannot be written."""
    flat = flat_rows(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(flat[0]) if flat else list(Row.model_fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    write_file(path, text.getvalue().encode(), flag="--csv")


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Writes Parquet with typed columns; a swept key whose values are of several types is text, as JSON.

    Raises ConfigError where pyarrow is missing, or the file cannot be written.
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
    """Writes a file whole. Raises ConfigError where the system refuses it."""
    try:
        replace_bytes(path, content)
    except OSError as error:
        fix = f"name a file that can be written: {flag} FILE"
        raise ConfigError([Problem(str(path), f"cannot be written: {error.strerror}", fix)]) from None


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)


def _one_type(values: list[Any]) -> list[Any]:
    """Returns the values as they are where one type holds all of them, whole numbers beside others being such."""
    types = {type(value) for value in values if value is not None}
    if types == {int, float}:
        return [None if value is None else float(value) for value in values]
    if len(types) > 1 or any(isinstance(value, int) and abs(value) >= 2**63 for value in values):
        return [None if value is None else json.dumps(value) for value in values]
    return values
