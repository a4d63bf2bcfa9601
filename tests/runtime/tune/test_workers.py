"""The processes of a search: one that dies, and what is left of them when a search is interrupted."""

import multiprocessing
import os
import time

import pytest

from conftest import spec_of
from meshloom.compiler.core.console import Console
from meshloom.runtime.core.failures import RunFailed
from meshloom.runtime.tune.workers import workers

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
