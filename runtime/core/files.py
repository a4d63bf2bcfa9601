"""Reads, writes and locks files and folders: whole small files, hashes, and folders behind gs:// and s3://.

Behind a URL a folder is a prefix of names. etils.epath gives it pathlib's methods; fsspec, below epath, does the rest.
TensorStore writes there without fsspec, so fsspec must not cache its listings.

A manifest has the size and SHA-256 of each file of a folder, so that damage is found before anything is loaded. Orbax
does not check arrays: a flipped bit is loaded as another number. The manifest of a checkpoint is written into the
temporary directory of the save, before the rename that finishes it, so every finished checkpoint has one. Behind a URL
it lists only names and sizes: hashing would fetch everything again, and object stores check their content themselves.
"""

import hashlib
import itertools
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

import fsspec
import fsspec.config
from etils import epath
from filelock import FileLock, Timeout
from pydantic import NonNegativeInt, ValidationError

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.places import is_url
from meshloom.models.record import Record

Folder = Path | epath.Path

PACKAGES = {"gs": "gcs", "gcs": "gcs", "s3": "s3"}  # extras of pyproject.toml, by scheme
BLOCK_BYTES = 2**24  # that are read at once from a file
_PROBE = ".meshloom-can-write"
LOCK = ".lock"  # a file: network file systems cannot lock directories
SECONDS_OF_A_LOOK = 0.2  # `is_held` takes the lock for an instant; a run must not be refused for that
FILE = "manifest.json"
WRITTEN_LAST = {"_CHECKPOINT_METADATA", "commit_success.txt"}  # by Orbax, after the manifest; no array needs them


VerifiedBy = Literal["content", "sizes"]


logging.getLogger("gcsfs").setLevel(logging.ERROR)  # it warns for each file if it may not read the bucket's kind
for _scheme in ("s3", "gs", "gcs"):
    fsspec.config.conf.setdefault(_scheme, {}).setdefault("use_listings_cache", False)


def folder_at(text: str) -> Folder:
    """Returns the folder of a path or URL."""
    return epath.Path(text) if is_url(text) else Path(text)


def is_remote(folder: Folder) -> bool:
    """Returns True for a folder behind a URL."""
    return is_url(str(folder))


def absolute(folder: Folder) -> Folder:
    """Returns the absolute path without links; a URL unchanged."""
    return folder if is_remote(folder) else Path(os.path.realpath(folder))  # `resolve` raises for a link to itself


def file_sizes(folder: Folder) -> dict[str, int]:
    """Returns the sizes of all files in a folder and below, by path in it."""
    if not is_remote(folder):
        local = Path(folder)
        found = (path for path in sorted(local.rglob("*")) if path.is_file())
        return {path.relative_to(local).as_posix(): path.stat().st_size for path in found}
    system, place = _system(folder)
    infos = system.find(place, detail=True)
    return {name.removeprefix(place).lstrip("/"): info["size"] for name, info in sorted(infos.items())}


def remove_folder(folder: Folder) -> None:
    """Removes a folder and its content, as far as possible."""
    if not is_remote(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    system, place = _system(folder)
    if system.exists(place):
        system.rm(place, recursive=True)


def check_bucket(folder: Folder, where: str) -> None:
    """Raises ConfigError if a folder behind a URL cannot be read: a package, the bucket or access is missing."""
    if not is_remote(folder):
        return
    with _problems_at(folder, where, "read"):
        system, place = _system(folder)
        bucket = place.partition("/")[0]
        system.ls(place) if system.exists(place) else system.ls(bucket)


def check_writable(folder: Folder, where: str) -> None:
    """Raises ConfigError if nothing can be written into a folder behind a URL. Writes a small file and removes it."""
    if not is_remote(folder):
        return
    with _problems_at(folder, where, "written to"):
        system, place = _system(folder)
        system.pipe_file(f"{place}/{_PROBE}", b"1")
        system.rm_file(f"{place}/{_PROBE}")


def blocks_of(url: str, name: str, where: str) -> Iterator[bytes]:
    """Yields the content of a file in a folder behind a URL. Raises FileNotFoundError if there is none, and ConfigError
    if it cannot be read."""
    with _problems_at(url, where, "read", let_pass=FileNotFoundError):
        system, place = _system(url)
        file = system.open(f"{place.rstrip('/')}/{name}", "rb")
    with file:
        while True:
            with _problems_at(url, where, "read"):
                block = file.read(BLOCK_BYTES)
            if not block:
                return
            yield block


def what_store_said(error: BaseException) -> str:
    """Returns the error of a store in one line: each kind of store has its own exceptions."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _system(folder: Folder | str) -> tuple[Any, str]:
    system, place = fsspec.core.url_to_fs(str(folder))
    return system, str(place)


@contextmanager
def _problems_at(
    folder: Folder | str, where: str, done: str, *, let_pass: type[Exception] | tuple[()] = ()
) -> Iterator[None]:
    try:
        yield
    except let_pass:
        raise
    except ImportError as error:
        extra = PACKAGES.get(str(folder).partition("://")[0])
        fix = f"pip install 'meshloom[{extra}]'" if extra else str(error)
        raise ConfigError([Problem(where, f"'{folder}' needs a package that is not installed", fix)]) from error
    except Exception as error:
        what = f"'{folder}' cannot be {done}: {what_store_said(error)}"
        raise ConfigError([Problem(where, what, "check the name of the bucket, and your access to it")]) from error


AnyFolder = TypeVar("AnyFolder", bound=Folder)

QUIET_SECONDS, MOST_SECONDS = 1.0, 10.0


def replace_text(path: Path, text: str) -> None:
    """Writes a file so that at each moment, even after a power cut, it is either the old one or the new one."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Writes bytes in the same way."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        error.filename = error.filename or str(path)  # a full disk is told without one
        raise


def replace_json(path: Path, value: Any) -> None:
    """Writes a value as JSON in the same way."""
    replace_text(path, json.dumps(value, indent=1) + "\n")


def file_sha256(*paths: Path) -> str:
    """Returns the SHA-256 of the contents of files, one after the other, in hexadecimal."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def parse_json(content: bytes) -> Any:
    """Returns the value of JSON in UTF-8. Raises ValueError for anything else, and for JSON that is nested too
    deeply."""
    try:
        return json.loads(content.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def free_name(damaged: AnyFolder) -> AnyFolder:
    """Returns an unused name for something damaged, so that nothing is lost: `NAME.damaged`, `NAME.damaged1`, ..."""
    names = (damaged.with_name(f"{damaged.name}.damaged{number or ''}") for number in itertools.count())
    return next(path for path in names if not (path.exists() if is_remote(path) else os.path.lexists(path)))


def remove_for_good(directories: Callable[[], Iterable[Folder]]) -> None:
    """Removes existing directories, repeatedly until none has come back for QUIET_SECONDS.

    A failed save leaves directories. Nothing says when its writers have ended; one that has not creates its directory
    again for its file. Gives up after MOST_SECONDS.
    """
    began = last_seen = time.monotonic()
    while (now := time.monotonic()) < min(last_seen + QUIET_SECONDS, began + MOST_SECONDS):
        for directory in directories():
            last_seen = now
            remove_folder(directory)
        time.sleep(QUIET_SECONDS / 20)


@contextmanager
def locked(folder: Path, busy: Problem) -> Iterator[None]:
    """Locks the folder within the `with`; the system releases it when this process dies. Raises ConfigError with `busy`
    if another process holds it."""
    lock = FileLock(folder / LOCK, timeout=SECONDS_OF_A_LOOK)
    try:
        lock.acquire(poll_interval=SECONDS_OF_A_LOOK / 10)
    except Timeout:
        raise ConfigError([busy]) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def in_turn(folder: Path, say_waits: Callable[[], None]) -> Iterator[None]:
    """Locks the folder within the `with`, after waiting for other processes. Calls `say_waits` once if it waits."""
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=SECONDS_OF_A_LOOK, poll_interval=SECONDS_OF_A_LOOK / 10)
    except Timeout:
        say_waits()
        lock.acquire(poll_interval=SECONDS_OF_A_LOOK)
    try:
        yield
    finally:
        lock.release()


def is_held(folder: Path) -> bool:
    """Returns True while a process holds the folder. Creates nothing and does not wait."""
    path = folder / LOCK
    if not path.exists():
        return False
    lock = FileLock(path, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        return True
    except OSError:  # a read-only folder: no process of this account works in it
        return False
    lock.release()
    return False


class FileEntry(Record):
    bytes: NonNegativeInt
    sha256: str | None  # None: unknown, because the file is behind a URL


class Manifest(Record):
    """The content of `manifest.json`. step: the steps done in a checkpoint; null for other folders. files: the entries
    by path in the folder."""

    version: Literal[2]
    step: NonNegativeInt | None
    files: dict[str, FileEntry]


def write_manifest(folder: Folder, *, step: int | None = None) -> None:
    """Writes the manifest of a folder that is complete. Reads each file once, if it is on a disk."""
    sizes = _sizes(folder)
    hashes = dict.fromkeys(sizes) if is_remote(folder) else _hashes(Path(folder), sizes)
    files = {name: FileEntry(bytes=size, sha256=hashes[name]) for name, size in sizes.items()}
    manifest = Manifest(version=2, step=step, files=files)
    if is_remote(folder):
        (folder / FILE).write_text(manifest.model_dump_json(indent=1) + "\n")  # a store shows whole files alone
    else:
        replace_json(Path(folder) / FILE, manifest.model_dump())


def saved_hash(folder: Folder, name: str) -> str | None:
    """Returns the SHA-256 that a file had when its folder was saved; None where the manifest does not say."""
    try:
        entry = Manifest.model_validate_json((folder / FILE).read_bytes()).files.get(name)
    except (OSError, ValidationError):
        return None
    return entry and entry.sha256


def damage_in(
    folder: Folder, *, expected: Collection[str], step: int | None = None, compare: VerifiedBy = "content"
) -> str | None:
    """Returns the first difference from what was saved, as a phrase; None if there is none.

    expected: files that every manifest of this kind of folder lists. step: the step that the folder should hold.
    compare: "content" reads every byte of each file; "sizes" compares sizes only, as is always done behind a URL.
    """
    if not folder.is_dir():
        return "it is a file, not a directory" if folder.exists() else "there is no such directory"
    try:
        manifest = Manifest.model_validate_json((folder / FILE).read_bytes())
    except FileNotFoundError:
        return f"it has no {FILE}: it was not saved to its end"
    except (ValidationError, IsADirectoryError):  # the text is not what write_manifest writes
        return f"its {FILE} is damaged"
    if manifest.step != step:
        return f"it was saved as step {manifest.step}"
    files, there = manifest.files, _sizes(folder)
    if missing := sorted(files.keys() - there.keys()):
        return f"{missing[0]} is missing"
    # Operating systems leave hidden files. A file that is not hidden was saved, and has lost its entry.
    is_hidden = {name: any(part.startswith(".") for part in PurePosixPath(name).parts) for name in there}
    unlisted = {name for name in there.keys() - files.keys() if not is_hidden[name]}
    if unlisted := sorted(unlisted | (set(expected) - files.keys())):
        return f"its {FILE} does not list {unlisted[0]}"
    for name, entry in files.items():
        if (num_bytes := there[name]) != entry.bytes:
            return f"{name} has {num_bytes:,} bytes, {entry.bytes:,} were saved"
    if compare == "sizes" or is_remote(folder):
        return None
    saved = {name: entry.sha256 for name, entry in files.items() if entry.sha256 is not None}
    now = _hashes(Path(folder), saved)
    first = next((name for name in saved if now[name] != saved[name]), None)
    return f"the content of {first} has changed" if first else None


def _sizes(folder: Folder) -> dict[str, int]:
    """Returns the sizes of the files that a manifest lists."""
    return {name: size for name, size in file_sizes(folder).items() if name not in {FILE, *WRITTEN_LAST}}


def _hashes(folder: Path, names: Iterable[str]) -> dict[str, str]:
    names = list(names)
    with ThreadPoolExecutor() as threads:
        return dict(zip(names, threads.map(file_sha256, [folder / name for name in names]), strict=True))
