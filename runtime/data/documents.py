"""Documents of each kind of source, as streams: a corpus is a list of parts, and a part is read from any document on.

A document's name decides the split that it is in, so it is the same wherever the corpus lies: the file's path below the
folder that the pattern starts from, and the document's number in the file.
"""

import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshloom.compiler.config.data_spec import (
    JsonlSource,
    OneSource,
    ParquetSource,
    PythonSource,
    TextFilesSource,
)
from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any

from . import formats
from .user_code import load_documents


class Document(NamedTuple):
    """name: decides the split. content: text in UTF-8, or an array of tokens without the end of the document."""

    name: str
    content: bytes | np.ndarray


@dataclass(frozen=True)
class Part:
    """A file of a corpus. read(n): its documents from number n on; a Problem in place of one that cannot be read.

    num_bytes: on disk; 0 where it is no file. is_plain: they are those of its texts, about.
    """

    name: str
    num_bytes: int
    is_plain: bool
    read: Callable[[int], Iterator[Document | Problem]]


def parts_of(source: OneSource, where: str) -> list[Part]:
    """Returns the parts of a corpus in a fixed order. `where`: the key of the source, for messages.

    Raises ConfigError where nothing matches, a file cannot be read, or user code fails.
    """
    if source.kind == "python_stdlib":
        return _python_stdlib()
    if source.kind == "synthetic":
        return [Part("synthetic", 0, False, _synthetic)]
    if source.kind == "python":
        return [_user_documents(source, where)]
    if source.kind == "tokens":
        raise ConfigError([Problem(where, "holds tokens already", "name a source of text")])
    files = find_files(source.paths, f"{where}.paths")
    return [
        Part(name, path.stat().st_size, _is_plain(source, path), partial(_read_file, source, where, path, name))
        for name, path in files
    ]


def find_files(patterns: Sequence[str], where: str) -> list[tuple[str, Path]]:
    """Returns names and paths of the files that match, each once, by name. Raises ConfigError for a pattern without
    any."""
    found: dict[Path, tuple[str, Path]] = {}  # by what a file really is, so that none is taken twice
    problems = []
    for i, pattern in enumerate(patterns):
        root = _root_of(pattern)
        matches = [Path(match) for match in glob(pattern, recursive=True) if Path(match).is_file()]
        for path in matches:
            found.setdefault(path.resolve(), (path.relative_to(root).as_posix(), path))
        if not matches:
            what, fix = f"no file matches '{pattern}'", _what_is_there(root)
            if Path(pattern).is_dir():
                what, fix = f"'{pattern}' is a directory", f"name the files in it: {pattern.rstrip('/')}/**/*"
            problems.append(Problem(f"{where}[{i}]", what, fix))
    raise_if_any(problems)
    return sorted(found.values(), key=lambda file: (file[0], str(file[1])))


def _root_of(pattern: str) -> Path:
    """Returns the folder below which a pattern looks."""
    fixed = []
    for part in Path(pattern).parts[:-1]:
        if has_magic(part):
            break
        fixed.append(part)
    return Path(*fixed)


def _what_is_there(root: Path) -> str:
    there = next(folder for folder in [root, *root.parents, Path()] if folder.is_dir())
    names = sorted(path.name + "/" * path.is_dir() for path in there.iterdir())
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"
    missing = f"there is no folder {root}; " if there != root else ""
    return f"{missing}{'the working directory' if there == Path() else there} holds {shown}"


def _is_plain(source: OneSource, path: Path) -> bool:
    return source.kind in ("text_files", "jsonl") and path.suffix != ".gz"


def num_text_bytes(parts: Sequence[Part]) -> int:
    """Returns the approximate bytes of text in a corpus; 0 if unknown before it is read."""
    return sum(part.num_bytes for part in parts) if all(part.is_plain for part in parts) else 0


def _read_file(source: OneSource, where: str, path: Path, name: str, first: int) -> Iterator[Document | Problem]:
    """Returns the documents of a file from number `first` on, with names; what the system says of it as a Problem."""
    try:
        for number, content in enumerate(_contents(source, where, path, first), start=first):
            one = name if source.kind == "text_files" else f"{name}:{number}"
            yield content if isinstance(content, Problem) else Document(one, content)
    except OSError as error:
        yield Problem(str(path), error.strerror or str(error), "give this process a file that it can read")


def _contents(source: OneSource, where: str, path: Path, first: int) -> Iterable[bytes | Problem]:
    if isinstance(source, TextFilesSource):
        return [path.read_bytes()] if first == 0 else []
    if isinstance(source, JsonlSource):
        return formats.jsonl(path, source.text_key, f"{where}.text_key", first)
    if isinstance(source, ParquetSource):
        return formats.parquet(path, source.text_column, f"{where}.text_column", first)
    return formats.array_record(path, where, first)


def _python_stdlib() -> list[Part]:
    """Returns the source files of the running Python's standard library, without what was installed beside it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*.py"))]
    source = TextFilesSource(kind="text_files", paths=(str(root),))
    return [
        Part(name, (root / name).stat().st_size, True, partial(_read_file, source, "", root / name, name))
        for name in names
        if "site-packages" not in name and "__pycache__" not in name
    ]


def _synthetic(first: int) -> Iterator[Document]:
    """Yields 512 documents of arithmetic statements: learnable, and generated at once."""
    chance = random.Random(0)
    for number in range(512):
        pairs = [(chance.randrange(100), chance.randrange(100)) for _ in range(200)]
        if number >= first:
            yield Document(f"synthetic/{number}", b"".join(b"%d + %d = %d\n" % (a, b, a + b) for a, b in pairs))


def _user_documents(source: PythonSource, where: str) -> Part:
    documents = load_documents(source, where)

    def read(first: int) -> Iterator[Document | Problem]:
        for number in range(first, len(documents)):
            content = documents.document(number)
            yield content if isinstance(content, Problem) else Document(str(number), content)

    return Part(source.object, 0, False, read)
