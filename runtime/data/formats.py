"""File formats that hold texts: each a function of a file to its texts from number `first` on, in bounded memory."""

import gzip
import importlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshloom.compiler.core.errors import ConfigError, Problem, use_one_of

ROWS_AT_ONCE = 256  # of a Parquet file


def require(module: str, where: str, what_for: str) -> Any:
    """Returns an optional dependency. Raises ConfigError with the line that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise
        what = f"{what_for} needs the package {error.name}, which is not installed"
        raise ConfigError([Problem(where, what, "pip install 'meshloom[data]'")]) from error


def jsonl(path: Path, text_key: str, where: str, first: int) -> Iterator[bytes | Problem]:
    """Returns the text under `text_key` of each line; blank lines are none."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        number = 0
        try:
            for line_number, line in enumerate(file, start=1):
                if line.isspace():
                    continue
                number += 1
                if number > first:
                    yield _text_of_line(line, f"{path}:{line_number}", text_key, where)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            yield Problem(str(path), f"is not a complete gzip file: {error}", "write it again")


def _text_of_line(line: bytes, place: str, text_key: str, where: str) -> bytes | Problem:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        return Problem(place, f"is not JSON: {why}", "write one JSON object per line")
    if not isinstance(value, dict):
        return Problem(place, f"is not a JSON object but {type(value).__name__}", "write one JSON object per line")
    if text_key not in value:
        return Problem(place, f"has no key '{text_key}'", f"set {where}: {use_one_of(text_key, value)}")
    text = value[text_key]
    if not isinstance(text, str):
        return Problem(
            place, f"'{text_key}' is {type(text).__name__}, not text", f"set {where} to a key that holds text"
        )
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        return Problem(place, f"'{text_key}' is not Unicode text: {error.reason}", "write it without lone surrogates")


def parquet(path: Path, text_column: str, where: str, first: int) -> Iterator[bytes | Problem]:
    """Returns the text in `text_column` of each row; a row group is skipped without being read."""
    pyarrow = require("pyarrow", where, "a Parquet file")
    pq = require("pyarrow.parquet", where, "a Parquet file")
    try:
        file = pq.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        yield Problem(str(path), f"is not a Parquet file: {str(error).splitlines()[0]}", "name Parquet files")
        return
    with file:
        names = file.schema_arrow.names
        if text_column not in names:
            yield Problem(str(path), f"has no column '{text_column}'", f"set {where}: {use_one_of(text_column, names)}")
            return
        kind = file.schema_arrow.field(text_column).type
        if kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
            what = f"its column '{text_column}' is {kind}, not text"
            yield Problem(str(path), what, f"set {where} to a column of strings")
            return
        yield from _texts_of_rows(file, text_column, first)


def _texts_of_rows(file: Any, text_column: str, first: int) -> Iterator[bytes]:
    number = 0
    for group in range(file.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        if number + num_rows > first:
            for rows in file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[text_column]):
                texts = rows.column(0).slice(max(0, first - number)) if number < first else rows.column(0)
                yield from ((text or "").encode() for text in texts.to_pylist())
                number += len(rows)
        else:
            number += num_rows


def array_record(path: Path, where: str, first: int) -> Iterator[bytes | Problem]:
    """Returns the bytes of each record."""
    records = require("array_record.python.array_record_module", where, "an ArrayRecord file")
    reader = None
    try:
        reader = records.ArrayRecordReader(str(path))
        num_records = reader.num_records()  # 0 also for most files of another kind
        if num_records == 0:
            yield Problem(str(path), "has no ArrayRecord records", "name ArrayRecord files with records in them")
        for start in range(first, num_records, ROWS_AT_ONCE):
            yield from reader.read(start, min(start + ROWS_AT_ONCE, num_records))
    except RuntimeError as error:
        yield Problem(str(path), f"is not a complete ArrayRecord file: {str(error).splitlines()[0]}", "write it again")
    finally:
        if reader is not None and reader.ok():  # closing one that is not raises what was told already
            reader.close()
