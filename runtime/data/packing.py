"""Assigns tokens of a stream to sequences. The plan depends only on document lengths, so any sequence can be made by
its index, without reading those before it.

    lengths 5 9 2 3, sequences of 8 tokens    (9 is split: 8 + 1)
    concatenate   55555999 | 99999922 | (333 are left over)
    first_fit     55555922 | 99999999 | 333.....
"""

from dataclasses import dataclass

import numpy as np

from meshloom.models import IGNORED_TARGET, PADDING_TARGET

from .store import TokenStream

# The arrays of one sequence, int32 (length,), by the names of compiler/sharding/batch.py
PackedSequence = dict[str, np.ndarray]
PADDING = 0  # any token would do: it has no loss, and no token with a loss attends to it


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

    def cuts(self) -> np.ndarray:
        """Returns the places in the stream where a sequence begins."""
        return np.arange(1, len(self) + 1) * self._length

    @property
    def fill(self) -> float:
        """Returns the share of positions that hold a token."""
        return 1.0


def num_cut_turns(stream: TokenStream, cuts: np.ndarray) -> int:
    """Returns the number of turns to learn that begin in one sequence and end in another. cuts: in order."""
    starts, stops = stream.turns()
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
        self._plan = plan_first_fit(stream.document_ends, length)

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
        return len(self._stream) / (len(self) * self._length) if len(self) else 0.0


def plan_first_fit(document_ends: np.ndarray, length: int) -> PackingPlan:
    """Plans sequences: documents in order, cut into pieces of at most `length`, each in the first sequence with room.

    document_ends: int64, places in the stream. Takes O(log n) for each piece.
    """
    starts, stops = _cut(document_ends, length)
    row_of = _first_fit((stops - starts).tolist(), length)
    order = np.argsort(row_of, kind="stable")
    num_rows = int(row_of.max()) + 1 if len(row_of) else 0
    firsts = np.searchsorted(row_of[order], np.arange(num_rows + 1))
    return PackingPlan(starts[order], stops[order], firsts)


def _cut(document_ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
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
