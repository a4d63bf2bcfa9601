"""A worker process that evaluates one point after the other. Importing this imports all that a point needs."""

import gc
from pathlib import Path

from meshloom.compiler.config.kept_compositions import keep_compositions

from .evaluate import evaluate
from .points import Outcome, Task
from .worker_process import prepare_worker


def start_worker(parent: int, scratch: Path) -> None:
    """Prepares the process, and has it keep what all points share."""
    prepare_worker(parent, scratch)
    keep_compositions()
    gc.freeze()  # all that was imported, some 500,000 objects
    gc.set_threshold(50_000, 20, 100)  # a traced program has as many: not a look at every 700 new ones


def work(task: Task) -> Outcome | None:
    """Evaluates a point; None where it needs a process of its own."""
    return evaluate(task)
