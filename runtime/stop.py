"""SIGTERM and Ctrl-C ask long work to stop at its next good place; it saves and leaves in order. They are noted: a
KeyboardInterrupt would be lost where it hits a callback of C++, as XLA has one in the garbage collector.

Several processes have to stop after the same step, whichever of them was asked. JAX's preemption service settles which:
it tells all of a SIGTERM to one, and the step that follows the furthest step of any.
"""

import signal
from types import FrameType, TracebackType
from typing import Self

from jax.experimental.multihost_utils import reached_preemption_sync_point

from .distributed import Processes

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Within the `with`, the first signal is noted; a second Ctrl-C interrupts at once."""

    def __init__(self, processes: Processes) -> None:
        self.signal: signal.Signals | None = None
        self._is_shared = processes.count > 1
        # With others, SIGTERM stays with JAX, which took it over in `initialize` and passes it on.
        self._noted = (signal.SIGINT,) if self._is_shared else SIGNALS

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in self._noted}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_due(self, num_steps_done: int) -> bool:
        """True where the run stops after these steps: in all processes alike. Asked after every step, by all."""
        if not self._is_shared:
            return self.signal is not None
        is_due = reached_preemption_sync_point(num_steps_done)
        if is_due and self.signal is None:  # another process was asked, or this one by SIGTERM
            self.signal = signal.SIGTERM
        return is_due

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.signal = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._is_shared:
            signal.raise_signal(signal.SIGTERM)

    @property
    def exit_code(self) -> int:
        """What a shell reports of a process that a signal ended: not finished, and by whom."""
        return 128 + self.signal if self.signal else 0
