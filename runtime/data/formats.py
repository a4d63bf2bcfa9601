"""Reads the texts of each format of a corpus.

Each function yields the texts from number `first` on, in bounded memory. A null text is an empty one, b"": one place
(tokenize.py) decides what becomes of empty texts, for all formats.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from meshloom.compiler.core.errors import Problem, use_one_of

from ..core.inputs import (
    ROWS_AT_ONCE,
    SourceFile,
    UnreadableError,
    batches_of_rows,
    check_is_text,
    json_lines,
    open_table,
    open_text,
    require,
)


def text_file(file: SourceFile, first: int) -> Iterator[bytes | Problem]:
    """Yields the one text of a file."""
    if first == 0:
        with open_text(file) as opened:
            text = opened.read()
        check_is_text(text)
        yield text


def jsonl(file: SourceFile, text_key: str, where: str, first: int) -> Iterator[bytes | Problem]:
    """Yields the text under `text_key` of each line that is not blank; `a.b` is a key of an object."""
    for place, value in json_lines(file, first):
        yield value if isinstance(value, Problem) else _text_at(value, text_key, place, where)


def _text_at(value: Mapping[str, Any], text_key: str, place: str, where: str) -> bytes | Problem:
    path = (text_key,) if text_key in value else tuple(text_key.split("."))
    found: Any = value
    for depth, name in enumerate(path):
        if depth and found is None:  # an object that is null has no text
            return b""
        if not isinstance(found, dict) or name not in found:
            there = ".".join(path[:depth])
            known = [*found] if isinstance(found, dict) else []
            fix = use_one_of(text_key, [f"{there}.{key}" if there else key for key in known] or [there])
            return Problem(place, f"has no key '{text_key}'", f"set {where}: {fix}")
        found = found[name]
    if found is None:
        return b""
    if not isinstance(found, str):
        fix = f"set {where} to a key that holds text"
        if isinstance(found, dict) and found:
            fix = f"set {where}: {use_one_of(text_key, [f'{text_key}.{key}' for key in found])}"
        return Problem(place, f"'{text_key}' is {type(found).__name__}, not text", fix)
    try:
        return found.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        return Problem(place, f"'{text_key}' is not Unicode text: {error.reason}", "write it without lone surrogates")


def parquet(file: SourceFile, text_column: str, where: str, first: int) -> Iterator[bytes | Problem]:
    """Yields the text in `text_column` of each row; `a.b` is a field of a struct."""
    with open_table(file, where) as table:
        pyarrow = require("pyarrow", where, "a Parquet file")
        path, problem = _column_path(pyarrow, table.schema_arrow, text_column, file.place, where)
        if problem:
            yield problem
            return
        yield from _texts_of_rows(table, path, first, f"{file.place}: column '{text_column}'")


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
    for _, rows in batches_of_rows(table, first, columns=[".".join(path)]):
        try:
            for value in rows.column(0).to_pylist():
                for name in path[1:]:
                    value = value and value[name]
                yield (value or "").encode()
        except UnicodeDecodeError as error:
            yield Problem(place, f"is not UTF-8: {error.reason}", "write the texts again in UTF-8")
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
