"""Opens a declared source as sequences of both splits, with the identity of its content."""

import json
import shlex
from dataclasses import dataclass
from functools import cache
from typing import Any

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import counted
from meshloom.compiler.core.places import is_url
from meshloom.compiler.declare.data_spec import DataSpec, OneSource, PythonStdlibSource, SyntheticSource
from meshloom.compiler.declare.overrides import override
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.sharding.batch import batch_arrays

from .chats import how_masked
from .documents import corpus_parts, num_text_bytes
from .download import local_copy
from .packing import ConcatenatedSequences, PackedSequences, num_cut_turns
from .pairs import PairedSequences
from .progress import TextProgress
from .shards import open_shards
from .store import SPLITS, Split, TokenStore, TokenStream
from .tokenize import tokens_in_memory
from .tokenizers import Bytes, Tokenizer, TokenizerIdentity
from .user_sequences import UserSequences, open_user_sequences

Sequences = ConcatenatedSequences | PackedSequences | PairedSequences | UserSequences


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
    store, num_cut = open_store(data, source, where, tokenizer), 0
    for split in SPLITS:
        stream = TokenStream(store, split, data.held_out_fraction, data.held_out_by)
        if data.packing == "pairs":
            paired = sequences[split] = PairedSequences(stream, length)
            num_cut += paired.num_cut
            continue
        pack = ConcatenatedSequences if data.packing == "concatenate" else PackedSequences
        packed = sequences[split] = pack(stream, length, isolate_documents=data.isolate_documents)
        num_cut += num_cut_turns(stream, packed.cuts())
    content = {"kind": source.kind, "num_tokens": store.num_tokens, "content": store.content}
    counts = _counts(store, num_cut, length)
    return Corpus(*own, sequences, store.tokenizer, store.largest_token, content, counts, tokenizer)


def _counts(store: TokenStore, num_cut: int, length: int) -> str:
    """Returns the size of a corpus in words. num_cut: turns that go on in another sequence."""
    one = "chat" if store.masked_by else "document"
    counts = f"{counted(store.num_documents, one)}, {counted(store.num_tokens, 'token')}"
    if not store.masked_by:
        return counts + (f" ({store.num_empty:,} without text left out)" if store.num_empty else "")
    counts += f", {store.num_trained:,} trained on ({how_masked(store.masked_by)})"
    if store.num_empty:
        counts += f"; {counted(store.num_empty, 'chat')} without an answer left out"
    return counts + (f"; {counted(num_cut, 'turn')} cut by sequence_length={length}" if num_cut else "")


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

        store = tokens_in_memory(parts, tokenizer, where, advance)
    if store.num_documents == 0:
        raise ConfigError([no_documents(source, where)])
    return store


def no_documents(source: OneSource, where: str) -> Problem:
    """Returns the problem of a corpus in which all documents are empty."""
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
