"""Writes small files whole, hashes files, and removes directories that are still being written to."""

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from .stores import Folder, is_remote, remove_folder

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
