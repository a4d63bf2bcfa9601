"""Holds the tokens of a corpus with the table of its documents, and streams the documents of a split."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .tokenizers import TokenizerIdentity

Split = Literal["train", "held_out"]
HeldOutBy = Literal["document", "position"]


@dataclass(frozen=True)
class Shard:
    """A part of a corpus in tokens. tokens: uint16 or uint32, in memory or memory-mapped; each document ends with its
    end token. documents: uint64 (num_documents, 2), the end of each document in `tokens`, and the hash of its name."""

    tokens: np.ndarray
    documents: np.ndarray


@dataclass(frozen=True)
class TokenStore:
    """A corpus in tokens. content: a hash of all of it. largest_token: -1 if there are no tokens. num_empty: documents
    without text, which were left out."""

    shards: tuple[Shard, ...]
    tokenizer: TokenizerIdentity
    content: str
    largest_token: int
    num_empty: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(shard.tokens) for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return sum(len(shard.documents) for shard in self.shards)


def name_hash(name: str) -> int:
    """Returns a 64-bit hash of a document's name, the same on every machine. A file's name need not be UTF-8."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8])


def in_split(name_hashes: np.ndarray, split: Split, held_out_fraction: float) -> np.ndarray:
    """Returns a mask of the documents in the split. Documents with a hash in the first part of its range are held
    out."""
    is_held_out = name_hashes < np.uint64(min(int(held_out_fraction * 2**64), 2**64 - 1))
    return is_held_out if split == "held_out" else ~is_held_out


class TokenStream:
    """The documents of a split, end to end, read by place in the stream; nothing is copied before it is read.

    by: "document" holds out whole documents, by the hashes of their names; "position" the last tokens of the corpus.
    """

    def __init__(self, store: TokenStore, split: Split, held_out_fraction: float, by: HeldOutBy = "document"):
        self._store, self._held_out_fraction, self._by = store, held_out_fraction, by
        self._split: Split = split
        self._shards = [shard.tokens for shard in store.shards]
        tables = [spans[is_here] for spans, is_here in self._spans()]
        shard_of = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        starts, stops = np.concatenate([np.zeros((0, 2), np.int64), *tables]).T
        self.document_ends = np.cumsum(stops - starts)  # places in the stream
        # Documents that are adjacent in the store are read as one.
        is_new = np.ones(len(starts), bool)
        is_new[1:] = (starts[1:] != stops[:-1]) | (shard_of[1:] != shard_of[:-1])
        first = np.flatnonzero(is_new)
        last = np.append(first[1:], len(starts)) - 1 if len(first) else first
        self._run_shards, self._run_starts, self._run_ends = shard_of[first], starts[first], self.document_ends[last]

    def __len__(self) -> int:
        return int(self.document_ends[-1]) if len(self.document_ends) else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the tokens from `start` to before `stop`, as int32."""
        tokens = np.empty(stop - start, np.int32)
        run, at = int(np.searchsorted(self._run_ends, start, "right")), start
        while at < stop:
            begin = int(self._run_ends[run - 1]) if run else 0
            until = min(stop, int(self._run_ends[run]))
            offset = int(self._run_starts[run]) - begin
            tokens[at - start : until - start] = self._shards[self._run_shards[run]][offset + at : offset + until]
            run, at = run + 1, until
        return tokens

    def documents_at(self, start: int, stop: int) -> tuple[int, ...]:
        """Returns the documents from `start` to before `stop`, by their numbers in the corpus. Reads the whole
        table."""
        first, last = np.searchsorted(self.document_ends, [start, stop - 1], "right")
        is_here = np.concatenate([is_here for _, is_here in self._spans()])
        return tuple(np.flatnonzero(is_here)[first : last + 1].tolist())

    def is_document_end(self, places: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns a mask of the places right after the end of a document."""
        found = np.searchsorted(self.document_ends, places)
        return self.document_ends[np.minimum(found, len(self.document_ends) - 1)] == places

    def _spans(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields, for each shard, the starts and stops of its documents within the split, int64 (num_documents, 2), and
        a mask of those that have tokens there."""
        first_held_out = self._store.num_tokens - int(self._held_out_fraction * self._store.num_tokens)
        for shard in self._store.shards:
            ends = shard.documents[:, 0].astype(np.int64)
            spans = np.stack([np.concatenate([[0], ends[:-1]]) if len(ends) else ends, ends], axis=1)
            if self._by == "document":
                yield spans, in_split(shard.documents[:, 1], self._split, self._held_out_fraction)
                continue
            boundary = max(0, first_held_out)
            first_held_out -= len(shard.tokens)
            spans = spans.clip(max=boundary) if self._split == "train" else spans.clip(boundary, len(shard.tokens))
            yield spans, spans[:, 0] < spans[:, 1]
