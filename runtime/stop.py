"""SIGTERM and Ctrl-C ask the loop to stop after the step at hand; it saves and leaves in order."""

import signal
from types import FrameType, TracebackType
from typing import Self


class StopRequest:
    """Within the `with`, the first signal is noted; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.signal = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    @property
    def exit_code(self) -> int:
        """What a shell reports of a process that a signal ended: not finished, and by whom."""
        return 128 + self.signal if self.signal else 0
