"""A worker process that evaluates one point after the other. Importing this imports all that a point needs."""

from pathlib import Path

from meshloom.compiler.config.kept_compositions import keep_compositions

from .evaluate import evaluate
from .points import Outcome, Task
from .worker_process import prepare_worker


def start_worker(parent: int, scratch: Path) -> None:
    """Prepares the process, and has it keep what all points share."""
    prepare_worker(parent, scratch)
    keep_compositions()


def work(task: Task) -> Outcome | None:
    """Evaluates a point; None where it needs a process of its own."""
    return evaluate(task)
