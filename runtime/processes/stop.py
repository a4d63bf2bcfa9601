"""Lets Ctrl-C, SIGTERM and the other signals that end a job stop a run after its current step, with a save, in all
processes after the same step.

Signals are noted, not raised: a KeyboardInterrupt would be lost in a callback of C++, such as XLA's in the garbage
collector.

JAX's preemption service tells all processes of a SIGTERM to any of them, but the step that it names for the stop may
differ between them (docs/processes.md). So each process publishes, in the key-value store, the last step that it went
past, and waits until all have done so. The first step after the largest of these lies ahead of every process, and all
stop there.
"""

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

from jax.errors import JaxRuntimeError
from jax.experimental.multihost_utils import reached_preemption_sync_point

from meshloom.compiler.core.errors import Problem

from ..core.failures import ASKING, LOST, RunFailed
from ..core.stderr_capture import terminal
from .distributed import Processes

SIGNALS = (signal.SIGINT, *ASKING)
TRAINING = "the step that is running and its checkpoint"
_POLL_SECONDS = 0.5
NO_STEP = -1  # the last step of a process that has not gone past any
_agreements = itertools.count()  # all processes make the same ones, in the same order


class AgreedStop:
    """Answers the other processes from a thread, since the main thread may be waiting for a device.

    client: the client of JAX's coordination service. timeout_seconds: the time limit for the answers of the others.
    name: a name of the agreement, the same in all processes; default: a number.
    """

    def __init__(self, client: Any, index: int, timeout_seconds: int, name: str | None = None):
        self._client, self._index, self._timeout_seconds = client, index, timeout_seconds
        self._folder = f"meshloom/stop/{next(_agreements) if name is None else name}"  # in the store
        self._last_step = NO_STEP  # the last step that this process went past
        self._furthest: int | None = None  # the largest last step of all processes, once it is agreed
        self._may_go_on = threading.Lock()  # held while this process publishes its last step
        self._agreed, self._over = threading.Event(), threading.Event()

    def start(self) -> None:
        """Starts the thread that answers."""
        threading.Thread(target=self._watch, name="agreed stop", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread, at the end of the run."""
        self._over.set()

    def is_due(self, num_steps_done: int, *, is_asked: bool) -> bool:
        """Returns True if all processes stop after these steps. All processes call it after every step.

        is_asked: this process was asked to stop. Raises RunFailed if it was and the others do not answer.
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
        with suppress(JaxRuntimeError):  # the service is gone, which `lost.py` reports
            while not self._client.key_value_dir_get(f"{self._folder}/asked/"):
                if self._over.wait(_POLL_SECONDS):
                    return
            with self._may_go_on:
                self._client.key_value_set(f"{self._folder}/last_step/{self._index:06}", str(self._last_step))
                self._client.wait_at_barrier(f"{self._folder}/told", self._timeout_seconds * 1000)
                told = self._client.key_value_dir_get(f"{self._folder}/last_step/")
                self._furthest = max(int(step) for _, step in told)
            self._agreed.set()


class StopRequest:
    """Within the `with`, the first signal is noted and answered at once; a second Ctrl-C interrupts. waits_for: the
    work that is finished first, as text."""

    def __init__(self, processes: Processes, *, waits_for: str = TRAINING) -> None:
        self.signal: signal.Signals | None = None
        self._is_shared = processes.count > 1
        self._agreed = AgreedStop(processes.client, processes.index, processes.timeout_seconds)
        # With several processes, SIGTERM stays with JAX, which handles it since `initialize` and passes it on.
        noted = [number for number in SIGNALS if not self._is_shared or number != signal.SIGTERM]
        # One that was ignored when Python began stays so: `nohup` ignores SIGHUP, a shell SIGINT of a background job.
        self._noted = [number for number in noted if signal.getsignal(number) is not signal.SIG_IGN]
        if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
            self._noted = []
        self._waits_for, self._can_be_left = waits_for, False

    def __enter__(self) -> Self:
        self._terminal = os.dup(terminal())  # while a compiler is at work, stderr is its log
        self._before = {number: signal.signal(number, self._note) for number in self._noted}
        if self._is_shared:
            self._agreed.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._agreed.stop()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._terminal)

    @contextmanager
    def waiting_for(self, what: str, *, can_be_left: bool = False) -> Iterator[None]:
        """Within the `with`, a stop waits for this work. can_be_left: a run loses nothing if it is interrupted, so a
        process that is alone is interrupted instead."""
        before = self._waits_for, self._can_be_left
        self._waits_for, self._can_be_left = what, can_be_left
        try:
            yield
        finally:
            self._waits_for, self._can_be_left = before

    def is_due(self, num_steps_done: int) -> bool:
        """Returns True if the run stops after these steps, in all processes. All processes call it after every
        step."""
        if self.signal is None and signal.SIGHUP in self._noted:
            signal.signal(signal.SIGHUP, self._note)  # libtpu has the process ignore it, whenever it is loaded
        if not self._is_shared:
            return self.signal is not None
        is_asked = reached_preemption_sync_point(num_steps_done)
        is_due = self._agreed.is_due(num_steps_done, is_asked=is_asked)
        if is_due and self.signal is None:  # another process was asked, or this one by SIGTERM
            self.signal = signal.SIGTERM
        return is_due

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        is_first, self.signal = self.signal is None, self.signal or signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._can_be_left and not self._is_shared:
            raise KeyboardInterrupt(self.signal)
        if not is_first:  # a scheduler may ask again, or by another signal
            return
        name = "Ctrl-C" if self.signal == signal.SIGINT else self.signal.name
        who = "all processes stop" if self._is_shared else "stopping"
        what = f"{name}: {who}; waiting for {self._waits_for}"
        os.write(self._terminal, f"\n{what}. Another Ctrl-C ends at once and loses what is not saved.\n".encode())
        if self._is_shared:
            signal.raise_signal(signal.SIGTERM)

    @property
    def exit_code(self) -> int:
        """Returns 128 + signal, as a shell reports for a process that a signal ended; 0 without one."""
        return 128 + self.signal if self.signal else 0
