"""Reads, writes and locks files and folders: whole small files, hashes, and folders behind gs:// and s3://.

Behind a URL a folder is a prefix of names. etils.epath gives it pathlib's methods; fsspec, below epath, does the rest.
TensorStore writes there without fsspec, so fsspec must not cache its listings.
"""

import hashlib
import itertools
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import fsspec.config
from etils import epath
from filelock import FileLock, Timeout

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.places import is_url

Folder = Path | epath.Path

PACKAGES = {"gs": "gcs", "gcs": "gcs", "s3": "s3"}  # extras of pyproject.toml, by scheme
BLOCK_BYTES = 2**24  # that are read at once from a file
_PROBE = ".meshloom-can-write"
LOCK = ".lock"  # a file: network file systems cannot lock directories
SECONDS_OF_A_LOOK = 0.2  # `is_held` takes the lock for an instant; a run must not be refused for that


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
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


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
