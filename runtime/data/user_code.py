"""Uses a class of the user as a source: checks its name and arguments, and reports its errors with the place."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any, use_one_of
from meshloom.compiler.core.user_code import load_class, problem_in_user_code
from meshloom.compiler.declare.data_spec import PythonSource


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
