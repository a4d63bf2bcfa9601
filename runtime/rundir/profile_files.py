"""Where the traces of a run lie, and what is made of them."""

from pathlib import Path

FOLDER = "profile"
TEXT = "train.hlo.txt"  # the traced program
STEP = "train"  # the annotation around each step, with its number as step_num


def place_of(run_dir: Path, process: int) -> Path:
    """Returns the folder of one process's traces; processes of one host would overwrite each other's files."""
    return run_dir / FOLDER / f"process-{process}"
