"""Shows which tests take the most processor time, their own and that of the processes that they start.

    python bench/test_times.py tests/compiler/step            # the plain tier
    python bench/test_times.py tests/runtime --tier=ci

Arguments are those of pytest. Tests run one after the other, in this process. On a machine that does other work,
seconds of the clock say little, while processor time hardly changes.
"""

import os
import sys
import time
from collections.abc import Iterator

import pytest

MOST_SHOWN = 30


class Times:
    """Measures each test, with the fixtures that it is the first to need."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float, str]] = []

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before, began = os.times(), time.monotonic()
        yield
        after = os.times()
        own = after.user + after.system - before.user - before.system
        processes = after.children_user - before.children_user + after.children_system - before.children_system
        self.rows.append((own, max(0.0, processes), time.monotonic() - began, item.nodeid))


def main() -> int:
    times = Times()
    exit_code = pytest.main(["-q", "-n0", *sys.argv[1:]], plugins=[times])
    files = dict[str, float]()
    for own, processes, _, name in times.rows:
        file = name.partition("::")[0]
        files[file] = files.get(file, 0.0) + own + processes
    print(f"{sum(files.values()):.0f} s of processor time in {len(times.rows)} tests")
    for name, seconds in sorted(files.items(), key=lambda row: -row[1])[:MOST_SHOWN]:
        print(f"{seconds:7.1f} s  {name}")
    print("    own  processes  clock")
    for own, processes, clock, name in sorted(times.rows, key=lambda row: -row[0] - row[1])[:MOST_SHOWN]:
        print(f"{own:7.1f}    {processes:7.1f}  {clock:5.1f}  {name}")
    return int(exit_code)


if __name__ == "__main__":
    sys.exit(main())
