"""Reads documents of each kind of source as streams: a corpus is a list of parts, readable from any document on.

A document's name decides its split, so it does not depend on where the corpus is: it is the file's path below the
folder in which the pattern starts, and the document's number in the file.

A class of the user is a source, too: its name and arguments are checked, and its errors are reported with the place.
"""

import codecs
import inspect
import random
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any, use_one_of
from meshloom.compiler.core.user_code import load_class, problem_in_user_code
from meshloom.compiler.declare.data_spec import (
    ChatsSource,
    JsonlSource,
    OneSource,
    ParquetSource,
    PythonSource,
    TextFilesSource,
)

from ..core.inputs import SourceFile, find_files, local_file, problem_of_file
from .chat_template import Chat
from .chats import ChatReader, chat_reader
from .formats import array_record, jsonl, parquet, text_file
from .tokenizers import Tokenizer


class DataSource(ABC):
    """The base of a user's data source: items that are read by number. docs/data.md defines items, docs/extend.md shows
    a source.

    A declaration may only name classes that derive from this one: a name in a config file is not enough to call a
    function, or to create an object of another kind.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of items."""

    @abstractmethod
    def __getitem__(self, index: int) -> Any:
        """Returns item number `index`, from 0 to len - 1. Several threads may call it at once."""


class UserItems:
    """The user's object. Errors of its code are ConfigErrors with the index and the place in the code."""

    def __init__(self, items: Any, source: PythonSource, where: str):
        self._items, self._source, self._where = items, source, where
        self._length = _call(lambda: len(items), f"{where}.object", f"len() of {source.object}")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return _call(lambda: self._items[index], f"{self._where}.object", f"{self._source.object}[{index}]")

    def problem(self, index: int, what: str, fix: str) -> Problem:
        """Returns the problem of an item."""
        return Problem(f"{self._where}.object", f"{self._source.object}[{index}] {what}", fix)


def load_items(source: PythonSource, where: str) -> UserItems:
    """Returns an instance of the user's class. Raises ConfigError with the problems of class, arguments or code."""
    cls: Any = load_class(source.object, f"{where}.object", DataSource)
    if missing := sorted(cls.__abstractmethods__):
        what = f"{source.object} has no {' and no '.join(missing)}"
        raise ConfigError([Problem(f"{where}.object", what, "define it: a source is read by number")])
    parameters, problems, key = inspect.signature(cls).parameters, list[Problem](), f"{where}.arguments"
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        known = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for name in (name for name in source.arguments if name not in known):
            fix = use_one_of(name, known) if known else f"{source.object} takes none"
            problems.append(Problem(f"{key}.{name}", f"{source.object} has no such argument", fix))
    for name, each in parameters.items():
        is_needed = each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        if is_needed and name not in source.arguments:
            problems.append(Problem(f"{key}.{name}", f"{source.object} needs it", f"set {key}.{name}=..."))
    raise_if_any(problems)
    items = _call(lambda: cls(**source.arguments), f"{where}.object", f"{source.object}(...)")
    return UserItems(items, source, where)


class UserDocuments:
    """The user's items as documents: text (str, or bytes in UTF-8), or an array of tokens."""

    def __init__(self, items: UserItems):
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def document(self, index: int) -> bytes | np.ndarray | Problem:
        """Returns document number `index`, or its problem."""
        try:
            item = self._items[index]
        except ConfigError as error:
            return error.problems[0]
        if isinstance(item, bytes | str):
            return item if isinstance(item, bytes) else item.encode()
        tokens = as_tokens(item)
        if tokens is None:
            what, fix = f"is a {type(item).__name__}", "return text (str or bytes), or a sequence of token numbers"
            return self._items.problem(index, what, fix)
        return tokens


def load_documents(source: PythonSource, where: str) -> UserDocuments:
    """Returns the user's documents. Raises ConfigError like `load_items`, and if the items are declared as
    sequences."""
    if source.items != "documents":
        what = "sequences are ready as they are; only documents are tokenised and packed"
        raise ConfigError([Problem(f"{where}.items", what, f"set {where}.items=documents")])
    return UserDocuments(load_items(source, where))


def as_tokens(item: Any) -> np.ndarray | None:
    """Returns an item as a one-dimensional int64 array of tokens; None if it is not one."""
    if isinstance(item, str | bytes | dict):
        return None
    try:
        tokens = np.asarray(item)
    except (TypeError, ValueError):
        return None
    is_right = tokens.ndim == 1 and (tokens.size == 0 or (tokens.dtype.kind in "iu" and tokens.min() >= 0))
    return tokens.astype(np.int64) if is_right else None


def _call(call: Callable[[], Any], where: str, what: str) -> Any:
    """Returns the result of a call of user code. Raises ConfigError with the place of its exception."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise ConfigError([problem_in_user_code(where, what, error)]) from error


class Document(NamedTuple):
    """A document. name: decides its split. content: text in UTF-8, an array of tokens without the end of the document,
    or a chat; if it is empty, the document is counted and left out. A chat with nothing to learn is b""."""

    name: str
    content: bytes | np.ndarray | Chat


@dataclass(frozen=True)
class CorpusPart:
    """A file of a corpus. read(n): yields its documents from number n on, and a Problem for one that cannot be read.

    num_bytes: the size of the file; 0 if it is not a file. is_plain: that is about the size of its texts. chats: what
    reads its chats, the same for all parts.
    """

    name: str
    num_bytes: int
    is_plain: bool
    read: Callable[[int], Iterator[Document | Problem]]
    chats: ChatReader | None = None


def unread_keys(parts: Sequence[CorpusPart]) -> tuple[str, ...]:
    """Returns the keys of the chats that were read from the parts and that their template does not read, in words."""
    return tuple(dict.fromkeys(key for part in parts if part.chats for key in part.chats.unread))


def corpus_parts(source: OneSource, where: str, tokenizer: Tokenizer | None = None) -> list[CorpusPart]:
    """Returns the parts of a corpus in a fixed order. where: the key of the source, for messages. tokenizer: needed to
    read chats.

    Raises ConfigError if nothing matches, a file cannot be read, or user code fails.
    """
    if source.kind == "python_stdlib":
        return _python_stdlib()
    if source.kind == "synthetic":
        return [CorpusPart("synthetic", 0, False, _synthetic)]
    if source.kind == "python":
        return [_user_documents(source, where)]
    if source.kind == "tokens":
        raise ConfigError([Problem(where, "holds tokens already", "name a source of text")])
    files = find_files(source.paths, f"{where}.paths")
    chats = chat_reader(source, where, tokenizer) if isinstance(source, ChatsSource) and tokenizer else None
    holds_text = source.kind in ("text_files", "jsonl", "chats", "preferences")
    parts = []
    for file in files:
        is_known = file.path is not None or file.num_bytes > 0  # some servers do not say
        is_plain = holds_text and not file.is_compressed and is_known
        read = partial(_read_file, source, where, file, chats)
        parts.append(CorpusPart(file.name, file.num_bytes, is_plain, read, chats))
    return parts


def num_text_bytes(parts: Sequence[CorpusPart]) -> int:
    """Returns the approximate bytes of text in a corpus; 0 if unknown before it is read."""
    return sum(part.num_bytes for part in parts) if all(part.is_plain for part in parts) else 0


def _read_file(
    source: OneSource, where: str, file: SourceFile, chats: ChatReader | None, first: int
) -> Iterator[Document | Problem]:
    """Yields the documents of a file from number `first` on, and a Problem for each that cannot be read."""
    contents = chats.read(file, first) if chats else _contents(source, where, file, first)
    per_line = chats.chats_per_line if chats else 1  # the two of a pair have one name, and so are in one split
    try:
        for number, content in enumerate(contents, start=first):
            one = file.name if source.kind == "text_files" else f"{file.name}:{number // per_line}"
            if isinstance(content, Problem):
                yield content
            elif isinstance(content, Chat):
                yield Document(one, content if content.trained else b"")
            else:
                yield Document(one, without_mark(content))
    except Exception as error:
        yield problem_of_file(error, file)


def _contents(source: OneSource, where: str, file: SourceFile, first: int) -> Iterator[bytes | Problem]:
    if isinstance(source, TextFilesSource):
        return text_file(file, first)
    if isinstance(source, JsonlSource):
        return jsonl(file, source.text_key, f"{where}.text_key", first)
    if isinstance(source, ParquetSource):
        return parquet(file, source.text_column, f"{where}.text_column", first)
    return array_record(file, where, first)


def without_mark(text: bytes) -> bytes:
    """Returns a text without the byte order mark that some editors write."""
    return text.removeprefix(codecs.BOM_UTF8)


def _python_stdlib() -> list[CorpusPart]:
    """Returns the source files of the running Python's standard library, without installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*.py"))]
    source = TextFilesSource(kind="text_files", paths=(str(root),))
    own = [name for name in names if "site-packages" not in name and "__pycache__" not in name]
    files = [local_file(root / name, name) for name in own]
    return [CorpusPart(file.name, file.num_bytes, True, partial(_read_file, source, "", file, None)) for file in files]


def _synthetic(first: int) -> Iterator[Document]:
    """Yields 512 documents of arithmetic statements, which a model can learn, and which are generated at once."""
    chance = random.Random(0)
    for number in range(512):
        pairs = [(chance.randrange(100), chance.randrange(100)) for _ in range(200)]
        if number >= first:
            yield Document(f"synthetic/{number}", b"".join(b"%d + %d = %d\n" % (a, b, a + b) for a, b in pairs))


def _user_documents(source: PythonSource, where: str) -> CorpusPart:
    documents = load_documents(source, where)

    def read(first: int) -> Iterator[Document | Problem]:
        for number in range(first, len(documents)):
            content = documents.document(number)
            if isinstance(content, Problem):
                yield content
            else:
                yield Document(str(number), without_mark(content) if isinstance(content, bytes) else content)

    return CorpusPart(source.object, 0, False, read)
