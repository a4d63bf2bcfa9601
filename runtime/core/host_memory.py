"""Measures the memory that this process may still take: the machine's, or less if a control group limits it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True)
class GroupFiles:
    """File names of one version of control groups. reclaimable: the key of memory.stat for pages that the kernel gives
    back."""

    limit: str
    usage: str
    reclaimable: str


V1 = GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = GroupFiles("memory.max", "memory.current", "inactive_file")


def available_bytes(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Returns the bytes that can be allocated without swapping.

    cgroups: the folder where control groups are mounted. membership: the kernel's file with the groups of this process.
    """
    return min([psutil.virtual_memory().available, *_room_in_groups(cgroups, membership)])


def _room_in_groups(cgroups: Path, membership: Path) -> Iterator[int]:
    """Yields the bytes that are left in each group of this process, and in each group around those."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            yield from _room_up_to(cgroups, group, V2)
        elif "memory" in controllers.split(","):
            yield from _room_up_to(cgroups / "memory", group, V1)


def _room_up_to(mount: Path, group: str, files: GroupFiles) -> Iterator[int]:
    """Yields the bytes that are left in a group and in the groups around it.

    In a container, the path of a group may be the host's; then the mount itself is the group.
    """
    for path in (mount, *(mount.joinpath(*Path(group).parts[1 : n + 1]) for n in range(1, len(Path(group).parts)))):
        try:
            limit, used = (path / files.limit).read_text().strip(), int((path / files.usage).read_text())
            stat = dict(line.split() for line in (path / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit != "max":
            yield max(0, int(limit) - used + int(stat.get(files.reclaimable, 0)))
