"""Agrees on the step after which all processes stop when one of them is told to, through the key-value store.

JAX's preemption service tells all processes when one gets SIGTERM, but the step that it names for the stop may differ
between them (docs/processes.md). Here each process publishes the last step that it went past, and goes no further until
all have done so. The first step after the largest of these lies ahead of every process, and all stop there.
"""

import itertools
import threading
from contextlib import suppress
from typing import Any

from jax.errors import JaxRuntimeError

from meshloom.compiler.core.errors import Problem

from ..core.failures import LOST, RunFailed

POLL_SECONDS = 0.5
NO_STEP = -1  # of a process that has not gone on after any step yet
_agreements = itertools.count()  # all processes make the same ones, in the same order


class AgreedStop:
    """Answers the other processes from a thread, so that the main thread may be waiting for a device.

    client: of JAX's coordination service. timeout_seconds: how long the processes wait for each other's answers.
    name: of the agreement, the same in all processes.
    """

    def __init__(self, client: Any, index: int, timeout_seconds: int, name: str | None = None):
        self._client, self._index, self._timeout_seconds = client, index, timeout_seconds
        self._folder = f"meshloom/stop/{next(_agreements) if name is None else name}"  # in the store
        self._last_step = NO_STEP  # after which this process went on
        self._furthest: int | None = None  # of all last steps, once it is agreed
        self._may_go_on = threading.Lock()  # held while the others are told how far this process is
        self._agreed, self._over = threading.Event(), threading.Event()

    def start(self) -> None:
        """Starts the thread that answers."""
        threading.Thread(target=self._watch, name="agreed stop", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread, at the end of the run."""
        self._over.set()

    def is_due(self, num_steps_done: int, *, is_asked: bool) -> bool:
        """Returns True where all processes stop after these steps. Called after every step, by all.

        is_asked: whether this process was asked to stop. Raises RunFailed where it was and the others do not answer.
        """
        if is_asked and not self._agreed.is_set():
            self._client.key_value_set(f"{self._folder}/asked/{self._index:06}", "", allow_overwrite=True)
            if not self._agreed.wait(self._timeout_seconds):
                what = f"the others did not answer within {self._timeout_seconds} s after which step to stop"
                raise RunFailed(Problem("distributed", what, "see logs/process-N.log"), LOST)
        with self._may_go_on:
            if self._furthest is not None and num_steps_done > self._furthest:
                return True
            self._last_step = num_steps_done
            return False

    def _watch(self) -> None:
        with suppress(JaxRuntimeError):  # the service is gone, and `lost.py` says so
            while not self._client.key_value_dir_get(f"{self._folder}/asked/"):
                if self._over.wait(POLL_SECONDS):
                    return
            with self._may_go_on:
                self._client.key_value_set(f"{self._folder}/last_step/{self._index:06}", str(self._last_step))
                self._client.wait_at_barrier(f"{self._folder}/told", self._timeout_seconds * 1000)
                told = self._client.key_value_dir_get(f"{self._folder}/last_step/")
                self._furthest = max(int(step) for _, step in told)
            self._agreed.set()
