"""A forked command does what the same command does in a fresh Python."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from support import forked
from support.forked import Forked, Process, read_at_import, start
from support.tiers import tiered

STATE = """
import json, locale, os, random, signal, sys, threading, warnings
import multiprocessing.spawn
handlers = {number.name: str(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()
            if isinstance(number, signal.Signals)}
streams = [[stream.encoding, stream.errors, stream.line_buffering, stream.fileno()]
           for stream in (sys.stdin, sys.stdout, sys.stderr)]
print(json.dumps({
    "words": [sys.argv, __name__, sys.modules["__main__"].__dict__ is globals()],
    "place": [os.getcwd(), sys.path, sys.executable, list(sys.flags)],
    "environment": dict(os.environ),
    "signals": [handlers, len(signal.pthread_sigmask(signal.SIG_BLOCK, []))],
    "files": [streams, sorted(os.listdir("/proc/self/fd"))[:3], os.getpgrp() == os.getpid()],
    "threads": [thread.name for thread in threading.enumerate()],
    "workers": multiprocessing.spawn.get_preparation_data("worker")["sys_argv"],
    "exits": [sys.excepthook is sys.__excepthook__, len(warnings.filters) > 0],
}))
print(random.random(), file=sys.stderr)
"""
UNTIL_A_SIGNAL = "import atexit, time; atexit.register(print, 'exit'); print('ready', flush=True); time.sleep(60)"
SMALL = ("model=linear_stack", "model.num_layers=2", "model.embed_dim=32", "sequence_length=16", "data=synthetic",
         "target=cpu-2", "global_batch_size=8", "schedule.num_warmup_steps=1")  # fmt: skip


def ended(process: Process) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def both(*words: str, cwd: Path) -> list[tuple[int, str, str]]:
    processes = [start(words, cwd=cwd), start(words, cwd=cwd, is_forked=False)]
    assert isinstance(processes[0], Forked)
    return [ended(process) for process in processes]


@pytest.mark.parametrize("hangup", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_forked_process_begins_as_a_fresh_one(tmp_path, hangup):
    before = signal.signal(signal.SIGHUP, hangup)  # whatever it was when the server began
    try:
        (code, out, err), (expected_code, expected, other) = both("-c", STATE, "a", "b=c", cwd=tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (code, expected_code) == (0, 0), err
    ours, expected = json.loads(out), json.loads(expected)
    assert expected["signals"][0]["SIGHUP"] == str(int(hangup))
    for kind, values in expected.items():
        assert ours[kind] == values, kind
    assert err != other, "random numbers"


@pytest.mark.parametrize(
    ("code", "returncode"),
    [
        ("import sys; sys.exit('why')", 1),
        ("import sys; sys.exit(7)", 7),
        ("raise ValueError('why')", 1),
        ("import os; os._exit(3)", 3),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import sys; print('a', end=''); sys.stderr.write('b')", 0),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()", 0),
    ],
)
def test_it_ends_as_a_fresh_one(tmp_path, code, returncode):
    ours, expected = both("-c", code, cwd=tmp_path)
    assert ours[:2] == expected[:2]
    assert ours[0] == returncode
    assert ours[2].splitlines()[-1:] == expected[2].splitlines()[-1:]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_act_on_it_as_on_a_fresh_one(number):
    results = []
    for is_forked in (True, False):
        process = start(["-c", UNTIL_A_SIGNAL], is_forked=is_forked)
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.01)
        process.send_signal(number)
        code, out, err = ended(process)
        results.append((code, out, err.splitlines()[-1:]))
        process.kill()  # does nothing to a process that has ended
    assert results[0] == results[1]
    assert results[0][0] == -number


def test_a_signal_to_its_session_reaches_it_and_what_it_started():
    code = "import subprocess; print('ready', flush=True); subprocess.run(['sleep', '60'])"
    process = start(["-c", code], start_new_session=True)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGKILL)
    assert ended(process) == (-signal.SIGKILL, "", "")


LINES = {
    "explained": ("explain", *SMALL),
    "refused": ("explain", "modl=tiny", "target=cpu-3x"),
    "a sweep": ("explain", "-m", *SMALL, "seed=1,2", "hydra.sweep.dir=sweep"),
    "trained": ("train", *SMALL, "num_steps=2", "compilation_cache=null", "hydra.run.dir=run"),
}


def without_times(text: str) -> str:
    """Leaves out how long something took, such as "8 ms" or "1.2 s", and the line that says what took how long."""
    return re.sub(r"[\d.,]+ [mµ]?s\b|[\d.,]+(?= tokens/s)|^time: .*", "", text, flags=re.M)


@pytest.mark.parametrize("name", tiered(LINES, plain=["refused"]))
def test_a_command_says_the_same(tmp_path, name):
    results = []
    for is_forked in (True, False):
        folder = tmp_path / str(is_forked)
        folder.mkdir()
        code, out, err = ended(start(["-m", "meshloom", *LINES[name]], cwd=folder, is_forked=is_forked))
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "checkpoints" not in path.parts)
        lines = sorted(without_times(out).splitlines())  # points of a sweep end in any order
        results.append((code, lines, err, [re.sub(r"\d+", "0", file) for file in files]))
    assert results[0] == results[1]
    assert results[0][0] == (2 if name == "refused" else 0)


def test_what_is_read_at_import_is_read_by_a_fresh_process():
    assert not read_at_import(os.environ | {"XLA_FLAGS": "--a", "XDG_CACHE_HOME": "b", "JAX_COORDINATOR_PORT": "1"})
    changed = {"JAX_ENABLE_X64": "1", "PYTHONPATH": "a", "LC_ALL": "C"}
    assert read_at_import(os.environ | changed) == {*changed}
    assert isinstance(process := start(["-c", ""], env=os.environ | {"PYTHONPATH": "a"}), subprocess.Popen)
    assert ended(process) == (0, "", "")


@pytest.mark.ci
def test_without_its_server_nothing_falls_back():
    process = start(["-c", "import time; time.sleep(60)"], stdout=None, stderr=None)
    server, requests = forked._server()
    server.kill()
    try:
        for lost in (process.wait, lambda: start(["-c", ""], stdout=None, stderr=None)):
            with pytest.raises(RuntimeError, match="the server of forked processes has ended"):
                lost()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        forked._server.cache_clear()
        requests.close()
