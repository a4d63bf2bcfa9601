"""The scripts of continuous integration end at the first command that fails, and say so by their exit code."""

import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPTS = next(folder / ".ci" for folder in Path(__file__).parents if (folder / ".ci").is_dir())
COMMANDS = ("python", "pip", "uv", "meshloom", "pytest", "ruff", "pyright", "lint-imports", "chromium")
# Notes that it was called, and fails where it was called as FAIL.
COMMAND = """\
#!/bin/sh
line=$(basename "$0")${*:+ $*}
echo "$line" >> "$CALLS"
[ "$(basename "$0") $1" = "python -m" ] && mkdir -p "$3/bin" && echo 'deactivate() { :; }' > "$3/bin/activate"
echo "jax 1.0"
[ "$line" != "$FAIL" ]
"""


def _run(script: str, folder: Path, fail: str) -> tuple[int, list[str]]:
    """Returns the exit code, and the commands that were called, in the order of their ends."""
    calls = folder / "calls"
    calls.write_text("")
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls), "FAIL": fail,
                   "PYTHON": "python", "NEXT_PYTHON": "python"}  # fmt: skip
    done = subprocess.run(["bash", SCRIPTS / script], env=environment, capture_output=True, timeout=60)
    lines = calls.read_text().splitlines()
    return done.returncode, [re.sub(r"/tmp/\S+", "FOLDER", line) for line in lines]


@pytest.mark.parametrize("script", ["run", "release"])
def test_a_script_ends_after_a_command_that_fails(script, tmp_path):
    """Some commands run beside others, so that the one after a failure may have begun; the last one must not."""
    for name in COMMANDS:
        (tmp_path / name).write_text(COMMAND)
        (tmp_path / name).chmod(0o755)
    code, calls = _run(script, tmp_path, fail="")
    assert code == 0
    assert f"pytest --tier=plain,ci{' --prove-again' * (script == 'release')}" in calls
    assert "pyright" in calls
    for failing in {call for call in calls if "FOLDER" not in call}:
        code, until_then = _run(script, tmp_path, failing)
        assert code != 0, f"{failing} failed, and the script said that all is well"
        assert failing == calls[-1] or calls[-1] not in until_then, f"{failing} failed, and the script went on"
