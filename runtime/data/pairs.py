"""Pairs of documents of which people prefer one: each is a row of a batch, the chosen one first.

    documents  chosen 0, rejected 0, chosen 1, rejected 1, ..      neighbours in the stream, with one name
    batch      rows 2i and 2i + 1: the chosen and the rejected document of one pair

Pairs are shuffled, not rows, so that both rows of a pair stay together. The log-probabilities of a reference model
(runtime/train/reference.py) are a table beside the rows, and go with them.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshloom.compiler.sharding.batch import REFERENCE
from meshloom.models import PADDING_TARGET

from .packing import PADDING, PackedSequence
from .store import TokenStream

PAIR = 2  # rows


class PairedSequences:
    """The documents of a split, each a row that is padded, or cut at its end. reference: the log-probability of each
    row by a reference model, float32; None until it is known."""

    def __init__(self, stream: TokenStream, length: int):
        self._stream, self._length = stream, length
        self.reference: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._stream.document_ends)

    def __getitem__(self, index: int) -> PackedSequence:
        start, stop = self._span(index)
        tokens = self._stream.read(start, min(stop, start + self._length + 1))
        inputs, targets = np.full(self._length, PADDING, np.int32), np.full(self._length, PADDING_TARGET, np.int32)
        inputs[: len(tokens) - 1] = tokens[:-1]
        targets[: len(tokens) - 1] = self._stream.targets(tokens[1:], start + 1)
        row: PackedSequence = {"inputs": inputs, "targets": targets}
        return row if self.reference is None else row | {REFERENCE: self.reference[index]}

    def documents(self, index: int) -> tuple[int, ...]:
        """Returns the document of a row, by its number in the corpus."""
        return self._stream.documents_at(*self._span(index))

    @property
    def num_cut(self) -> int:
        """Returns the number of documents that are longer than a row and the target of its last token."""
        return int(np.sum(self._sizes() > self._length + 1))

    @property
    def fill(self) -> float:
        """Returns the share of positions that hold a token."""
        held = np.minimum(self._sizes() - 1, self._length)
        return float(held.sum()) / (held.size * self._length) if held.size else 0.0

    def _span(self, index: int) -> tuple[int, int]:
        ends = self._stream.document_ends
        return int(ends[index - 1]) if index else 0, int(ends[index])

    def _sizes(self) -> np.ndarray:
        return np.diff(self._stream.document_ends, prepend=0)


class PairsOf:
    """Neighbouring items, two at a time."""

    def __init__(self, items: Sequence[Any]):
        self._items = items

    def __len__(self) -> int:
        return len(self._items) // PAIR

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._items[PAIR * index], self._items[PAIR * index + 1]


class ItemsOfPairs:
    """The items of an order of pairs, which may have no end."""

    def __init__(self, order: Sequence[tuple[Any, Any]]):
        self._order = order

    def __len__(self) -> int:
        return min(PAIR * len(self._order), sys.maxsize)

    def __getitem__(self, index: int) -> Any:
        return self._order[index // PAIR][index % PAIR]
