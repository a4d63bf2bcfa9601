"""Rows of a table that `meshloom compile` makes, each kept as a line of JSON so that none is compiled twice."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshloom.compiler.core.errors import DOES_NOT_FIT

Overrides = tuple[str, ...]
NOT_COMPILED = "not compiled"


def compile_report(overrides: Overrides) -> tuple[dict[str, Any], float]:
    """report.json of the command, and the seconds that it took. Raises CalledProcessError where there is none."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as run_dir:
        command = [sys.executable, "-m", "meshloom", "compile", *overrides, f"hydra.run.dir={run_dir}"]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if done.returncode not in (0, DOES_NOT_FIT):
            done.check_returncode()
        report = json.loads(Path(run_dir, "report.json").read_text())
    return report, round(time.perf_counter() - start, 1)


def read_kept(path: Path) -> dict[Overrides, dict[str, Any]]:
    """The rows of a file by what they were compiled from; none where there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {tuple(row["overrides"]): row for row in map(json.loads, lines)}


def keep(path: Path, name: str, overrides: Overrides, facts: dict[str, Any]) -> None:
    """One more row."""
    with path.open("a") as file:
        file.write(json.dumps({"name": name, "overrides": overrides} | facts) + "\n")


def add_row(path: Path, name: str, overrides: Overrides, facts_of: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
    """Compile and keep one more row: what facts_of makes of the report. False, and a line that says so, where the
    command fails; why, it has said itself."""
    try:
        report, seconds = compile_report(overrides)
    except subprocess.CalledProcessError as error:
        print(f"{NOT_COMPILED}, exit code {error.returncode}: {name}: {' '.join(overrides)}", file=sys.stderr)
        return False
    keep(path, name, overrides, facts_of(report) | {"seconds": seconds})
    return True
