"""Small files that a kill must not leave half written."""

import json
import os
from pathlib import Path
from typing import Any


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
