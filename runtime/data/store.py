"""Holds the tokens of a corpus with the table of its documents, in memory or memory-mapped from token shards on disk.

index.json        dtype, tokenizer and counts of all shards, and the files and hashes of each
00000.tokens      tokens, little-endian, documents end to end, each with its end token
00000.documents   uint64 little-endian, two for each document: where it ends in the shard, the hash of its name
00000.trained     of chats: a byte for each token, 1 for those that are to be learnt
tokenizer.json    the tokenizer's file, if it has one

`write.py` writes shards; docs/data.md has the format for other writers.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, JsonValue, NonNegativeInt, PositiveInt, ValidationError

from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any
from meshloom.models import IGNORED_TARGET
from meshloom.models.record import Record

from .tokenizers import TokenizerIdentity

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
HeldOutBy = Literal["document", "position"]
INDEX = "index.json"
DOCUMENT_BYTES = 16  # of each document in the table of a shard
PROGRESS = "progress.json"  # there while shards are not finished
AGAIN = "write the shards again with `meshloom data`"


FileName = Annotated[str, Field(pattern=r"^[^./\\][^/\\]*$")]  # a file of the folder itself that is not hidden


@dataclass(frozen=True)
class Shard:
    """A part of a corpus in tokens. tokens: uint16 or uint32, in memory or memory-mapped; each document ends with its
    end token. documents: uint64 (num_documents, 2), the end of each document in `tokens`, and the hash of its name.
    trained: bool, the tokens that a model is to predict; None: all."""

    tokens: np.ndarray
    documents: np.ndarray
    trained: np.ndarray | None = None


@dataclass(frozen=True)
class TokenStore:
    """A corpus in tokens. content: a hash of all of it. largest_token: -1 if there are no tokens. num_empty: documents
    without text, or chats without an answer to learn, which were left out. masked_by: how it was found which tokens to
    learn (chat_template.py); empty: all are. unread: keys of chats that their template does not read, in words."""

    shards: tuple[Shard, ...]
    tokenizer: TokenizerIdentity
    content: str
    largest_token: int
    num_empty: int = 0
    masked_by: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def num_trained(self) -> int:
        """Returns the number of tokens that are to be learnt."""
        masks = [(len(shard.tokens), shard.trained) for shard in self.shards]
        return sum(length if mask is None else int(np.count_nonzero(mask)) for length, mask in masks)

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
        masks = [shard.trained for shard in store.shards]
        self._masks = [mask for mask in masks if mask is not None]  # of all shards, or of none
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
        return self._gather(self._shards, start, stop, np.int32)

    def targets(self, tokens: np.ndarray, start: int) -> np.ndarray:
        """Returns the tokens that were read from `start` on as targets, without those that are not to be learnt."""
        if not self._masks:
            return tokens
        return np.where(self._gather(self._masks, start, start + len(tokens), bool), tokens, IGNORED_TARGET)

    def targets_at(self, tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Returns single tokens as targets. places: where each was read."""
        if not self._masks:
            return tokens
        is_trained = [self._gather(self._masks, place, place + 1, bool)[0] for place in places.tolist()]
        return np.where(is_trained, tokens, IGNORED_TARGET) if is_trained else tokens

    @property
    def is_masked(self) -> bool:
        """Returns True if not all tokens are to be learnt."""
        return bool(self._masks)

    def holds_trained(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Returns a mask of the stretches that hold a token to learn. starts, stops: places in the stream."""
        if not self._masks:
            return starts < stops
        begins, ends = self.turns
        first = np.searchsorted(ends, starts, "right")  # the first turn that ends after the start
        return np.append(begins, len(self))[first] < stops

    @cached_property
    def turns(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns where each stretch of tokens that are to be learnt starts and stops, within a document. Empty if all
        are."""
        if not self._masks:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        is_trained = self._gather(self._masks, 0, len(self), bool)
        before, after = np.append(False, is_trained[:-1]), np.append(is_trained[1:], False)
        before[self.document_ends[:-1]] = False
        after[self.document_ends - 1] = False
        return np.flatnonzero(is_trained & ~before), np.flatnonzero(is_trained & ~after) + 1

    def _gather(self, shards: Sequence[np.ndarray], start: int, stop: int, dtype: type) -> np.ndarray:
        values = np.empty(stop - start, dtype)
        run, at = int(np.searchsorted(self._run_ends, start, "right")), start
        while at < stop:
            begin = int(self._run_ends[run - 1]) if run else 0
            until = min(stop, int(self._run_ends[run]))
            offset = int(self._run_starts[run]) - begin
            values[at - start : until - start] = shards[self._run_shards[run]][offset + at : offset + until]
            run, at = run + 1, until
        return values

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


class ShardFiles(Record):
    """One shard: the names of its files, their counts and their hash."""

    tokens: FileName
    documents: FileName
    num_tokens: NonNegativeInt
    num_documents: NonNegativeInt
    sha256: str  # of all files, one after the other
    trained: FileName | None = None  # of chats

    def sizes(self, dtype: str) -> dict[str, int]:
        """Returns the bytes of each file by name, in the order in which they are hashed."""
        sizes = {self.tokens: self.num_tokens * np.dtype(dtype).itemsize}
        sizes |= {self.documents: self.num_documents * DOCUMENT_BYTES}
        return sizes | ({self.trained: self.num_tokens} if self.trained else {})


class StoredTokenizer(Record):
    kind: str
    sha256: str
    vocab_size: PositiveInt
    end_of_document: NonNegativeInt


class Index(Record):
    """The content of `index.json`."""

    format: Literal["meshloom-tokens"]
    version: Literal[1]
    dtype: Literal["uint16", "uint32"]
    tokenizer: StoredTokenizer
    num_tokens: NonNegativeInt
    num_documents: NonNegativeInt
    largest_token: int  # -1 where there is none
    num_empty: NonNegativeInt = 0  # documents without text, which were left out; other writers need not count them
    masked_by: tuple[str, ...] = ()  # of chats: how it was found which tokens are to be learnt
    shards: tuple[ShardFiles, ...]
    corpus: dict[str, JsonValue]  # the sources of the shards, for people and for `meshloom data`


def open_shards(directory: str, where: str) -> TokenStore:
    """Returns the shards of a directory. Raises ConfigError with all differences between index and files."""
    folder = Path(directory)
    index = read_index(folder, where)
    problems = [problem for shard in index.shards for problem in _check_files(folder, shard, index.dtype, where)]
    if len({shard.trained is None for shard in index.shards}) > 1:
        what = f"{folder / INDEX}: some shards say which tokens are to be learnt, and others do not"
        problems.append(Problem(where, what, AGAIN))
    for name in ("num_tokens", "num_documents"):
        total = sum(getattr(shard, name) for shard in index.shards)
        if total != getattr(index, name):
            what = f"{folder / INDEX}: {name} is {getattr(index, name)}, its shards have {total}"
            problems.append(Problem(where, what, AGAIN))
    raise_if_any(problems)
    shards = tuple(_open_shard(folder, shard, index.dtype) for shard in index.shards)
    tables = (
        _check_table(folder / files.documents, shard, where) for files, shard in zip(index.shards, shards, strict=True)
    )
    raise_if_any(problem for found in tables for problem in found)
    content = hashlib.sha256("".join(shard.sha256 for shard in index.shards).encode()).hexdigest()
    tokenizer = TokenizerIdentity(**index.tokenizer.model_dump())
    return TokenStore(shards, tokenizer, content, index.largest_token, index.num_empty, index.masked_by)


def read_index(folder: Path, where: str) -> Index:
    """Returns the index of a folder. Raises ConfigError if there is none that can be read."""
    path = folder / INDEX
    try:
        return parse_index(path.read_bytes(), str(path), where)
    except FileNotFoundError as error:
        unfinished = (folder / PROGRESS).exists()
        what = f"{folder} has no {INDEX}" + (": `meshloom data` has not finished there" if unfinished else "")
        fix = "name a directory that `meshloom data` wrote"
        fix = "run the same `meshloom data` command again to continue" if unfinished else fix
        raise ConfigError([Problem(where, what, fix)]) from error
    except OSError as error:
        what = f"cannot read {path}: {error.strerror}"
        raise ConfigError([Problem(where, what, "give this process access to it")]) from error


def parse_index(content: bytes, named: str, where: str) -> Index:
    """Returns the index in these bytes. Raises ConfigError if they hold anything else."""
    try:
        return Index.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        what = f"{named} is damaged: {key + ': ' if key else ''}{first['msg']}"
        raise ConfigError([Problem(where, what, AGAIN)]) from error


def _check_files(folder: Path, shard: ShardFiles, dtype: str, where: str) -> list[Problem]:
    """Returns a problem for each file that is missing, or whose size is not the index's."""
    problems = []
    units = {shard.tokens: f"{shard.num_tokens:,} tokens of {dtype}"}
    units |= {shard.documents: f"{shard.num_documents:,} documents"}
    for name, size in shard.sizes(dtype).items():
        path = folder / name
        if not path.is_file():
            problems.append(Problem(where, f"{path} is missing", AGAIN))
        elif (there := path.stat().st_size) != size:
            unit = units.get(name, f"marks of {shard.num_tokens:,} tokens")
            what = f"{path} has {there:,} bytes; {unit} are {size:,}"
            problems.append(Problem(where, what, AGAIN))
    return problems


def _check_table(path: Path, shard: Shard, where: str) -> list[Problem]:
    """Returns a problem if the documents of a table are not contiguous in the shard: wrong tokens would be read."""
    ends = shard.documents[:, 0]
    if np.all(ends[1:] >= ends[:-1]) and (int(ends[-1]) if len(ends) else 0) == len(shard.tokens):
        return []
    return [Problem(where, f"{path} is damaged: its documents are not contiguous in the shard", AGAIN)]


def _open_shard(folder: Path, shard: ShardFiles, dtype: str) -> Shard:
    little_endian = np.dtype(dtype).newbyteorder("<")
    return Shard(
        _mapped(folder / shard.tokens, little_endian, (shard.num_tokens,)),
        _mapped(folder / shard.documents, np.dtype("<u8"), (shard.num_documents, 2)),
        _mapped(folder / shard.trained, np.dtype(bool), (shard.num_tokens,)) if shard.trained else None,
    )


def _mapped(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a file as an array that is read when it is used; an empty file cannot be mapped."""
    return np.memmap(path, dtype, "r", shape=shape) if shape[0] else np.zeros(shape, dtype)
