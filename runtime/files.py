"""Small files that a kill must not leave half written, and directories that their writers must not bring back."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

QUIET_SECONDS, MOST_SECONDS = 1.0, 10.0


def replace_text(path: Path, text: str) -> None:
    """Write a file so that it is at each moment either the old one or the new one, whole: after a power cut too."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def replace_json(path: Path, value: Any) -> None:
    """The same for a value as JSON."""
    replace_text(path, json.dumps(value, indent=1) + "\n")


def remove_for_good(directories: Callable[[], Iterable[Path]]) -> None:
    """Remove the directories that there are, again and again until none has come back for QUIET_SECONDS.

    For what a failed save leaves: nothing tells when its writers have ended, and one that has not makes its directory
    anew, to put its file there. Gives up after MOST_SECONDS.
    """
    began = last_seen = time.monotonic()
    while (now := time.monotonic()) < min(last_seen + QUIET_SECONDS, began + MOST_SECONDS):
        for directory in directories():
            last_seen = now
            shutil.rmtree(directory, ignore_errors=True)
        time.sleep(QUIET_SECONDS / 20)
