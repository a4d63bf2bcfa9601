"""The files of a run directory, as documented and as written."""

import re
from pathlib import Path


def documented_files(command: str) -> set[str]:
    """Returns what docs/running.md says that a command leaves in its run directory: files, and folders by name."""
    lines = (Path(__file__).parents[2] / "docs" / "running.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    column = next(row for row in rows if row[0] == "file").index(f"`{command}`")
    written = [re.findall(r"`(.*?)`", row[0]) for row in rows if row[column : column + 1] == ["yes"]]
    return {name if name.startswith("logs/") else name.split("/")[0] for names in written for name in names}


def written_files(run_dir: Path) -> set[str]:
    """Returns what there is in a run directory, as `documented_files` names it."""
    names = {path.name for path in run_dir.iterdir()} - {"logs"}
    return names | {f"logs/{path.name.replace('process-0', 'process-N')}" for path in (run_dir / "logs").iterdir()}
