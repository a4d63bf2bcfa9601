"""Assigns the documents of a source to sequences: tokens of a stream, pairs, or sequences of a class of the user.

The plan of a stream depends only on document lengths, so any sequence can be made by its index, without reading those
before it.

    lengths 5 9 2 3, sequences of 8 tokens    (9 is split: 8 + 1)
    concatenate   55555999 | 99999922 | (333 are left over)
    first_fit     55555922 | 99999999 | 333.....

A pair of documents of which people prefer one is rows 2i and 2i + 1 of a batch, the chosen one first. Pairs are
shuffled, not rows, so that both rows stay together. A class of the user makes sequences when a batch needs them.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.format import counted
from meshloom.compiler.declare.data_spec import DataSpec, PythonSource
from meshloom.compiler.sharding.batch import REFERENCE
from meshloom.models import IGNORED_TARGET, PADDING_TARGET

from .documents import UserItems, as_tokens, load_items
from .store import SPLITS, Split, TokenStream, in_split

# The arrays of one sequence, int32 (length,), by the names of compiler/sharding/batch.py
PackedSequence = dict[str, np.ndarray]
PADDING = 0  # any token would do: it has no loss, and no token with a loss attends to it
PAIR = 2  # rows


class ConcatenatedSequences:
    """The stream, cut into sequences. Tokens at the end that do not fill a sequence and its last target are left
    out."""

    def __init__(self, stream: TokenStream, length: int, *, isolate_documents: bool):
        self._stream, self._length, self._isolate = stream, length, isolate_documents

    def __len__(self) -> int:
        return max(0, (len(self._stream) - 1) // self._length)

    def __getitem__(self, index: int) -> PackedSequence:
        first = index * self._length
        window = self._stream.read(first, first + self._length + 1)
        row = {"inputs": window[:-1], "targets": self._stream.targets(window[1:], first + 1)}
        if not self._isolate:
            return row
        ends = self._stream.document_ends
        ends = ends[np.searchsorted(ends, first, "right") : np.searchsorted(ends, first + self._length, "right")]
        lengths = np.diff(ends - first, prepend=0, append=self._length)
        row["targets"] = row["targets"].copy()  # it shares its memory with the inputs
        row["targets"][ends - first - 1] = IGNORED_TARGET
        return row | _documents(lengths[lengths > 0], self._length)

    def documents(self, index: int) -> tuple[int, ...]:
        """Returns the documents of a sequence, by their numbers in the corpus."""
        first = index * self._length
        return self._stream.documents_at(first, first + self._length)

    num_left_out = 0

    def cuts(self) -> np.ndarray:
        """Returns the places in the stream where a sequence begins."""
        return np.arange(1, len(self) + 1) * self._length

    @property
    def fill(self) -> float:
        """Returns the share of positions that hold a token."""
        return 1.0


def num_cut_turns(stream: TokenStream, cuts: np.ndarray) -> int:
    """Returns the number of turns to learn that begin in one sequence and end in another. cuts: in order."""
    starts, stops = stream.turns
    return int(np.sum(np.searchsorted(cuts, stops, "left") > np.searchsorted(cuts, starts, "right")))


@dataclass(frozen=True)
class PackingPlan:
    """Pieces of documents as places in the stream; sequence i has pieces `firsts[i]` to before `firsts[i + 1]`."""

    starts: np.ndarray
    stops: np.ndarray
    firsts: np.ndarray


class PackedSequences:
    """Whole documents, and pieces of documents that are too long, packed first-fit, with padding after them."""

    def __init__(self, stream: TokenStream, length: int, *, isolate_documents: bool):
        self._stream, self._length, self._isolate = stream, length, isolate_documents
        starts, stops = cut_documents(stream.document_ends, length)
        kept = np.ones(len(starts), bool)
        if stream.is_masked:  # a piece without a target to learn fills room, and teaches nothing
            is_cut = ~stream.is_document_end(stops)
            kept = stream.holds_trained(starts + isolate_documents, stops + is_cut)
        self.num_left_out = int(np.sum(~kept))
        self._plan = plan_first_fit(starts[kept], stops[kept], length)

    def __len__(self) -> int:
        return len(self._plan.firsts) - 1

    def __getitem__(self, index: int) -> PackedSequence:
        pieces = slice(self._plan.firsts[index], self._plan.firsts[index + 1])
        starts, stops = self._plan.starts[pieces], self._plan.stops[pieces]
        inputs, targets = np.full(self._length, PADDING, np.int32), np.full(self._length, PADDING_TARGET, np.int32)
        is_cut = ~self._stream.is_document_end(stops)  # the document continues elsewhere, so its next token is known
        ends = np.cumsum(stops - starts)
        for start, stop, more, end in zip(starts.tolist(), stops.tolist(), is_cut.tolist(), ends.tolist(), strict=True):
            tokens, begin = self._stream.read(start, stop + more), end - (stop - start)
            inputs[begin:end] = tokens[: stop - start]
            targets[begin : begin + len(tokens) - 1] = self._stream.targets(tokens[1:], start + 1)
            if not more:
                targets[end - 1] = IGNORED_TARGET
        row = {"inputs": inputs, "targets": targets}
        if self._isolate:
            return row | _documents(stops - starts, self._length)
        # A document's end predicts how the next one begins.
        targets[ends[:-1] - 1] = self._stream.targets_at(inputs[ends[:-1]], starts[1:])
        return row

    def documents(self, index: int) -> tuple[int, ...]:
        """Returns the documents of a sequence, by their numbers in the corpus."""
        pieces = slice(self._plan.firsts[index], self._plan.firsts[index + 1])
        spans = zip(self._plan.starts[pieces].tolist(), self._plan.stops[pieces].tolist(), strict=True)
        return tuple(number for start, stop in spans for number in self._stream.documents_at(start, stop))

    def cuts(self) -> np.ndarray:
        """Returns the places in the stream where a piece begins, in order."""
        return np.sort(self._plan.starts)

    @property
    def fill(self) -> float:
        """Returns the share of positions that hold a token."""
        held = int(np.sum(self._plan.stops - self._plan.starts))
        return held / (len(self) * self._length) if len(self) else 0.0


def plan_first_fit(starts: np.ndarray, stops: np.ndarray, length: int) -> PackingPlan:
    """Plans sequences: pieces of at most `length` tokens in order, each in the first sequence with room.

    starts, stops: int64, places in the stream. Takes O(log n) for each piece.
    """
    row_of = _first_fit((stops - starts).tolist(), length)
    order = np.argsort(row_of, kind="stable")
    num_rows = int(row_of.max()) + 1 if len(row_of) else 0
    firsts = np.searchsorted(row_of[order], np.arange(num_rows + 1))
    return PackingPlan(starts[order], stops[order], firsts)


def cut_documents(document_ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the start and stop of each piece: documents of up to `length` tokens are whole, longer ones are cut."""
    sizes = np.diff(document_ends, prepend=0)
    num_pieces = -(-sizes // length)
    begins = np.repeat(document_ends - sizes, num_pieces)
    number = np.arange(len(begins)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    starts = begins + number * length
    return starts, np.minimum(starts + length, np.repeat(document_ends, num_pieces))


def _first_fit(sizes: list[int], capacity: int) -> np.ndarray:
    """Returns the row of each piece. A binary tree holds the maximum room over the rows below each node, so the first
    row with enough room is found by descending it; a full tree is doubled."""
    leaves = 1024
    room = [capacity] * (2 * leaves)
    rows = np.empty(len(sizes), np.int64)
    for i, size in enumerate(sizes):
        if room[1] < size:
            room, leaves = _doubled(room, leaves, capacity), 2 * leaves
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < size:
                node += 1
        rows[i] = node - leaves
        room[node] -= size
        node //= 2
        while node and room[node] != (largest := max(room[2 * node], room[2 * node + 1])):
            room[node] = largest
            node //= 2
    return rows


def _doubled(room: list[int], leaves: int, capacity: int) -> list[int]:
    """Returns a tree of twice the leaves, the new ones empty."""
    doubled = [capacity] * (4 * leaves)
    width = 1
    while width <= leaves:
        doubled[2 * width : 3 * width] = room[width : 2 * width]
        width *= 2
    return doubled


def _documents(lengths: np.ndarray, length: int) -> PackedSequence:
    """Returns positions, from 0 in each document, and segment_ids, from 1 for packed documents; 0 for padding."""
    positions, segment_ids = np.zeros(length, np.int32), np.zeros(length, np.int32)
    filled = int(lengths.sum())
    begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
    positions[:filled] = np.arange(filled) - begins
    segment_ids[:filled] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return {"positions": positions, "segment_ids": segment_ids}


class PairedSequences:
    """The documents of a split, each a row that is padded, or cut at its end. A pair is left out if a cut leaves one of
    its rows without a target to learn. reference: the log-probability of each row by a reference model, float32; None
    until it is known."""

    def __init__(self, stream: TokenStream, length: int):
        self._stream, self._length = stream, length
        stops = stream.document_ends
        starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]])[: len(stops)]
        is_learnt = stream.holds_trained(starts + 1, np.minimum(stops, starts + length + 1))
        kept = np.repeat(is_learnt.reshape(-1, PAIR).all(axis=1), PAIR)
        self.num_left_out = int(np.sum(~kept)) // PAIR
        self._starts, self._stops = starts[kept], stops[kept]
        self.reference: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> PackedSequence:
        start = int(self._starts[index])
        tokens = self._stream.read(start, min(int(self._stops[index]), start + self._length + 1))
        inputs, targets = np.full(self._length, PADDING, np.int32), np.full(self._length, PADDING_TARGET, np.int32)
        inputs[: len(tokens) - 1] = tokens[:-1]
        targets[: len(tokens) - 1] = self._stream.targets(tokens[1:], start + 1)
        row: PackedSequence = {"inputs": inputs, "targets": targets}
        return row if self.reference is None else row | {REFERENCE: self.reference[index]}

    def documents(self, index: int) -> tuple[int, ...]:
        """Returns the document of a row, by its number in the corpus."""
        return self._stream.documents_at(int(self._starts[index]), int(self._stops[index]))

    @property
    def num_cut(self) -> int:
        """Returns the number of documents that are longer than a row and the target of its last token."""
        return int(np.sum(self._stops - self._starts > self._length + 1))

    @property
    def fill(self) -> float:
        """Returns the share of positions that hold a token."""
        held = np.minimum(self._stops - self._starts - 1, self._length)
        return float(held.sum()) / (held.size * self._length) if held.size else 0.0


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


class UserSequences:
    """The user's items in a split. An item is an array of up to length + 1 tokens, or a dict of the batch's arrays."""

    fill = 1.0

    def __init__(self, items: UserItems, indices: np.ndarray, length: int, names: tuple[str, ...]):
        self._items, self._indices, self._length, self._names = items, indices, length, names

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> PackedSequence:
        index = int(self._indices[number])
        item = self._items[index]
        return self._arrays(index, item) if isinstance(item, dict) else self._tokens(index, item)

    def documents(self, number: int) -> tuple[int, ...]:
        """Returns the number of the user's item."""
        return (int(self._indices[number]),)

    def _tokens(self, index: int, item: Any) -> PackedSequence:
        tokens = as_tokens(item)
        if tokens is None or not 2 <= len(tokens) <= self._length + 1:
            has = f"is a {type(item).__name__}" if tokens is None else f"has {counted(len(tokens), 'token')}"
            fix = f"return 2 to {self._length + 1} token numbers (sequence_length and the one that follows), or a dict of {', '.join(self._names)}"  # fmt: skip  # noqa: E501
            raise ConfigError([self._items.problem(index, has, fix)])
        count = len(tokens) - 1
        row = {
            "inputs": _padded(tokens[:-1], self._length, PADDING),
            "targets": _padded(tokens[1:], self._length, PADDING_TARGET),
        }
        if "positions" in self._names:
            row["positions"] = _padded(np.arange(count), self._length, 0)
            row["segment_ids"] = _padded(np.ones(count), self._length, 0)
        return row

    def _arrays(self, index: int, item: dict[str, Any]) -> PackedSequence:
        fix = f"return int arrays of {self._length} numbers for {', '.join(self._names)}"
        if set(item) != set(self._names):
            raise ConfigError([self._items.problem(index, f"has the keys {', '.join(map(str, item))}", fix)])
        row = {}
        for name in self._names:
            array = np.asarray(item[name])
            if array.shape != (self._length,) or array.dtype.kind not in "iu":
                what = f"has '{name}' of shape {array.shape} and type {array.dtype}"
                raise ConfigError([self._items.problem(index, what, fix)])
            if array.min() < (PADDING_TARGET if name == "targets" else 0):
                raise ConfigError([self._items.problem(index, f"has {array.min()} in '{name}'", fix)])
            row[name] = array.astype(np.int32)
        if "segment_ids" in row:
            row["targets"] = np.where(row["segment_ids"] == 0, PADDING_TARGET, row["targets"])
        return row


def open_user_sequences(
    source: PythonSource, where: str, length: int, names: tuple[str, ...], data: DataSpec
) -> dict[Split, UserSequences]:
    """Returns both splits of the user's items, by the hashes of their numbers or by their numbers. Raises ConfigError
    for wrong user code."""
    items = load_items(source, where)
    if data.held_out_by == "document":
        is_held_out = in_split(_hashes_of_numbers(len(items)), "held_out", data.held_out_fraction)
    else:
        is_held_out = np.arange(len(items)) >= len(items) - int(data.held_out_fraction * len(items))
    return {
        split: UserSequences(items, np.flatnonzero(is_held_out == (split == "held_out")), length, names)
        for split in SPLITS
    }


def _hashes_of_numbers(count: int) -> np.ndarray:
    """Returns the uint64 hashes of 0, 1, 2, ... by the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _padded(values: np.ndarray, length: int, padding: int) -> np.ndarray:
    row = np.full(length, padding, np.int32)
    row[: len(values)] = values
    return row
