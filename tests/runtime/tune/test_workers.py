"""The processes of a search: one that dies, and what is left of them when a search is interrupted."""

import io
import multiprocessing
import os
import time

import pytest

from conftest import spec_of
from meshloom.compiler.core.console import Console
from meshloom.runtime.core.failures import RunFailed
from meshloom.runtime.tune import variants as module
from meshloom.runtime.tune.variants import progress, workers

CONSOLE = Console(is_quiet=True)
TARGET = spec_of("target=v5p-16").target


@pytest.mark.ci
def test_a_process_that_dies_ends_the_search_with_one_error():
    with pytest.raises(RunFailed, match="a process that traces candidates died"), workers(TARGET, CONSOLE) as runner:
        list(runner.estimate(os._exit, [3]))


@pytest.mark.ci
def test_an_interrupted_search_leaves_no_process_behind():
    """What the processes are doing is not waited for: here it would be an hour."""
    children = []

    def search() -> None:
        with workers(TARGET, CONSOLE) as runner:
            next(iter(runner.estimate(time.sleep, [0, 3600, 3600])))
            children.extend(multiprocessing.active_children())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search()
    assert children
    assert not any(child.is_alive() for child in children)


@pytest.mark.parametrize(
    ("is_terminal", "seconds", "lines"),
    [(False, 0.0, ["tracing: 1 of 3", "tracing: 2 of 3", "tracing: 3 of 3"]), (False, 3600.0, []), (True, 0.0, [])],
)
def test_without_a_terminal_a_line_now_and_then_says_how_far_a_search_is(monkeypatch, is_terminal, seconds, lines):
    monkeypatch.setattr(module, "SECONDS_PER_LINE", seconds)
    written = io.StringIO()
    done = list(progress(Console(written, is_terminal=is_terminal), "tracing", "abc", 3))
    assert done == ["a", "b", "c"]
    shown = [line.partition(",")[0] for line in written.getvalue().splitlines() if " of " in line]
    assert shown == lines
