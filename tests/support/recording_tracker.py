"""A user's tracker: it keeps what it gets."""

from collections.abc import Mapping
from typing import ClassVar

from meshloom.runtime.train.trackers import TrackedRun, Tracker


class Recording(Tracker):
    made: ClassVar[list["Recording"]] = []

    def __init__(self, run: TrackedRun):
        super().__init__(run)
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.has_failed: bool | None = None
        Recording.made.append(self)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.logged.append((step, dict(values)))

    def close(self, *, has_failed: bool) -> None:
        self.has_failed = has_failed


class Failing(Tracker):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == 2:
            raise ConnectionError(f"no such host for {len(values)} values")
