"""Writes a corpus of any size into token shards, in bounded memory; a killed command can continue.

Documents are written in the order of the corpus, and the end of a shard depends only on them. Every few seconds the
files are flushed to disk, and then `progress.json` records how much of them counts; a start removes the rest and writes
it again. So the bytes are the same however often it was stopped.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
from pydantic import JsonValue, NonNegativeInt

from meshloom.models.record import Record

from ..core.files import file_sha256, replace_json
from .chats import TODAY
from .store import DOCUMENT_BYTES, INDEX, PROGRESS, Index, ShardFiles, StoredTokenizer
from .tokenize import Encoded

COMMIT_SECONDS = 5.0


class CorpusProgress(Record):
    """The work done so far: finished shards, the tokens and documents of the unfinished one, and the next document.
    corpus: the sources that are written; a command that continues has to name the same."""

    corpus: dict[str, JsonValue]
    tokenizer: StoredTokenizer | None  # None: not trained yet
    shards: tuple[ShardFiles, ...]
    num_tokens: NonNegativeInt
    num_documents: NonNegativeInt
    largest_token: int
    num_text_bytes: NonNegativeInt
    num_empty: NonNegativeInt = 0  # documents without text, which are left out
    masked_by: tuple[str, ...] = ()  # of chats: how it was found which tokens are to be learnt
    part: NonNegativeInt
    document: NonNegativeInt
    has_failed: bool = False  # a text could not be read, so a start of other texts may begin anew here

    @property
    def total_tokens(self) -> int:
        return self.num_tokens + sum(shard.num_tokens for shard in self.shards)

    @property
    def total_documents(self) -> int:
        return self.num_documents + sum(shard.num_documents for shard in self.shards)


class ShardWriter:
    """Appends documents to the shards of a folder, continuing from `progress`, within the `with`."""

    def __init__(self, folder: Path, progress: CorpusProgress, dtype: np.dtype, *, num_tokens_per_shard: int):
        self._folder, self._dtype, self._limit = folder, dtype, num_tokens_per_shard
        self._done = progress
        self._last_commit = time.monotonic()
        self._is_masked = bool(progress.masked_by)
        self._files: tuple[BinaryIO, ...] | None = None
        if progress.num_documents:
            self._files = self._open("r+b")
            sizes = (progress.num_tokens * dtype.itemsize, progress.num_documents * DOCUMENT_BYTES, progress.num_tokens)
            for file, size in zip(self._files, sizes, strict=False):
                file.truncate(size)
                file.seek(size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files or ():
            with suppress(OSError):  # of a full disk, which was reported: what counts is what was committed
                file.close()

    @property
    def done(self) -> CorpusProgress:
        """Returns the progress so far."""
        return self._done

    def add(self, encoded: Encoded) -> None:
        """Appends a batch, and commits from time to time."""
        lengths = encoded.documents[:, 0].astype(np.int64)
        ends = np.cumsum(lengths)
        self._is_masked |= encoded.trained is not None
        first = 0
        while first < len(lengths):
            begin = int(ends[first] - lengths[first])
            room = self._limit - self._done.num_tokens
            last = min(int(np.searchsorted(ends, begin + room)), len(lengths) - 1)  # the one that fills the shard
            self._append(encoded, slice(begin, int(ends[last])), slice(first, last + 1), ends - begin)
            if self._done.num_tokens >= self._limit:
                self._close_shard()
            first = last + 1
        self._update(
            part=encoded.part,
            document=encoded.next_document,
            num_text_bytes=self._done.num_text_bytes + encoded.num_text_bytes,
            num_empty=self._done.num_empty + encoded.num_empty,
            masked_by=tuple(sorted({*self._done.masked_by, *encoded.masked_by} - {TODAY})),
        )
        if time.monotonic() - self._last_commit > COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Flushes the documents that were added to disk, so that they survive the end of this process."""
        for file in self._files or ():
            file.flush()
            os.fsync(file.fileno())
        replace_json(self._folder / PROGRESS, self._done.model_dump())
        self._last_commit = time.monotonic()

    def finish(self) -> Index:
        """Closes the last shard and writes the index, which completes the shards."""
        if self._done.num_documents:
            self._close_shard()
        self.commit()
        done = self._done
        index = Index(
            format="meshloom-tokens",
            version=1,
            dtype="uint16" if self._dtype.itemsize == 2 else "uint32",
            tokenizer=done.tokenizer,  # pyright: ignore[reportArgumentType]
            num_tokens=done.total_tokens,
            num_documents=done.total_documents,
            largest_token=done.largest_token,
            num_empty=done.num_empty,
            masked_by=done.masked_by,
            shards=done.shards,
            corpus=done.corpus,
        )
        replace_json(self._folder / INDEX, index.model_dump())
        (self._folder / PROGRESS).unlink()
        return index

    def _names(self) -> tuple[str, ...]:
        number = len(self._done.shards)
        names = (f"{number:05}.tokens", f"{number:05}.documents", f"{number:05}.trained")
        return names if self._is_masked else names[:2]

    def _open(self, mode: str) -> tuple[BinaryIO, ...]:
        files = (self._folder / name for name in self._names())
        return tuple(path.open(mode) for path in files)  # pyright: ignore[reportReturnType] (binary, by the mode)

    def _append(self, encoded: Encoded, tokens: slice, documents: slice, ends: np.ndarray) -> None:
        """Appends documents of a batch. tokens, documents: where they are. ends: of all, from the first token on."""
        self._files = self._files or self._open("wb")
        table = np.stack([ends[documents].astype("<u8") + np.uint64(self._done.num_tokens), encoded.documents[documents, 1]], axis=1)  # fmt: skip  # noqa: E501
        self._files[0].write(encoded.tokens[tokens].astype(self._dtype, copy=False).tobytes())
        self._files[1].write(table.astype("<u8", copy=False).tobytes())
        if encoded.trained is not None:
            self._files[2].write(encoded.trained[tokens].tobytes())
        self._update(
            num_tokens=self._done.num_tokens + (tokens.stop - tokens.start),
            num_documents=self._done.num_documents + (documents.stop - documents.start),
            largest_token=max(self._done.largest_token, int(encoded.tokens[tokens].max())),
        )

    def _close_shard(self) -> None:
        assert self._files
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        names = self._names()
        shard = ShardFiles(
            tokens=names[0],
            documents=names[1],
            trained=names[2] if self._is_masked else None,
            num_tokens=self._done.num_tokens,
            num_documents=self._done.num_documents,
            sha256=file_sha256(*(self._folder / name for name in names)),
        )
        self._files = None
        self._update(shards=(*self._done.shards, shard), num_tokens=0, num_documents=0)

    def _update(self, **changes: object) -> None:
        self._done = self._done.model_copy(update=changes)
