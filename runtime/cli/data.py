"""Runs `meshloom data`: turns a declared corpus into token shards, which `data=tokens` reads."""

import argparse
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import MISTAKE, ConfigError, Problem, all_of, raise_if_any
from meshloom.compiler.core.format import counted
from meshloom.compiler.core.visible import write_error
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.data_spec import (
    ChatsSource,
    DataSpec,
    HuggingFaceTokenizer,
    OneSource,
    ShardsSpec,
    Source,
    TokenizerSpec,
)
from meshloom.compiler.declare.overrides import override
from meshloom.compiler.declare.run_spec import RunSpec

from ..core.failures import STORAGE, RunFailed
from ..core.files import LOCK, locked, replace_json
from ..data.chats import SIDES, chat_reader, how_masked
from ..data.corpus import left_out_chats, no_documents
from ..data.documents import CorpusPart, corpus_parts, num_text_bytes, unread_keys
from ..data.progress import TextProgress
from ..data.show import show_document
from ..data.store import INDEX, PROGRESS, Index, StoredTokenizer, name_hash, read_index
from ..data.tokenize import encode_corpus
from ..data.tokenizers import END_OF_DOCUMENT, Tokenizer, open_tokenizer, train_bpe
from ..data.write import CorpusProgress, ShardWriter
from ..processes.distributed import Processes
from ..processes.process_log import say_command
from ..processes.stop import StopRequest
from ..train.display import announce, show_rows
from .results import DataResult

WHERE = "shards.directory"
BPE_FILE = "tokenizer.json"
OURS = re.compile(r"\d+\.(tokens|documents|trained)|tokenizer\.\w+")  # files of unfinished shards
DOCUMENTS = "the documents that are being tokenised"


@dataclass(frozen=True)
class CorpusJob:
    """A corpus that exists. tokenizer: None if one is trained first. corpus: all that the shards depend on, by key.
    done: the index, if all shards are written. started: the progress of an earlier start, if any."""

    spec: RunSpec
    parts: list[CorpusPart]
    tokenizer: Tokenizer | None
    corpus: dict[str, Any]
    done: Index | None
    started: CorpusProgress | None

    @property
    def folder(self) -> Path:
        return Path(self.spec.shards.directory)


def prepare_corpus(spec: RunSpec) -> CorpusJob:
    """Checks all that can be checked before the first text is read. Raises ConfigError with all problems."""
    (source, parts), tokenizer = _text_and_tokenizer(spec.data, spec.shards)
    if source.kind == "preferences":
        what = "holds pairs, and shards hold documents: a run would learn the rejected answers, too"
        raise ConfigError([Problem("data.source", what, "train on the files: objective=dpo data=preferences")])
    parts = _chats_of(source, tokenizer) or parts
    corpus = _declaration(spec, source, parts, tokenizer)
    folder = Path(spec.shards.directory)
    done = read_index(folder, WHERE) if (folder / INDEX).exists() else None
    started = _read_progress(folder / PROGRESS) if (folder / PROGRESS).exists() and not done else None
    if found := done or started:
        different = [key for key in {**corpus, **found.corpus} if corpus.get(key) != found.corpus.get(key)]
        if different and started and started.has_failed:  # by what is corrected now
            return CorpusJob(spec, parts, tokenizer, corpus, None, None)
        what = f"{folder} holds shards of something else: not the same {', '.join(different)}"
        raise_if_any([Problem(WHERE, what, "name another directory, or delete this one")] if different else [])
    elif folder.exists() and (not folder.is_dir() or any(path.name != LOCK for path in folder.iterdir())):
        what = f"{folder} holds other files" if folder.is_dir() else f"{folder} is a file"
        raise ConfigError([Problem(WHERE, what, "name a directory that is empty or does not exist")])
    return CorpusJob(spec, parts, tokenizer, corpus, done, started)


def tokenize_corpus(job: CorpusJob, console: Console) -> int:
    """Writes the shards, from where an earlier start has stopped. Returns the exit code. Raises ConfigError for texts
    that cannot be read or encoded, and RunFailed for a disk that is full; either way the same line goes on, and a
    corrected one begins anew."""
    start = time.perf_counter()
    with _told(job.folder, "cannot be made", MISTAKE):
        job.folder.mkdir(parents=True, exist_ok=True)
    busy = Problem(WHERE, f"another process writes into {job.folder}", "wait for it, or name another directory")
    stopping = StopRequest(Processes(), waits_for=DOCUMENTS)
    with _told(job.folder, "cannot be written", STORAGE), locked(job.folder, busy), stopping as stop:
        job = prepare_corpus(job.spec)  # another process may have written meanwhile
        if job.done:
            _show(job, job.done, console, ("nothing to do", f"{job.folder} is finished"))
            return 0
        try:
            index = _write(job, console, stop)
        except _StoppedError:
            assert stop.signal
            write_error(f"stopped by {stop.signal.name}; the same line goes on from here")
            return stop.exit_code
        except ConfigError:
            _mark_failed(job.folder)
            raise
    _show(job, index, console, ("time", f"{time.perf_counter() - start:.0f} s"))
    return 0


@contextmanager
def _told(folder: Path, what: str, exit_code: int) -> Iterator[None]:
    """Turns an error of the disk within the `with` into RunFailed, with the key of the folder."""
    try:
        yield
    except OSError as error:
        fix = f"free space there, give this process access to it, or choose another {WHERE}; the same line goes on"
        told = Problem(WHERE, f"{error.filename or folder} {what}: {error.strerror or error}", fix)
        raise RunFailed(told, exit_code) from error


def _mark_failed(folder: Path) -> None:
    """Lets a start with corrected words or texts begin anew in a folder whose texts could not be read."""
    progress = _read_progress(folder / PROGRESS)
    replace_json(folder / PROGRESS, progress.model_copy(update={"has_failed": True}).model_dump())


class _StoppedError(Exception):
    """Raised when a signal has asked to stop, after all progress was written."""


def _text_and_tokenizer(data: DataSpec, shards: ShardsSpec) -> tuple[Any, ...]:
    """Returns the source of documents with its parts, and the tokenizer; None for one that is to be trained."""
    return all_of(lambda: _text_source(data.source), lambda: _tokenizer(data.tokenizer, shards.bpe_vocab_size))


def _text_source(source: Source) -> tuple[OneSource, list[CorpusPart]]:
    if source.kind == "mixture":
        fix = "write each part by itself, and train on a mixture of sources of kind tokens"
        raise ConfigError([Problem("data.source", "is a mixture", fix)])
    return source, corpus_parts(source, "data.source")


def _chats_of(source: OneSource, tokenizer: Tokenizer | None) -> list[CorpusPart]:
    """Returns the parts of a source of chats, which the tokenizer renders; none of another source. Raises ConfigError
    for a tokenizer that knows no chats."""
    if not isinstance(source, ChatsSource):
        return []
    chat_reader(source, "data.source", tokenizer)
    return corpus_parts(source, "data.source", tokenizer)


def _tokenizer(declared: TokenizerSpec | None, vocab_size: int | None) -> Tokenizer | None:
    if declared is None:
        raise ConfigError([Problem("data.tokenizer", "there is none", "choose one: data/tokenizer=bytes")])
    if vocab_size is None:
        return open_tokenizer(declared)
    if declared.kind != "bytes":
        what = f"a tokenizer is to be trained, and data.tokenizer is '{declared.kind}'"
        raise ConfigError([Problem("shards.bpe_vocab_size", what, "set it to null, or use data/tokenizer=bytes")])
    return None


def _declaration(
    spec: RunSpec, source: OneSource, parts: list[CorpusPart], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Returns all that the bytes of the shards depend on, by key, as flat JSON."""
    files = hashlib.sha256(os.fsencode("".join(f"{part.name}\0{part.num_bytes}\0" for part in parts))).hexdigest()
    declared = {f"data.source.{key}": value for key, value in source.model_dump(mode="json").items() if key != "paths"}
    corpus: dict[str, Any] = {key: spec.compared_value(key, value) for key, value in declared.items()}
    corpus |= {"num_files": len(parts), "num_bytes": sum(part.num_bytes for part in parts), "files": files}
    if tokenizer:
        corpus |= {f"data.tokenizer.{key}": value for key, value in asdict(tokenizer.identity).items()}
    shards = spec.shards.model_dump(exclude={"directory"})
    return corpus | {f"shards.{key}": value for key, value in shards.items()}


def _read_progress(path: Path) -> CorpusProgress:
    try:
        return CorpusProgress.model_validate_json(path.read_bytes())
    except ValidationError as error:
        what = f"{path} is damaged: {error.errors(include_url=False)[0]['msg']}"
        raise ConfigError([Problem(WHERE, what, "delete the directory, or name another one")]) from error


def _write(job: CorpusJob, console: Console, stop: StopRequest) -> Index:
    progress = job.started.model_copy(update={"has_failed": False}) if job.started else CorpusProgress(
        corpus=job.corpus, tokenizer=None, shards=(), num_tokens=0, num_documents=0, largest_token=-1,
        num_text_bytes=0, num_empty=0, part=0, document=0,
    )  # fmt: skip
    if job.started and progress.total_documents:
        done = f"{counted(progress.total_documents, 'document')}, {counted(progress.total_tokens, 'token')}"
        announce(console, f"going on after {done}")
    if not job.started:
        for path in filter(lambda path: OURS.fullmatch(path.name), job.folder.iterdir()):
            path.unlink()  # what a failed start of other texts has left
        replace_json(job.folder / PROGRESS, progress.model_dump())
    tokenizer = job.tokenizer or _trained_bpe(job, console, stop)
    identity = tokenizer.identity
    progress = progress.model_copy(update={"tokenizer": StoredTokenizer(**asdict(identity))})
    limit = job.spec.shards.num_tokens_per_shard
    with ShardWriter(job.folder, progress, identity.dtype, num_tokens_per_shard=limit) as writer:
        writer.commit()
        if tokenizer.file and tokenizer.file.parent.resolve() != job.folder.resolve():
            shutil.copyfile(tokenizer.file, job.folder / f"tokenizer{tokenizer.file.suffix}")
        encoded = encode_corpus(
            job.parts, tokenizer, part=progress.part, document=progress.document, where="data.source"
        )
        total = num_text_bytes(job.parts)
        with TextProgress(console, "tokenising", total=total, completed=progress.num_text_bytes) as shown:
            for batch in encoded:
                writer.add(batch)
                shown.advance(batch.num_text_bytes)
                if stop.signal:
                    writer.commit()
                    raise _StoppedError
        if writer.done.total_documents == 0:
            raise ConfigError([no_documents(_text_source(job.spec.data.source)[0], "data.source")])
        return writer.finish()


def _trained_bpe(job: CorpusJob, console: Console, stop: StopRequest) -> Tokenizer:
    """Returns the BPE of this corpus: trained now, or before this was stopped."""
    path, vocab_size = job.folder / BPE_FILE, job.spec.shards.bpe_vocab_size
    assert vocab_size
    if not path.exists():
        problems: list[Problem] = []
        with TextProgress(console, "reading for the BPE", total=job.spec.shards.bpe_text_bytes) as shown:
            train_bpe(_texts_for_bpe(job, shown, problems, stop), vocab_size, path)
        raise_if_any(problems)
        announce(console, f"trained a BPE of {vocab_size:,} tokens: {path}")
    return open_tokenizer(HuggingFaceTokenizer(kind="huggingface", path=str(path), end_of_document=END_OF_DOCUMENT))


def _texts_for_bpe(job: CorpusJob, shown: TextProgress, problems: list[Problem], stop: StopRequest) -> Iterator[bytes]:
    """Yields about `shards.bpe_text_bytes` of the corpus: documents from all over it, by the hashes of their names."""
    wanted = job.spec.shards.bpe_text_bytes
    share = min(1.0, wanted / max(1, sum(part.num_bytes for part in job.parts)))
    num_bytes = 0
    for part in job.parts:
        for document in part.read(0):
            if stop.signal:
                raise _StoppedError
            if isinstance(document, Problem):
                problems.append(document)
                return
            if not isinstance(document.content, bytes):
                what = f"document '{document.name}' is tokens already"
                problems.append(Problem("shards.bpe_vocab_size", what, "set it to null"))
                return
            if name_hash(document.name) / 2**64 < share:
                num_bytes += len(document.content)
                shown.advance(len(document.content))
                yield document.content
                if num_bytes >= wanted:
                    return


def _show(job: CorpusJob, index: Index, console: Console, first: tuple[str, str]) -> None:
    """Shows how much was written, and the command that trains on it."""
    size = index.tokenizer.vocab_size
    counts = (
        f"{counted(index.num_documents, 'document')}, {counted(index.num_tokens, 'token')} of {index.dtype}, "
        f"{counted(len(index.shards), 'shard')}"
    )
    left_out = f"{counted(index.num_empty, 'document')} without text"
    if index.masked_by:
        left_out = left_out_chats(index.num_empty, has_pairs=False)
    tokenizer = f"{index.tokenizer.kind}, {size:,} tokens"
    rows = [first, ("written", counts), *([("left out", left_out)] if index.num_empty else [])]
    rows += [("trained on", how_masked(index.masked_by))] if index.masked_by else []
    rows += (
        [("not read", f"the chat template does not read {' or '.join(unread)}")]
        if (unread := unread_keys(job.parts))
        else []
    )
    show_rows(console, [*rows, ("tokenizer", tokenizer), ("directory", str(job.folder))])
    words = ["data=tokens", override("data.source.directory", str(job.folder)), f"model.vocab_size={size}"]
    words += ["data.packing=first_fit", "data.isolate_documents=true"] if index.masked_by else []
    say_command(console, "train on it", ["meshloom", "train", *words])


def show_example(spec: RunSpec) -> None:
    """Shows a document of the corpus, or a pair. Raises ConfigError if there is none that can be read."""
    (source, parts), tokenizer = _text_and_tokenizer(spec.data, spec.shards)
    if tokenizer is None:
        raise ConfigError([Problem("shards.bpe_vocab_size", "there is no BPE yet to show tokens of", "leave it out")])
    parts = _chats_of(source, tokenizer) or parts
    sides = SIDES if source.kind == "preferences" else ("",)
    show_document(Console(), (one for part in parts for one in part.read(0)), tokenizer, "data.source", sides=sides)


def data_command(request: Request, flags: argparse.Namespace) -> int:
    """Writes the shards, or shows one document. Raises ConfigError for a corpus that cannot be read."""
    if flags.show:
        read_spec(request, then=show_example)
        return 0
    job = read_spec(request, then=prepare_corpus)
    exit_code = tokenize_corpus(job, Console())
    if flags.json and exit_code == 0:
        index = read_index(job.folder, WHERE)
        flags.result = DataResult(directory=str(job.folder), index=index).model_dump(mode="json")
    return exit_code
