"""Finds the files of a corpus by path, pattern or URL, opens them as UTF-8 text, decompressed, and reads their formats.

The first bytes of a file decide its kind. Its name only has to agree: a file `a.txt.gz` must be gzip. A function for
each format yields the texts from number `first` on, in bounded memory. A null text is an empty one, b"": one place
(tokenize.py) decides what becomes of empty texts, for all formats.
"""

import bz2
import codecs
import gzip
import importlib
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from glob import escape, glob, has_magic
from pathlib import Path, PurePosixPath
from typing import IO, Any

from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any, use_one_of
from meshloom.compiler.core.places import is_url

HEAD_BYTES = 8192  # that distinguish text from other files; Git looks at the first 8,000
MOST_CONTROLS = 0.02  # share of control characters in the head: text has hardly any
CONTROLS = bytes(set(range(0x20)) - set(b"\a\b\t\n\v\f\r\x1b")) + b"\x7f"  # never text for the command `file`
COMPRESSIONS = {  # by the first bytes of a file: RFC 1952, bzip2, xz, RFC 8878, LZ4 frames
    "gzip": rb"\x1f\x8b",
    "bzip2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",
    "xz": rb"\xfd7zXZ\0",
    "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
    "lz4": rb"\x04\x22\x4d\x18",
}
SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd", ".zstd": "zstd", ".lz4": "lz4"}
ENCODINGS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
             (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))  # fmt: skip
OTHER_FILES = {"a PNG image": b"\x89PNG", "a JPEG image": b"\xff\xd8\xff", "a GIF image": b"GIF8", "a PDF": b"%PDF-",
               "a ZIP archive": b"PK\x03\x04", "a Parquet file": b"PAR1", "a program": b"\x7fELF"}  # fmt: skip
DAMAGE = (gzip.BadGzipFile, zlib.error, EOFError, lzma.LZMAError)
CONVERT = "leave it out of the paths, or convert it to text in UTF-8"
ROWS_AT_ONCE = 256  # of a Parquet file


class UnreadableError(Exception):
    """A file or record does not hold text. what, fix: as in a Problem."""

    def __init__(self, what: str, fix: str = CONVERT):
        super().__init__(what)
        self.what, self.fix = what, fix


@dataclass(frozen=True)
class SourceFile:
    """A file of a corpus. name: its path below the folder in which the pattern starts. place: its path or URL, for
    messages. path: None behind a URL. open: opens its bytes, unchanged."""

    name: str
    place: str
    num_bytes: int
    path: Path | None
    open: Callable[[], IO[bytes]]

    @property
    def is_compressed(self) -> bool:
        """Returns True if the name has the suffix of a compressed file."""
        return PurePosixPath(self.name).suffix in SUFFIXES


def find_files(patterns: Sequence[str], where: str) -> list[SourceFile]:
    """Returns the matching files, each once, sorted by name. Raises ConfigError for a pattern without a match."""
    found: dict[str, SourceFile] = {}  # by real path, so that no file is taken twice
    problems = []
    for i, pattern in enumerate(patterns):
        try:
            matches = _behind_url(pattern) if is_url(pattern) else _on_disk(pattern)
        except UnreadableError as error:
            problems.append(Problem(f"{where}[{i}]", error.what, error.fix))
            continue
        for file in matches:
            found.setdefault(str(file.path.resolve()) if file.path else file.place, file)
    raise_if_any(problems)
    return sorted(found.values(), key=lambda file: (file.name, file.place))


def local_file(path: Path, name: str) -> SourceFile:
    """Returns a file of the disk."""
    return SourceFile(name, str(path), path.stat().st_size, path, partial(path.open, "rb"))


@contextmanager
def open_text(file: SourceFile) -> Iterator[IO[bytes]]:
    """Opens a file as UTF-8 without a byte order mark, decompressed. Raises UnreadableError if it is damaged or not
    text."""
    kind = "compressed"
    try:
        with file.open() as raw:
            head = raw.read(16)
            raw.seek(0)
            kind = _compression(file, head)
            yield _as_utf8(_decompressed(raw, kind, file) if kind else raw)
    except (*DAMAGE, UnicodeDecodeError) as error:
        raise UnreadableError(f"is not a complete {kind or 'text'} file: {error}", "write it again") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise UnreadableError(f"is not a complete {kind} file: {error}", "write it again") from error


def check_is_text(content: bytes) -> None:
    """Raises UnreadableError for bytes that begin like an image, an archive or a table."""
    head = content[:HEAD_BYTES]
    for what, signature in OTHER_FILES.items():
        if head.startswith(signature):
            raise UnreadableError(f"is not text but {what}")
    if b"\0" in content:
        hint = "; UTF-16 needs a byte order mark" if head.count(0) > len(head) / 4 else ""
        raise UnreadableError(f"is not text: byte {content.index(0):,} is NUL{hint}")
    if len(head) - len(head.translate(None, CONTROLS)) > MOST_CONTROLS * len(head):
        raise UnreadableError("is not text: it is full of control characters")


def _compression(file: SourceFile, head: bytes) -> str | None:
    kind = next((kind for kind, pattern in COMPRESSIONS.items() if re.match(pattern, head, re.S)), None)
    promised = SUFFIXES.get(PurePosixPath(file.name).suffix)
    if promised and kind != promised:
        raise UnreadableError(f"is not a {promised} file, as its name says", "write it again, or rename it")
    return kind


def _decompressed(raw: IO[bytes], kind: str, file: SourceFile) -> IO[bytes]:
    if kind in ("zstd", "lz4"):
        pyarrow = require("pyarrow", file.place, f"a {kind} file")
        return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), kind)
    openers: dict[str, Callable[..., Any]] = {"gzip": gzip.GzipFile, "bzip2": bz2.BZ2File, "xz": lzma.LZMAFile}
    return openers["gzip"](fileobj=raw) if kind == "gzip" else openers[kind](raw)


def _as_utf8(file: Any) -> IO[bytes]:
    """Returns the same text in UTF-8, without its byte order mark. Raises UnreadableError if it does not begin like
    text."""
    buffered = io.BufferedReader(file, HEAD_BYTES)
    head = buffered.peek(HEAD_BYTES)[:HEAD_BYTES]
    mark, encoding = next(((mark, name) for mark, name in ENCODINGS if head.startswith(mark)), (b"", "utf-8"))
    if encoding != "utf-8":
        return io.BufferedReader(_Recoded(io.TextIOWrapper(buffered, encoding, newline="")), HEAD_BYTES)
    buffered.read(len(mark))
    check_is_text(head[len(mark) :])
    return buffered


class _Recoded(io.RawIOBase):
    """A stream of UTF-8 bytes from text in another encoding."""

    def __init__(self, text: io.TextIOWrapper):
        self._text, self._rest = text, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or self._text.read(len(buffer)).encode()
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _on_disk(pattern: str) -> list[SourceFile]:
    """Returns the files of a path or pattern. An existing file with the very name of the pattern, such as `[a].txt`, is
    that file."""
    root, rest = Path(), list(Path(pattern).parts)
    while rest and ((root / rest[0]).exists() or not has_magic(rest[0])):
        root /= rest.pop(0)
    folder = root if rest else root.parent
    matches = map(Path, glob(str(Path(escape(str(root)), *rest)), recursive=True))
    files = [path for path in matches if path.is_file()]
    if not files:
        if Path(pattern).is_dir():
            fix = f"name the files in it: {pattern.rstrip('/')}/**/*"
            raise UnreadableError(f"'{pattern}' is a directory", fix)
        if os.path.lexists(pattern):
            what = "a pipe or a device" if os.path.exists(pattern) else "a link that leads to no file"
            raise UnreadableError(f"'{pattern}' is {what}", "name files that lie on a disk")
        raise UnreadableError(f"no file matches '{pattern}'", _what_is_there(folder))
    return [local_file(path, path.relative_to(folder).as_posix()) for path in files]


def _what_is_there(root: Path) -> str:
    there = next(folder for folder in [root, *root.parents, Path()] if folder.is_dir())
    names = sorted(path.name + "/" * path.is_dir() for path in there.iterdir())
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"
    missing = f"there is no folder {root}; " if there != root else ""
    return f"{missing}{'the working directory' if there == Path() else there} holds {shown}"


def _behind_url(pattern: str) -> list[SourceFile]:
    """Returns the files of a URL, or of a pattern of URLs, by fsspec: gs://, s3://, https:// and others."""
    fsspec = require("fsspec", pattern, "a URL")
    try:
        system, place = fsspec.core.url_to_fs(pattern)
        infos = {place: system.info(place)} if system.isfile(place) else system.glob(place, detail=True)
        files = {name: info for name, info in infos.items() if info["type"] == "file"}
    except ImportError as error:
        raise UnreadableError(f"'{pattern}' needs a package that is not installed", f"{error}") from error
    except Exception as error:  # each kind of store raises its own
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UnreadableError(f"'{pattern}' cannot be read: {why}", "check the URL and your access to it") from error
    if not files:
        raise UnreadableError(f"no file matches '{pattern}'", "name files, or a pattern of them: gs://bucket/**/*.txt")
    fixed = place if place in files else re.split(r"[*?\[]", place)[0]
    folder = fixed.rpartition("/")[0]
    return [
        SourceFile(
            name.removeprefix(folder).lstrip("/"),
            system.unstrip_protocol(name),
            info.get("size") or 0,
            None,
            partial(system.open, name, "rb"),
        )
        for name, info in files.items()
    ]


def require(module: str, where: str, what_for: str) -> Any:
    """Returns the module of an optional package. Raises ConfigError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise
        what = f"{what_for} needs the package {error.name}, which is not installed"
        raise ConfigError([Problem(where, what, "pip install 'meshloom[data]'")]) from error


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
