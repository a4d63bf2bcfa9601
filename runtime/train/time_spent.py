"""Counts the time of a run by kind, over all of its starts; goodput is the share in steps that were kept."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import psutil

from meshloom.compiler.core.format import human_seconds, human_share

TimeKind = Literal["start", "compile", "restore", "steps", "input", "evaluation", "save", "profile", "redone", "down"]
KINDS: tuple[TimeKind, ...] = get_args(TimeKind)


@dataclass(frozen=True)
class TimeSpent:
    """Seconds of the wall clock by kind. num_starts: the starts of the run so far.

    start: from the start of the process to the first step, without compile and restore. steps: training, without input.
    input: devices stood still for input. evaluation, save: no step ran because of them. profile: beginning and writing
    a trace. redone: time of earlier starts after the checkpoint that the next start began with. down: between the last
    recorded step of a start and the next start.
    """

    num_starts: int
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Returns the share of all seconds in steps that were kept."""
        return self.seconds["steps"] / self.total if self.total else 0.0

    def as_metrics(self) -> dict[str, float]:
        """Returns the values of a line of `metrics.jsonl`."""
        named = {f"seconds/{kind}": round(seconds, 3) for kind, seconds in self.seconds.items()}
        return {"goodput": self.goodput, "num_starts": self.num_starts, **named}

    def __str__(self) -> str:
        """Returns one line: 84 s, 71.2 % in steps; compile 14.1 s, start 9.2 s."""
        others = sorted(((self.seconds[kind], kind) for kind in KINDS if kind != "steps"), reverse=True)
        parts = ", ".join(f"{kind} {human_seconds(seconds)}" for seconds, kind in others if seconds >= 0.0005)
        return f"{human_seconds(self.total)}, {human_share(self.goodput)} in steps; {parts}".removesuffix("; ")


NOTHING = TimeSpent(0, dict.fromkeys(KINDS, 0.0))


def spent_by_earlier_starts(kept: Mapping[str, Any] | None, last: Mapping[str, Any] | None, began: float) -> TimeSpent:
    """Returns the time of a run before this start, as its lines of `metrics.jsonl` record it.

    kept: the line of the step that this start continues from; None from the beginning. last: the last line; None if
    there is none. began: the time of this start, in seconds since 1970.
    """
    # An earlier version wrote lines without times.
    if last is None or any(line is not None and "num_starts" not in line for line in (kept, last)):
        return NOTHING
    before, at_end = (take_time_spent(dict(line)) if line else NOTHING for line in (kept, last))
    redone = max(0.0, at_end.total - before.total)
    down = max(0.0, began - float(last["time"]))
    gone = {"redone": before.seconds["redone"] + redone, "down": before.seconds["down"] + down}
    return TimeSpent(at_end.num_starts, {**before.seconds, **gone})


def take_time_spent(values: dict[str, Any]) -> TimeSpent:
    """Removes the values of `as_metrics` from those of a line, and returns them; kinds that are missing are 0. Raises
    KeyError if the line has no times."""
    del values["goodput"]
    return TimeSpent(values.pop("num_starts"), {kind: values.pop(f"seconds/{kind}", 0.0) for kind in KINDS})


def process_began() -> float:
    """Returns the start time of this process, in seconds since 1970."""
    return psutil.Process().create_time()


class Stopwatch:
    """Counts the seconds of this start. began: the time of the start, in seconds since 1970. earlier: the time of
    earlier starts. Only one thread may use it."""

    def __init__(self, began: float):
        self.began, self.earlier = began, NOTHING
        self._seconds = dict.fromkeys(KINDS, 0.0) | {"start": max(0.0, time.time() - began)}
        self._kind: TimeKind = "start"
        self._since = time.perf_counter()

    @contextmanager
    def spending(self, kind: TimeKind) -> Iterator[None]:
        """Within the `with`, time counts as this kind, and afterwards as the kind before."""
        before = self._kind
        self._go_to(kind)
        try:
            yield
        finally:
            self._go_to(before)

    def move(self, seconds: float, to: TimeKind) -> None:
        """Moves seconds from the present kind to another."""
        self._seconds[self._kind] -= seconds
        self._seconds[to] += seconds

    @property
    def step_seconds(self) -> float:
        """Returns the seconds of this start in steps so far, including waits for input."""
        self._go_to(self._kind)
        return self._seconds["steps"] + self._seconds["input"]

    def by_this_start(self) -> TimeSpent:
        """Returns the time of this start so far."""
        self._go_to(self._kind)
        return TimeSpent(1, dict(self._seconds))

    def by_all(self) -> TimeSpent:
        """Returns the time of all starts so far."""
        earlier, own = self.earlier, self.by_this_start()
        return TimeSpent(earlier.num_starts + 1, {kind: earlier.seconds[kind] + own.seconds[kind] for kind in KINDS})

    def _go_to(self, kind: TimeKind) -> None:
        now = time.perf_counter()
        self._seconds[self._kind] += now - self._since
        self._kind, self._since = kind, now


def time_rows(watch: Stopwatch) -> list[tuple[str, str]]:
    """Returns the rows of a summary: the time of this start, and of all starts if there are several."""
    rows, whole = [("time", str(watch.by_this_start()))], watch.by_all()
    return [*rows, (f"time of {whole.num_starts} starts", str(whole))] if whole.num_starts > 1 else rows
