"""Opens a declared source as sequences of both splits, with the identity of its content.

Token shards behind a URL are downloaded once into the cache of this machine: training draws sequences from all parts of
a corpus, and a memory map needs a disk. A copy belongs to one URL and one index: if the index at the URL changes, the
shards are downloaded again. A file gets its name after the hash of its shard was checked, and index.json comes last. So
a copy with an index is complete, and an interrupted download continues after its last complete shard.
"""

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from threading import Event, Lock
from typing import Any

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import counted, human_bytes
from meshloom.compiler.core.places import is_url
from meshloom.compiler.declare.data_spec import DataSpec, OneSource, PythonStdlibSource, SyntheticSource
from meshloom.compiler.declare.overrides import override
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.sharding.batch import batch_arrays

from ..core.files import blocks_of, in_turn, replace_bytes
from .chats import how_masked
from .documents import corpus_parts, num_text_bytes, unread_keys
from .packing import (
    ConcatenatedSequences,
    PackedSequences,
    PairedSequences,
    UserSequences,
    num_cut_turns,
    open_user_sequences,
)
from .progress import TextProgress
from .store import INDEX, SPLITS, Index, ShardFiles, Split, TokenStore, TokenStream, open_shards, parse_index
from .tokenize import tokens_in_memory
from .tokenizers import Bytes, Tokenizer, TokenizerIdentity

Sequences = ConcatenatedSequences | PackedSequences | PairedSequences | UserSequences
NUM_AT_ONCE = 8  # shards: one stream from an object store is slower than the network of a host
COPY_AGAIN = "copy the whole folder of shards there again"


@dataclass(frozen=True)
class WeightedSource:
    """A source of the run. where: its key. weight: its share of the sequences, relative to the sum of all weights."""

    source: OneSource
    where: str
    weight: float


@dataclass(frozen=True)
class Corpus(WeightedSource):
    """A source, opened. tokenizer: None if a class of the user gives sequences. content: its identity, by key. counts:
    its size in words. reader: the declared tokenizer."""

    sequences: dict[Split, Sequences]
    tokenizer: TokenizerIdentity | None
    largest_token: int
    content: dict[str, Any]
    counts: str
    reader: Tokenizer | None


def open_corpus(spec: RunSpec, declared: WeightedSource, tokenizer: Tokenizer | None) -> Corpus:
    """Returns the sequences of a source. Raises ConfigError with the problems of its files, texts or code."""
    data, length, source, where = spec.data, spec.sequence_length, declared.source, declared.where
    own = source, where, declared.weight
    sequences: dict[Split, Sequences] = {}
    if source.kind == "python" and source.items == "sequences":
        sequences |= open_user_sequences(source, where, length, batch_arrays(spec), data)
        num_items = sum(map(len, sequences.values()))
        arguments = json.dumps(spec.compared_value(f"{where}.arguments", source.arguments), sort_keys=True)
        content = {"kind": "python", "object": source.object, "arguments": arguments, "num_items": num_items}
        return Corpus(*own, sequences, None, -1, content, counted(num_items, "sequence"), tokenizer)
    store, num_cut, num_left_out = open_store(data, source, where, tokenizer), 0, 0
    for split in SPLITS:
        stream = TokenStream(store, split, data.held_out_fraction, data.held_out_by)
        if data.packing == "pairs":
            paired = sequences[split] = PairedSequences(stream, length)
            num_cut += paired.num_cut
            num_left_out += paired.num_left_out
            continue
        pack = ConcatenatedSequences if data.packing == "concatenate" else PackedSequences
        packed = sequences[split] = pack(stream, length, isolate_documents=data.isolate_documents)
        num_cut += num_cut_turns(stream, packed.cuts())
        num_left_out += packed.num_left_out
    content: dict[str, Any] = {"kind": source.kind, "num_tokens": store.num_tokens, "content": store.content}
    content |= {"num_left_out": num_left_out} if num_left_out else {}  # the order is another one than with them
    if num_left_out and not any(map(len, sequences.values())):
        what = f"sequence_length={length} leaves no answer of {counted(store.num_documents, 'chat')}: prompts fill it"
        raise ConfigError([Problem(where, what, "raise sequence_length")])
    counts = _counts(store, data.packing == "pairs", num_cut, num_left_out, length)
    return Corpus(*own, sequences, store.tokenizer, store.largest_token, content, counts, tokenizer)


def _counts(store: TokenStore, has_pairs: bool, num_cut: int, num_left_out: int, length: int) -> str:
    """Returns the size of a corpus in words. num_cut: turns that go on in another sequence, or documents of pairs that
    end at their row's end. num_left_out: pairs, or pieces of chats, that have nothing to learn in their sequence."""
    one = "chat" if store.masked_by else "document"
    counts = f"{counted(store.num_documents, one)}, {counted(store.num_tokens, 'token')}"
    if not store.masked_by:
        return counts + (f" ({store.num_empty:,} without text left out)" if store.num_empty else "")
    counts += f", {store.num_trained:,} trained on ({how_masked(store.masked_by)})"
    if store.num_empty:
        counts += f"; {left_out_chats(store.num_empty, has_pairs)} left out"
    if num_cut:
        counts += f"; {counted(num_cut, 'turn')} cut by sequence_length={length}"
    if num_left_out:
        of = "pair" if has_pairs else "piece"
        counts += f"; {counted(num_left_out, of)} in which sequence_length={length} leaves no answer left out"
    return counts + (f"; the chat template does not read {' or '.join(store.unread)}" if store.unread else "")


def left_out_chats(num_empty: int, has_pairs: bool) -> str:
    """Returns the number of chats from which nothing can be learnt, in words."""
    return (
        f"{counted(num_empty // 2, 'pair')} without two answers that differ"
        if has_pairs
        else f"{counted(num_empty, 'chat')} without an answer to learn"
    )


def open_store(data: DataSpec, source: OneSource, where: str, tokenizer: Tokenizer | None) -> TokenStore:
    """Returns the tokens of a source: shards are mapped, text is tokenised now."""
    if source.kind == "tokens":
        key, place = f"{where}.directory", source.directory
        store = open_shards(str(local_copy(place, key)) if is_url(place) else place, key)
        if tokenizer and tokenizer.identity != store.tokenizer:
            stored, declared = _named(store.tokenizer), _named(tokenizer.identity)
            what = f"{source.directory} holds tokens of another tokenizer ({stored}) than data.tokenizer ({declared})"
            raise ConfigError([Problem(key, what, "set data.tokenizer=null to use the tokenizer of the shards")])
        return store
    if tokenizer is None:
        what = f"source '{source.kind}' is text, and there is no tokenizer"
        raise ConfigError([Problem("data.tokenizer", what, "choose one: data/tokenizer=bytes")])
    if isinstance(source, PythonStdlibSource | SyntheticSource) and isinstance(tokenizer, Bytes):
        return _built_in(source.kind)
    parts, total = corpus_parts(source, where, tokenizer), 0
    _check_size(sum(part.num_bytes for part in parts), data, source, where)
    with TextProgress(Console(), "tokenising", total=num_text_bytes(parts)) as progress:

        def advance(num_bytes: int) -> None:
            nonlocal total
            total += num_bytes
            _check_size(total, data, source, where)
            progress.advance(num_bytes)

        store = replace(tokens_in_memory(parts, tokenizer, where, advance), unread=unread_keys(parts))
    if store.num_documents == 0:
        raise ConfigError([no_documents(source, where)])
    return store


def no_documents(source: OneSource, where: str) -> Problem:
    """Returns the problem of a corpus in which all documents are empty."""
    if source.kind == "preferences":
        return Problem(where, "has no pairs of two answers that differ", "name files with pairs")
    if source.kind == "chats":
        return Problem(where, "has no chats with an answer", "name files with chats in which an assistant speaks")
    return Problem(where, "has no documents with text", "name files with text in them")


@cache
def _built_in(kind: str) -> TokenStore:
    """Returns the corpus of a built-in source, whose content does not change while a process runs."""
    is_stdlib = kind == "python_stdlib"
    source = PythonStdlibSource(kind="python_stdlib") if is_stdlib else SyntheticSource(kind="synthetic")
    return tokens_in_memory(corpus_parts(source, ""), Bytes(), "", advance=lambda _: None)


def _check_size(num_bytes: int, data: DataSpec, source: OneSource, where: str) -> None:
    if num_bytes <= data.max_text_bytes:
        return
    limit = f"data.max_text_bytes={data.max_text_bytes:,}"
    what = f"has more than {limit} bytes of text to tokenise at the start of each run"
    line = shlex.join(["meshloom", "data", *source_overrides(source, data), "shards.directory=tokens"])
    fix = f"tokenise it once: {line}, then train with data=tokens data.source.directory=tokens"
    fix += " data.packing=first_fit data.isolate_documents=true" if source.kind == "chats" else ""
    raise ConfigError([Problem(where, what, fix)])


def source_overrides(source: OneSource, data: DataSpec) -> list[str]:
    """Returns the overrides that select this source and tokenizer."""
    words = [f"data={source.kind}"]
    declared = source.model_dump(exclude={"kind"}).items()
    words += [override(f"data.source.{key}", value) for key, value in declared if value not in (None, {})]
    if data.tokenizer and data.tokenizer.kind != "bytes":
        values = data.tokenizer.model_dump(exclude={"kind"})
        words += [f"data/tokenizer={data.tokenizer.kind}"]
        words += [override(f"data.tokenizer.{key}", value) for key, value in values.items() if value is not None]
    return words


def _named(tokenizer: TokenizerIdentity) -> str:
    file = f", file {tokenizer.sha256[:12]}" if tokenizer.sha256 else ""
    return f"{tokenizer.kind}{file}, end of document {tokenizer.end_of_document}"


def local_copy(url: str, where: str) -> Path:
    """Returns the folder with the shards of a URL, after downloading those that it lacks. Raises ConfigError if shards
    cannot be read, differ from the index, or do not fit on the disk."""
    try:
        content = b"".join(blocks_of(url, INDEX, where))
    except FileNotFoundError as error:
        fix = "name a folder that holds what `meshloom data` wrote, in a bucket that exists"
        raise ConfigError([Problem(where, f"'{url}' has no {INDEX}", fix)]) from error
    index = parse_index(content, f"{url}/{INDEX}", where)
    folder = cache_of_shards() / hashlib.sha256(url.encode() + b"\0" + content).hexdigest()[:24]
    if _is_whole(folder, index):
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with in_turn(folder, lambda: Console().line(f"waiting for another process, which downloads {url}")):
            if not _is_whole(folder, index):
                _download(url, folder, index, where)
                replace_bytes(folder / INDEX, content)
    except OSError as error:
        what = f"the shards of {url} cannot be kept in {folder}: {error.strerror or error}"
        raise ConfigError([Problem(where, what, _other_disk())]) from error
    return folder


def cache_of_shards() -> Path:
    """Returns the folder of all downloaded shards, beside the one of compiled programs."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache)).absolute() / "meshloom" / "shards"


def _is_there(folder: Path, sizes: dict[str, int]) -> bool:
    paths = {folder / name: size for name, size in sizes.items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


def _is_whole(folder: Path, index: Index) -> bool:
    return (folder / INDEX).is_file() and all(_is_there(folder, shard.sizes(index.dtype)) for shard in index.shards)


def _download(url: str, folder: Path, index: Index, where: str) -> None:
    """Downloads the shards that a folder lacks, several at once. The first problem ends all downloads."""
    missing = [shard for shard in index.shards if not _is_there(folder, shard.sizes(index.dtype))]
    num_bytes = sum(sum(shard.sizes(index.dtype).values()) for shard in missing)
    free_bytes = shutil.disk_usage(folder).free
    if num_bytes > free_bytes:
        free = f"{human_bytes(free_bytes)} are free on the disk of {folder}"
        what = f"{url} has {human_bytes(num_bytes)} to download, and {free}"
        raise ConfigError([Problem(where, what, _other_disk())])
    console = Console()
    of = f"{human_bytes(num_bytes)} in {counted(len(missing), 'shard')}"
    console.wrapped(f"downloading {of} from {url} into {folder}")
    with TextProgress(console, "downloading", total=num_bytes) as progress:
        download = _Download(url, folder, where, progress)
        with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            try:
                for _ in threads.map(lambda shard: download.fetch(shard, shard.sizes(index.dtype)), missing):
                    pass
            except BaseException:  # Ctrl-C, too
                download.is_ended.set()
                raise


class _Download:
    """The state that the threads of a download share. is_ended: set to end them before their next block."""

    def __init__(self, url: str, folder: Path, where: str, progress: TextProgress):
        self._url, self._folder, self._where, self._progress = url, folder, where, progress
        self._one_at_a_time = Lock()
        self.is_ended = Event()

    def fetch(self, shard: ShardFiles, sizes: dict[str, int]) -> None:
        """Downloads the files of a shard, which get their names if its hash is right."""
        digest, unfinished = hashlib.sha256(), {name: self._folder / f".{name}.unfinished" for name in sizes}
        try:
            for name, path in unfinished.items():
                self._fetch_file(name, path, sizes[name], digest.update)
            if self.is_ended.is_set():
                return
            if digest.hexdigest() != shard.sha256:
                named = " and ".join(sizes)
                what = f"the content of {named} in {self._url} is not what {INDEX} says"
                raise ConfigError([Problem(self._where, what, COPY_AGAIN)])
            for name, path in unfinished.items():
                path.replace(self._folder / name)
        finally:
            for path in unfinished.values():
                path.unlink(missing_ok=True)

    def _fetch_file(self, name: str, path: Path, size: int, add: Callable[[bytes], None]) -> None:
        num_bytes = 0
        with path.open("wb") as file:
            try:
                for block in blocks_of(self._url, name, self._where):
                    num_bytes += len(block)
                    if self.is_ended.is_set() or num_bytes > size:
                        break
                    file.write(block)
                    add(block)
                    with self._one_at_a_time:
                        self._progress.advance(len(block))
            except FileNotFoundError as error:
                raise ConfigError([Problem(self._where, f"{self._url}/{name} is missing", COPY_AGAIN)]) from error
            file.flush()
            os.fsync(file.fileno())
        if num_bytes != size and not self.is_ended.is_set():
            there = f"more than {size:,}" if num_bytes > size else f"{num_bytes:,}"
            what = f"{self._url}/{name} has {there} bytes; {INDEX} says {size:,}"
            raise ConfigError([Problem(self._where, what, COPY_AGAIN)])


def _other_disk() -> str:
    earlier = f"earlier downloads are in {cache_of_shards()}"
    return f"free disk space ({earlier}), or set XDG_CACHE_HOME to a folder of another disk"
