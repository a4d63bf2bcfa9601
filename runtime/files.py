"""Small files that a kill must not leave half written."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file so that it is at each moment either the old one or the new one, whole."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    os.replace(unfinished, path)
