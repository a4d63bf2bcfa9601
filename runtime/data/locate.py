"""Finds the documents that a global batch is made of, from a place in the data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from meshloom.compiler.core.errors import Problem
from meshloom.compiler.core.format import counted
from meshloom.compiler.declare.data_spec import OneSource

from .documents import Document, corpus_parts
from .tokenize import is_empty
from .tokenizers import Tokenizer


class Places:
    """The sequences of a part of an order, as numbers only: item i is the number of the part, and i."""

    def __init__(self, part: int, count: int):
        self._part, self._count = part, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self._part, int(index)


@dataclass(frozen=True)
class LocatedRow:
    """A row of a global batch.

    source: the key of its source. documents: the numbers of its documents in the source, from 0; for sequences of a
    user's class, the number of the item. names: the names of the documents, if the source is text.
    """

    row: int
    source: str
    documents: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """Returns the names of its documents, or their numbers if names are unknown."""
        return tuple(f"'{name}'" for name in self.names) or tuple(f"{number:,}" for number in self.documents)


def names_of(
    source: OneSource, where: str, numbers: Iterable[int], tokenizer: Tokenizer | None = None
) -> dict[int, str]:
    """Returns the names of documents by their numbers, from a source that is read again. Sources of tokens or finished
    sequences have no names. Raises ConfigError if the source cannot be read."""
    wanted = sorted(set(numbers))
    if not wanted or source.kind == "tokens" or (source.kind == "python" and source.items == "sequences"):
        return {}
    every = (one for part in corpus_parts(source, where, tokenizer) for one in part.read(0))
    documents = (one for one in every if isinstance(one, Problem) or not is_empty(one))
    first = list(islice(documents, wanted[-1] + 1))
    return {number: one.name for number in wanted if isinstance(one := first[number], Document)}


def describe_documents(rows: Sequence[LocatedRow], most: int = 3) -> str:
    """Returns the documents of the first rows as text, by source."""
    by_source: dict[str, dict[str, None]] = {}
    for one in rows[:most]:
        by_source.setdefault(one.source, {}).update(dict.fromkeys(one.labels))
    named = ", ".join(
        f"document{'s' if len(labels) > 1 else ''} {', '.join(labels)} of {source}"
        for source, labels in by_source.items()
    )
    return named + (f", and those of {counted(len(rows) - most, 'more sequence')}" if len(rows) > most else "")
