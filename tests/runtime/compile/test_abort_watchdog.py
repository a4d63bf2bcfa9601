"""A compiler that ends the process: told, kept, and not tried again. Processes are ended for real."""

import re
import signal
from pathlib import Path

import pytest

from meshloom.runtime.compile.abort_watchdog import read_abort_reason
from meshloom.runtime.compile.artifact import check_did_not_abort
from meshloom.runtime.core.failures import RunFailed
from support.commands import Ended, run_python
from support.forked import start

pytestmark = pytest.mark.ci

# Writes what a compiler would into the log, then ends as `end` says.
COMPILES = """
import os, signal, sys, time
from pathlib import Path
from meshloom.runtime.compile.abort_watchdog import abort_reported
log, kept_in, words, end = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
log.write_text("F1122 10:00:00.000000   1 old.cc:1] Check failed: of another program\\n")
with abort_reported(log, 2, during="compiling 2 of 3: scan", kept_in=kept_in):
    with log.open("a") as file:
        file.write(words)
    if end == "waits":
        time.sleep(60)
    eval(end)
"""
WARNING = "W1122 10:00:01.000000 7 a.cc:1] careful\n"
WHY = "b.cc:560] Check failed: x == y (0 vs. 1)"
FATAL = f"{WARNING}F1122 10:00:02.378044   19643 {WHY} \n"


def compile_in_a_process(tmp_path: Path, words: str, end: str) -> Ended:
    return run_python("-c", COMPILES, f"{tmp_path}/log", f"{tmp_path}/cache/kept", words, end)


def test_an_abort_is_told_with_what_was_compiled_and_kept(tmp_path):
    ended = compile_in_a_process(tmp_path, FATAL, "os.abort()")
    assert ended.returncode == -signal.SIGABRT
    problem, fix = ended.stderr.strip().splitlines()
    assert problem == f"error: the compiler: aborted while compiling 2 of 3: scan: {WHY}"
    assert fix.startswith(f"  fix: see {tmp_path / 'log'}")
    kept_in = tmp_path / "cache" / "kept"
    assert read_abort_reason(kept_in) == WHY
    with pytest.raises(RunFailed, match=re.escape(f"aborted on this program before: {WHY}")):
        check_did_not_abort(kept_in)


def test_an_abort_is_told_where_nothing_can_be_kept(tmp_path):
    (tmp_path / "cache").write_text("a file where a folder belongs")
    problem, _, warning = compile_in_a_process(tmp_path, FATAL, "os.abort()").stderr.strip().splitlines()
    assert problem.endswith(WHY)
    assert warning == f"warning: not kept in {tmp_path / 'cache'}: File exists"


def test_an_abort_is_told_before_the_process_is_gone(tmp_path):
    """Where it is the first process of a container, nothing is told behind it."""
    with start(["-c", COMPILES, f"{tmp_path}/log", f"{tmp_path}/kept", FATAL, "waits"], stdout=None) as process:
        assert process.stderr
        lines = [process.stderr.readline() for _ in range(2)]
        assert process.poll() is None
        process.kill()
    assert lines[1].startswith("error: the compiler: aborted while compiling 2 of 3")


def test_a_process_that_is_killed_does_not_blame_the_compiler(tmp_path):
    ended = compile_in_a_process(tmp_path, WARNING, "os.kill(os.getpid(), 9)")
    assert ended.stderr == "\nthe process was ended while compiling 2 of 3: scan\n"
    assert not (tmp_path / "cache").exists()
    check_did_not_abort(tmp_path / "cache" / "kept")


@pytest.mark.parametrize("end", ["None", "sys.exit(0)"])
def test_nothing_is_said_of_one_that_ends_well(tmp_path, end):
    ended = compile_in_a_process(tmp_path, WARNING, end)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert not (tmp_path / "cache").exists()
