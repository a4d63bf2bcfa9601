"""A compile says what it is doing, on a terminal and in a log."""

import io
import re
import time

import pytest

from meshloom.compiler.core.console import Console
from meshloom.runtime.compile import watched as module
from meshloom.runtime.compile.watched import Phases

WORK = "compiling 2 of at most 6: windowed_einsum"


@pytest.fixture(autouse=True)
def _minutes_of_50_ms(monkeypatch):
    monkeypatch.setattr(module, "FIRST_SECONDS", 0.05)


def test_a_terminal_shows_the_work_its_phase_and_the_time_and_nothing_is_left():
    out = io.StringIO()
    with Phases(Console(out, is_terminal=True, width=80), WORK) as phases:
        phases.begin("in XLA")
        time.sleep(0.3)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert f"{WORK}: in XLA 0:00:00" in shown
    assert out.getvalue().rstrip().endswith("\x1b[2K")  # the line is erased, and the cursor shown again before


def test_a_log_gets_a_line_after_each_doubling_and_none_of_what_is_quick():
    out = io.StringIO()
    with Phases(Console(out, is_terminal=False), WORK) as phases:
        phases.begin("tracing and lowering")
        phases.begin("in XLA")
        deadline = time.monotonic() + 20
        while out.getvalue().count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = out.getvalue().splitlines()
    assert lines == [f"{WORK}: in XLA, for {due} ms so far" for due in ("50.0", "100", "200")][: len(lines)]
    assert len(lines) >= 2


def test_who_asked_for_quiet_hears_nothing():
    out = io.StringIO()
    with Phases(Console(out, is_terminal=False, is_quiet=True), WORK) as phases:
        phases.begin("in XLA")
        time.sleep(0.1)
    assert out.getvalue() == ""
