"""SIGTERM and Ctrl-C ask long work to stop at its next good place; it saves and leaves in order. They are noted: a
KeyboardInterrupt would be lost where it hits a callback of C++, as XLA has one in the garbage collector.

Several processes have to stop after the same step, whichever of them was asked. JAX's preemption service tells of a
SIGTERM to any of them, and `agreed_stop.py` settles the step.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

from jax.experimental.multihost_utils import reached_preemption_sync_point

from meshloom.compiler.xla.stderr_capture import terminal

from .agreed_stop import AgreedStop
from .distributed import Processes

SIGNALS = (signal.SIGTERM, signal.SIGINT)
TRAINING = "the step that is running and its checkpoint"


class StopRequest:
    """Within the `with`, the first signal is noted and answered at once; a second Ctrl-C interrupts. waits_for: what
    comes to its end first."""

    def __init__(self, processes: Processes, *, waits_for: str = TRAINING) -> None:
        self.signal: signal.Signals | None = None
        self._is_shared = processes.count > 1
        self._agreed = AgreedStop(processes.client, processes.index, processes.timeout_seconds)
        # With others, SIGTERM stays with JAX, which took it over in `initialize` and passes it on.
        self._noted = (signal.SIGINT,) if self._is_shared else SIGNALS
        if threading.current_thread() is not threading.main_thread():  # Python hands signals to the main thread alone
            self._noted = ()
        self._waits_for, self._can_be_left = waits_for, False

    def __enter__(self) -> Self:
        self._terminal = os.dup(terminal())  # while a compiler is at work, stderr is its log
        self._before = {number: signal.signal(number, self._note) for number in self._noted}
        if self._is_shared:
            self._agreed.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._agreed.stop()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._terminal)

    @contextmanager
    def waiting_for(self, what: str, *, can_be_left: bool = False) -> Iterator[None]:
        """Within the `with`, whoever asks for a stop has to wait for this. can_be_left: a run loses nothing by it, so
        that a process which is alone is interrupted instead."""
        before = self._waits_for, self._can_be_left
        self._waits_for, self._can_be_left = what, can_be_left
        try:
            yield
        finally:
            self._waits_for, self._can_be_left = before

    def is_due(self, num_steps_done: int) -> bool:
        """Returns True where the run stops after these steps: in all processes alike. Asked after every step, by
        all."""
        if not self._is_shared:
            return self.signal is not None
        is_asked = reached_preemption_sync_point(num_steps_done)
        is_due = self._agreed.is_due(num_steps_done, is_asked=is_asked)
        if is_due and self.signal is None:  # another process was asked, or this one by SIGTERM
            self.signal = signal.SIGTERM
        return is_due

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.signal = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._can_be_left and not self._is_shared:
            raise KeyboardInterrupt(self.signal)
        self._answer()
        if self._is_shared:
            signal.raise_signal(signal.SIGTERM)

    def _answer(self) -> None:
        """Not by `print`, which a signal may have interrupted."""
        name = "Ctrl-C" if self.signal == signal.SIGINT else "SIGTERM"
        who = "all processes stop" if self._is_shared else "stopping"
        what = f"{name}: {who}; waiting for {self._waits_for}"
        os.write(self._terminal, f"\n{what}. Another Ctrl-C ends at once and loses what is not saved.\n".encode())

    @property
    def exit_code(self) -> int:
        """Returns what a shell reports of a process that a signal ended: not finished, and by whom."""
        return 128 + self.signal if self.signal else 0
