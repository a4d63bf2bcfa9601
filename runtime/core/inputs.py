"""Opens every file that a user names: by path, pattern or URL, decompressed, as bytes, text or records.

The first bytes of a file decide its kind. Its name only has to agree: a file `a.txt.gz` must be gzip. A record is a
line of JSON lines, or a row of a Parquet file.
"""

import bz2
import codecs
import gzip
import importlib
import io
import itertools
import json
import lzma
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from glob import escape, glob, has_magic
from pathlib import Path, PurePosixPath
from typing import IO, Any

from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any
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
PARQUET = b"PAR1"  # begins a Parquet file
OTHER_FILES = {"a PNG image": b"\x89PNG", "a JPEG image": b"\xff\xd8\xff", "a GIF image": b"GIF8", "a PDF": b"%PDF-",
               "a ZIP archive": b"PK\x03\x04", "a Parquet file": PARQUET, "a program": b"\x7fELF"}  # fmt: skip
DAMAGE = (gzip.BadGzipFile, zlib.error, EOFError, lzma.LZMAError)
LINES_OF_JSON = (".jsonl", ".ndjson", ".json")  # the suffixes of their names
ONE_PER_LINE = "write one JSON object per line"
CONVERT = "leave it out of the paths, or convert it to text in UTF-8"
ROWS = "read its rows by data=parquet, or leave it out of the paths"
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

    @property
    def is_named_json(self) -> bool:
        """Returns True if the name says JSON lines, compressed or not."""
        name = PurePosixPath(self.name)
        return PurePosixPath(name.stem if self.is_compressed else name).suffix in LINES_OF_JSON

    @property
    def is_table(self) -> bool:
        """Returns True for a Parquet file, by its first bytes."""
        with self.open() as opened:
            return opened.read(len(PARQUET)) == PARQUET


def plain_name(name: str) -> str:
    """Returns the name of a file without the suffix of its compression: step.txt.gz -> step.txt."""
    return str(PurePosixPath(name).with_suffix("")) if PurePosixPath(name).suffix in SUFFIXES else name


def find_files(patterns: Sequence[str], where: str) -> list[SourceFile]:
    """Returns the matching files, each once, sorted by name. Raises ConfigError for a pattern without a match."""
    found: dict[str, SourceFile] = {}  # by real path, so that no file is taken twice
    problems = []
    for i, pattern in enumerate(patterns):
        try:
            matches = _matches(pattern)
        except UnreadableError as error:
            problems.append(Problem(f"{where}[{i}]", error.what, error.fix))
            continue
        for file in matches:
            found.setdefault(str(file.path.resolve()) if file.path else file.place, file)
    raise_if_any(problems)
    return sorted(found.values(), key=lambda file: (file.name, file.place))


def find_file(place: str, where: str) -> SourceFile:
    """Returns the file at a path or URL. Raises ConfigError if there is none."""
    try:
        file, *others = _matches(place)
    except UnreadableError as error:
        raise ConfigError([Problem(where, error.what, error.fix)]) from error
    if others:
        raise ConfigError([Problem(where, f"'{place}' matches {1 + len(others)} files", "name one of them")])
    return file


def _matches(pattern: str) -> list[SourceFile]:
    return _behind_url(pattern) if is_url(pattern) else _on_disk(pattern)


def local_file(path: Path, name: str) -> SourceFile:
    """Returns a file of the disk."""
    return SourceFile(name, str(path), path.stat().st_size, path, partial(path.open, "rb"))


@contextmanager
def on_disk(place: str) -> Iterator[Path]:
    """Gives the path of a place within the `with`: a file behind a URL is copied into a temporary folder. Raises
    ConfigError if it cannot be read."""
    if not is_url(place):
        yield Path(place)
        return
    file = find_file(place, place)
    with tempfile.TemporaryDirectory(prefix="meshloom-") as folder:
        path = Path(folder) / PurePosixPath(file.name).name
        try:
            with file.open() as opened, path.open("wb") as copy:
                shutil.copyfileobj(opened, copy)
        except Exception as error:
            raise ConfigError([problem_of_file(error, file)]) from error
        yield path


def bytes_of_file(place: str, where: str, fix: str) -> bytes:
    """Returns the decompressed bytes of the file at a path or URL. Raises ConfigError if it cannot be read."""
    return _whole(place, where, fix, open_bytes)


def text_of_file(place: str, where: str, fix: str) -> str:
    """Returns the text of the file at a path or URL. Raises ConfigError if it cannot be read, or is not text."""
    return _whole(place, where, fix, open_text).decode()


def _whole(place: str, where: str, fix: str, opener: Callable[[SourceFile], Any]) -> bytes:
    file = find_file(place, where)
    try:
        with opener(file) as opened:
            content: bytes = opened.read()
        if opener is open_text:
            content.decode()
        return content
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 at byte {error.start:,}"
    except Exception as error:
        what = problem_of_file(error, file).what
    raise ConfigError([Problem(where, what if where == file.place else f"{file.place} {what}", fix)])


def problem_of_file(error: Exception, file: SourceFile) -> Problem:
    """Returns the Problem of a file that could not be read. Raises any error that does not come from the file."""
    if isinstance(error, ConfigError):
        raise error
    if isinstance(error, UnreadableError):
        return Problem(file.place, error.what, error.fix)
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return Problem(file.place, f"cannot be read: {reason}", "give this process a file that it can read")
    if file.path is not None:
        raise error
    what = f"cannot be read: {type(error).__name__}: {error}".splitlines()[0]  # each kind of store raises its own
    return Problem(file.place, what, "check your access to it; the same command reads it again")


@contextmanager
def open_bytes(file: SourceFile) -> Iterator[IO[bytes]]:
    """Opens a file, decompressed. Raises UnreadableError if it is damaged."""
    kind = None
    try:
        with file.open() as raw:
            head = raw.read(16)
            raw.seek(0)
            kind = _compression(file, head)
            yield _decompressed(raw, kind, file) if kind else raw
    except DAMAGE as error:
        raise UnreadableError(f"is not a complete {kind or 'compressed'} file: {error}", "write it again") from error
    except OSError as error:  # bz2 and pyarrow raise it for damage, without a number
        if error.errno is not None:
            raise
        raise UnreadableError(f"is not a complete {kind or 'compressed'} file: {error}", "write it again") from error


@contextmanager
def open_text(file: SourceFile) -> Iterator[IO[bytes]]:
    """Opens a file as UTF-8 without a byte order mark, decompressed. Raises UnreadableError if it is damaged or not
    text."""
    with open_bytes(file) as opened:
        try:
            yield _as_utf8(opened)
        except UnicodeDecodeError as error:
            raise UnreadableError(f"is not a complete text file: {error}", "write it again") from error


def text_lines(file: SourceFile) -> Iterator[tuple[int, bytes]]:
    """Yields the number of each line that is not blank, and the line as UTF-8. A line ends with a line feed alone: JSON
    and texts may hold the other separators of Unicode."""
    with open_text(file) as opened:
        for number, line in enumerate(opened, start=1):
            if not line.isspace():
                yield number, line


Records = Generator[tuple[str, dict[str, Any] | Problem]]


def json_lines(file: SourceFile, first: int = 0) -> Records:
    """Yields the place and the object of each line of JSON that is not blank, from number `first` on; or its
    Problem."""
    for number, line in itertools.islice(text_lines(file), first, None):
        place = f"{file.place}:{number}"
        yield place, _object_of_line(line, place)


def records(file: SourceFile, where: str, first: int = 0) -> Records:
    """Yields the place and the content of each record from number `first` on: JSON lines, or the rows of a Parquet
    file. where: the key that names the file."""
    yield from table_rows(file, where, first) if file.is_table else json_lines(file, first)


def table_rows(file: SourceFile, where: str, first: int = 0) -> Records:
    """Yields the rows of a Parquet file. Null is taken as absent, since a column has a value in every row."""
    with open_table(file, where) as table:
        for start, rows in batches_of_rows(table, first):
            for number, row in enumerate(rows.to_pylist(), start):
                yield f"{file.place}:{number}", _without_nulls(row)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


@contextmanager
def open_table(file: SourceFile, where: str) -> Iterator[Any]:
    """Opens a Parquet file. Raises UnreadableError if it is damaged."""
    pyarrow = require("pyarrow", where, "a Parquet file")
    parquet = require("pyarrow.parquet", where, "a Parquet file")
    try:
        with file.open() as opened, parquet.ParquetFile(opened) as table:
            yield table
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        what = f"is not a complete Parquet file: {str(error).splitlines()[0]}"
        raise UnreadableError(what, "write it again, or name Parquet files") from error


def batches_of_rows(table: Any, first: int, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Yields rows of a Parquet file from number `first` on with the number of their first one. Row groups before it are
    skipped without being read."""
    number = 0
    for group in range(table.num_row_groups):
        num_rows = table.metadata.row_group(group).num_rows
        if number + num_rows <= first:
            number += num_rows
            continue
        for rows in table.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=columns):
            num_skipped = min(max(0, first - number), len(rows))
            yield number + num_skipped, rows.slice(num_skipped)
            number += len(rows)


def _object_of_line(line: bytes, place: str) -> dict[str, Any] | Problem:
    """Returns the object of a line of JSON."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        fix = "write the file in UTF-8" if isinstance(error, UnicodeDecodeError) else _fix_of(line)
        return Problem(place, f"is not JSON: {why}", fix)
    if not isinstance(value, dict):
        return Problem(place, f"is not a JSON object but {type(value).__name__}", _fix_of(line))
    return value


def _fix_of(line: bytes) -> str:
    return f"{ONE_PER_LINE}: jq -c '.[]' FILE > FILE.jsonl" if line.lstrip().startswith(b"[") else ONE_PER_LINE


def check_is_text(content: bytes) -> None:
    """Raises UnreadableError for bytes that begin like an image, an archive or a table."""
    head = content[:HEAD_BYTES]
    for what, signature in OTHER_FILES.items():
        if head.startswith(signature):
            raise UnreadableError(f"is not text but {what}", ROWS if signature == PARQUET else CONVERT)
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
