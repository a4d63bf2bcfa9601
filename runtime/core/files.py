"""Small files that a kill must not leave half written, and directories that their writers must not bring back."""

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
    """Writes a file so that it is at each moment either the old one or the new one, whole: after a power cut too."""
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


def parse_json(content: bytes) -> Any:
    """Returns the value that the bytes spell. Raises ValueError for all that is not JSON in UTF-8, or nested too deeply
    to be read."""
    try:
        return json.loads(content.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def free_name(damaged: AnyFolder) -> AnyFolder:
    """Returns where something damaged goes, so that nothing is lost: `NAME.damaged`, `NAME.damaged1`, ..."""
    names = (damaged.with_name(f"{damaged.name}.damaged{number or ''}") for number in itertools.count())
    return next(path for path in names if not (path.exists() if is_remote(path) else os.path.lexists(path)))


def remove_for_good(directories: Callable[[], Iterable[Folder]]) -> None:
    """Removes existing directories, repeatedly until none has come back for QUIET_SECONDS.

    For what a failed save leaves: nothing tells when its writers have ended, and one that has not makes its directory
    anew, to put its file there. Gives up after MOST_SECONDS.
    """
    began = last_seen = time.monotonic()
    while (now := time.monotonic()) < min(last_seen + QUIET_SECONDS, began + MOST_SECONDS):
        for directory in directories():
            last_seen = now
            remove_folder(directory)
        time.sleep(QUIET_SECONDS / 20)
