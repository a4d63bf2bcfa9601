"""Opens token shards on disk, memory-mapped. `write.py` writes them; docs/data.md has the format for other writers.

index.json        dtype, tokenizer and counts of all shards, and the files and hashes of each
00000.tokens      tokens, little-endian, documents end to end, each with its end token
00000.documents   uint64 little-endian, two for each document: where it ends in the shard, the hash of its name
00000.trained     of chats: a byte for each token, 1 for those that are to be learnt
tokenizer.json    the tokenizer's file, if it has one
"""

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, JsonValue, NonNegativeInt, PositiveInt, ValidationError

from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any
from meshloom.models.record import Record

from .store import Shard, TokenStore
from .tokenizers import TokenizerIdentity

INDEX = "index.json"
DOCUMENT_BYTES = 16  # of each document in the table of a shard
PROGRESS = "progress.json"  # there while shards are not finished
AGAIN = "write the shards again with `meshloom data`"


FileName = Annotated[str, Field(pattern=r"^[^./\\][^/\\]*$")]  # a file of the folder itself that is not hidden


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
