"""Runs a point of a sweep in a process of its own, which runtime/sweep/pool.py starts."""

import os
import signal
import sys
import threading
import time
from typing import BinaryIO

from meshloom.compiler.core.user_code import code_allowed_from
from meshloom.compiler.declare.choices import model_of
from meshloom.compiler.declare.overrides import override

from ..core.files import replace_text
from ..launch.plan import words_of_train
from ..sweep.outcomes import evaluate_point, outcome_of_run
from ..sweep.pool import read_task
from ..sweep.rows import INTERRUPTED, PRINTED, Outcome, Task
from .main import main as run_command


def run_task() -> None:
    """Reads a task from standard input, and writes its outcome. An interrupted run has none: it goes on when the sweep
    does."""
    task, outcome_file = read_task(sys.stdin.buffer.read)
    threading.Thread(target=_end_with, args=(sys.stdin.buffer,), daemon=True).start()
    outcome = _train(task) if task.command == "train" else evaluate_point(task)
    assert outcome is not None
    if outcome.exit_code != INTERRUPTED:
        replace_text(outcome_file, outcome.model_dump_json())
    sys.exit(outcome.exit_code)


def _end_with(parent: BinaryIO) -> None:
    """Ends this process and its children when its input is closed; the system closes it when the parent dies."""
    parent.read()
    os.killpg(os.getpid(), signal.SIGKILL)


def _train(task: Task) -> Outcome:
    """Trains by the command itself, which ends with SystemExit."""
    start, printed = time.perf_counter(), task.directory / PRINTED
    begun = printed.stat().st_size if printed.exists() else 0
    here = override("hydra.run.dir", str(task.directory))
    sys.argv = ["meshloom", "train", *words_of_train(task.request, task.allowed, here)]
    try:
        run_command()
    except SystemExit as left:
        exit_code = left.code if isinstance(left.code, int) else 1
    sys.stderr.flush()
    said = printed.read_bytes()[begun:].decode(errors="replace") if printed.exists() else ""
    with code_allowed_from(task.allowed):
        model = model_of(task.request) if exit_code == 0 else None
    outcome = outcome_of_run(task.directory, exit_code, said, model)
    return outcome.model_copy(update={"seconds": time.perf_counter() - start})


if __name__ == "__main__":
    run_task()
