"""Reads file formats of texts: a function for each yields the texts from number `first` on, in bounded memory.

A null text is an empty one, b"". One place (tokenize.py) decides what becomes of empty texts, for all formats.
"""

import json
from collections.abc import Iterator
from typing import Any

from meshloom.compiler.core.errors import Problem, use_one_of

from .files import SourceFile, UnreadableError, check_is_text, open_text, require

ROWS_AT_ONCE = 256  # of a Parquet file


def text_file(file: SourceFile, first: int) -> Iterator[bytes | Problem]:
    """Yields the one text of a file."""
    if first == 0:
        with open_text(file) as opened:
            text = opened.read()
        check_is_text(text)
        yield text


def jsonl(file: SourceFile, text_key: str, where: str, first: int) -> Iterator[bytes | Problem]:
    """Yields the text under `text_key` of each line that is not blank."""
    number = 0
    with open_text(file) as opened:
        for line_number, line in enumerate(opened, start=1):
            if line.isspace():
                continue
            number += 1
            if number > first:
                yield _text_of_line(line, f"{file.place}:{line_number}", text_key, where)


def object_of_line(line: bytes, place: str) -> dict[str, Any] | Problem:
    """Returns the object of a line of JSON."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        return Problem(place, f"is not JSON: {why}", "write one JSON object per line")
    if not isinstance(value, dict):
        return Problem(place, f"is not a JSON object but {type(value).__name__}", "write one JSON object per line")
    return value


def _text_of_line(line: bytes, place: str, text_key: str, where: str) -> bytes | Problem:
    value = object_of_line(line, place)
    if isinstance(value, Problem):
        return value
    if text_key not in value:
        return Problem(place, f"has no key '{text_key}'", f"set {where}: {use_one_of(text_key, value)}")
    text = value[text_key]
    if text is None:
        return b""
    if not isinstance(text, str):
        return Problem(
            place, f"'{text_key}' is {type(text).__name__}, not text", f"set {where} to a key that holds text"
        )
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        return Problem(place, f"'{text_key}' is not Unicode text: {error.reason}", "write it without lone surrogates")


def parquet(file: SourceFile, text_column: str, where: str, first: int) -> Iterator[bytes | Problem]:
    """Yields the text in `text_column` of each row; `a.b` is a field of a struct. Row groups are skipped without being
    read."""
    pyarrow = require("pyarrow", where, "a Parquet file")
    pq = require("pyarrow.parquet", where, "a Parquet file")
    try:
        with file.open() as opened, pq.ParquetFile(opened) as table:
            path, problem = _column_path(pyarrow, table.schema_arrow, text_column, file.place, where)
            if problem:
                yield problem
                return
            yield from _texts_of_rows(table, path, first, f"{file.place}: column '{text_column}'")
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        what = f"is not a complete Parquet file: {str(error).splitlines()[0]}"
        raise UnreadableError(what, "write it again, or name Parquet files") from error


def _column_path(
    pyarrow: Any, schema: Any, text_column: str, place: str, where: str
) -> tuple[tuple[str, ...], Problem | None]:
    """Returns the names from a column of the table down to its text, and the Problem if it is missing or not text."""
    path = (text_column,) if text_column in schema.names else tuple(text_column.split("."))
    fields, kind = list(schema), None
    for depth, name in enumerate(path):
        field = next((field for field in fields if field.name == name), None)
        if field is None:
            there = [".".join((*path[:depth], other.name)) for other in fields]
            fix = f"set {where}: {use_one_of(text_column, there)}"
            return path, Problem(place, f"has no column '{text_column}'", fix)
        kind = field.type
        fields = list(kind) if pyarrow.types.is_struct(kind) else []
    if kind is not None and pyarrow.types.is_dictionary(kind):  # as pandas writes categories
        kind = kind.value_type
    # A file whose texts are all null may have no type for them.
    if kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.null()):
        return path, None
    fix = f"set {where} to a column of strings"
    if fields:
        fix = f"set {where}: {use_one_of(text_column, [f'{text_column}.{field.name}' for field in fields])}"
    return path, Problem(place, f"its column '{text_column}' is {kind}, not text", fix)


def _texts_of_rows(table: Any, path: tuple[str, ...], first: int, place: str) -> Iterator[bytes | Problem]:
    number = 0
    for group in range(table.num_row_groups):
        num_rows = table.metadata.row_group(group).num_rows
        if number + num_rows <= first:
            number += num_rows
            continue
        for rows in table.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[".".join(path)]):
            values = rows.column(0).slice(max(0, first - number))
            number += len(rows)
            try:
                for value in values.to_pylist():
                    for name in path[1:]:
                        value = value and value[name]
                    yield (value or "").encode()
            except UnicodeDecodeError as error:
                what = f"is not UTF-8: {error.reason}"
                yield Problem(place, what, "write the texts again in UTF-8")
                return


def array_record(file: SourceFile, where: str, first: int) -> Iterator[bytes | Problem]:
    """Yields the bytes of each record, which are text in UTF-8."""
    records = require("array_record.python.array_record_module", where, "an ArrayRecord file")
    if file.path is None:
        raise UnreadableError("is behind a URL, and ArrayRecord files are read from a disk", "copy it to a folder")
    reader, number = None, first
    try:
        reader = records.ArrayRecordReader(str(file.path))
        num_records = reader.num_records()  # 0 also for most files of another kind
        if num_records == 0:
            yield Problem(file.place, "has no ArrayRecord records", "name ArrayRecord files with records in them")
        for start in range(first, num_records, ROWS_AT_ONCE):
            for number, record in enumerate(reader.read(start, min(start + ROWS_AT_ONCE, num_records)), start):
                place, fix = f"{file.place}:{number}", "write records of text in UTF-8"
                try:  # a record may be anything else, such as a serialized message
                    check_is_text(record)
                    record.decode()
                except UnreadableError as error:
                    yield Problem(place, error.what, fix)
                except UnicodeDecodeError as error:
                    yield Problem(place, f"is not UTF-8 at byte {error.start}", fix)
                else:
                    yield record
    except RuntimeError as error:
        what = f"is not a complete ArrayRecord file: {str(error).splitlines()[0]}"
        raise UnreadableError(what, "write it again") from error
    finally:
        if reader is not None and reader.ok():  # closing one that is not raises the reported error again
            reader.close()
