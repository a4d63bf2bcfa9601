"""The scripts of continuous integration end at the first command that fails, and say so by their exit code."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = next(folder / ".ci" for folder in Path(__file__).parents if (folder / ".ci").is_dir())
COMMANDS = ("python", "pip", "meshloom", "pytest", "ruff", "pyright", "lint-imports", "chromium")
# Notes that it was called, and fails where it is the FAIL_AT-th that was.
COMMAND = """\
#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
[ "$(basename "$0") $1" = "python -m" ] && mkdir -p "$3/bin" && echo 'deactivate() { :; }' > "$3/bin/activate"
echo "jax 1.0"
[ "$(wc -l < "$CALLS")" -ne "$FAIL_AT" ]
"""


def _run(script: str, folder: Path, fail_at: int) -> tuple[int, list[str]]:
    """Returns the exit code, and the commands that were called."""
    calls = folder / "calls"
    calls.write_text("")
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls), "FAIL_AT": str(fail_at),
                   "PYTHON": "python", "NEXT_PYTHON": "python"}  # fmt: skip
    done = subprocess.run(["bash", SCRIPTS / script], env=environment, capture_output=True, timeout=60)
    return done.returncode, calls.read_text().splitlines()


@pytest.mark.parametrize("script", ["run", "release"])
def test_a_script_ends_at_the_first_command_that_fails(script, tmp_path):
    for name in COMMANDS:
        (tmp_path / name).write_text(COMMAND)
        (tmp_path / name).chmod(0o755)
    code, calls = _run(script, tmp_path, fail_at=0)
    assert code == 0
    assert "pytest --tier=ci" in calls
    for number in range(1, len(calls) + 1):
        code, until_then = _run(script, tmp_path, fail_at=number)
        assert code != 0, f"{calls[number - 1]} failed, and the script went on"
        assert len(until_then) == number
