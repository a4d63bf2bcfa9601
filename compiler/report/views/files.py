"""The last line of a summary: the files that it is a view of."""

from collections.abc import Sequence
from pathlib import Path

from ...core.console import Console


def show_files(console: Console, files: Sequence[Path]) -> None:
    """Prints the names of files, each on its own line where they are too long for one: they are copied whole."""
    names = [str(file) for file in files]
    if console.is_terminal and len("files    " + "  ".join(names)) > console.width:
        console.line(("files", "bold"))
        for name in names:
            console.line("  " + name)
    elif names:
        console.line(("files", "bold"), "    " + "  ".join(names))
