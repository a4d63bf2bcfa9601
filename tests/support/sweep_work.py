"""Work of a pool's workers that goes wrong in each way there is, by the name of the point's directory."""

import os
import time

from meshloom.runtime.sweep.rows import Outcome, Task

PIECE_BYTES = 2**26


def work(task: Task) -> Outcome | None:
    name = task.directory.name
    if name.startswith("abort"):
        os.abort()
    if name.startswith("hang"):
        time.sleep(1000)
    if name.startswith("memory"):
        _take_memory()
    if name.startswith("raise"):
        raise RuntimeError("it had to")
    if name.startswith("exit"):
        os._exit(7)
    return Outcome(status="done", exit_code=0)


def _take_memory() -> None:
    taken = []
    while True:
        taken.append(b"x" * PIECE_BYTES)
        time.sleep(0.05)
