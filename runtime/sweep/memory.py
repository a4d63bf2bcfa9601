"""Limits the points that run at once to what this machine's memory allows, by what earlier points took."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ..core.host_memory import available_bytes

LEAST_LEFT = 512 * 2**20  # below this the system is about to end processes: the youngest point is ended first
EVENTS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))  # their `oom_kill` counts what the system ended


@dataclass
class Memory:
    """expected: bytes that a point needs. taken: by index of a running point, what its processes take now."""

    expected: int
    taken: dict[int, int] = field(default_factory=dict)

    def look(self, pids: Mapping[int, int]) -> None:
        """Measures the running points. pids: the process of each."""
        self.taken = {index: bytes_of(pid) for index, pid in pids.items()}
        self.expected = max([self.expected, *self.taken.values()])

    def has_room(self, running: Iterable[int]) -> bool:
        """Returns True if one more point fits beside what the running ones may still take."""
        reserved = sum(max(0, self.expected - self.taken.get(index, 0)) for index in running)
        return available_bytes() - reserved - self.expected > LEAST_LEFT


def bytes_of(pid: int) -> int:
    """Returns the memory of a process and its children; 0 where it has ended."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return sum(one.memory_info().rss for one in family)
    except psutil.Error:
        return 0


def num_ended_for_memory() -> int | None:
    """Returns how many processes the system has ended for memory so far; None where it does not say."""
    for path in EVENTS:
        try:
            counts = dict(line.split() for line in path.read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return None
