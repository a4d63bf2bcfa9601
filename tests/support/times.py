"""Adds up the processor seconds of tests by folder, and says which folder takes more than docs/testing.md says."""

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from support import forked
from support.tiers import TIERS, tier_of

PAGE = Path(__file__).parents[2] / "docs/testing.md"
USUAL = 1.6  # seconds in which Python adds ten million numbers on the machine of the table
GREW_BY, GREW_SECONDS = 1.25, 5.0  # a folder that is beyond both has grown: a run differs from the next by a tenth
MOST_SHOWN = 30

_PROPERTY = "processor_seconds"
_BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", action="store_true", help="show the files and tests that take most processor seconds")


def _now() -> float:
    """Returns the processor seconds of this process and of its children and forked commands that have ended."""
    return sum(os.times()[:4]) + forked.seconds


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Notes when a test begins. It counts the fixtures that it is the first to need."""
    item.stash[_BEGAN] = _now()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Writes what a test took into the report of its teardown, which reaches the process that prints."""
    if call.when == "teardown":
        item.user_properties.append((_PROPERTY, [tier_of(item), _now() - item.stash[_BEGAN]]))
    return (yield)


def folder_of(test: str) -> str:
    """Returns the folder that a test counts to, of at most three parts: `tests/compiler/step`."""
    return "/".join(test.partition("::")[0].split("/")[:-1][:3])


def by(part: str, tests: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds of each folder, file or test, the longest first."""
    name_of = {"folder": folder_of, "file": lambda test: test.partition("::")[0], "test": str}[part]
    sums = defaultdict[str, float](float)
    for test, seconds in tests.items():
        sums[name_of(test)] += seconds
    return dict(sorted(sums.items(), key=lambda row: -row[1]))


def read_table(text: str) -> dict[str, dict[str, float]]:
    """Returns the seconds of each folder by tier, from the table of a page whose header begins with `folder`."""
    lines = [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    header = next((cells for cells in lines if cells[:1] == ["folder"]), [])
    rows = [cells for cells in lines if header and len(cells) == len(header) and cells[0].startswith("tests")]
    return {tier: {row[0]: float(row[at]) for row in rows} for at, tier in enumerate(header) if at}


def grown(before: Mapping[str, float], seconds: Mapping[str, float]) -> list[str]:
    """Returns a line for each folder that takes clearly more seconds of the usual machine than it did before."""
    return [
        f"{name} grew: {now:.0f} s where docs/testing.md says {before.get(name, 0.0):.0f}"
        for name, now in seconds.items()
        if now > max(GREW_BY * before.get(name, 0.0), before.get(name, 0.0) + GREW_SECONDS)
    ]


def longest_first(tests: Sequence[str], table: Mapping[str, Mapping[str, float]]) -> list[int]:
    """Returns the positions of tests, those of the folders that take most first, in the order given within a folder."""
    seconds = {test: sum(rows.get(folder_of(test), 0.0) for rows in table.values()) for test in tests}
    return sorted(range(len(tests)), key=lambda at: -seconds[tests[at]])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts long folders first, so that no worker is left with a long file (`--no-loadscope-reorder` keeps this)."""
    items[:] = [items[at] for at in longest_first([item.nodeid for item in items], read_table(PAGE.read_text()))]


def seconds_of_adding() -> float:
    """Returns the seconds in which Python adds ten million numbers here, as a script does: in global variables."""
    began = time.process_time()
    exec("total = 0\nfor number in range(2_000_000): total += number", {})
    return 5 * (time.process_time() - began)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints seconds by folder after whole tiers, and by file and test with `--times`."""
    reports = [report for each in terminalreporter.stats.values() for report in each if hasattr(report, "nodeid")]
    properties = [(report.nodeid, dict(getattr(report, "user_properties", ()))) for report in reports]
    found = {name: each[_PROPERTY] for name, each in properties if _PROPERTY in each}
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    is_whole &= not config.getoption("keyword") and not config.getoption("markexpr")
    parts = (*(["folder"] if is_whole else []), *(["file", "test"] if config.getoption("times") else []))
    write = terminalreporter.line
    scale = USUAL / seconds_of_adding() if parts else 1.0
    before = read_table(PAGE.read_text())
    for tier in TIERS if parts else ():
        tests = {name: row[1] * scale for name, row in found.items() if row[0] == tier}
        if not tests:
            continue
        terminalreporter.section(f"processor seconds of the {tier} tier")
        write(
            f"{sum(tests.values()):.0f} s in {len(tests)} tests, of a machine on which Python adds ten million numbers"
        )
        write(f"in {USUAL} s: {1 / scale:.2f} times as many here.")
        for part in parts:
            write(f"by {part}:")
            for name, seconds in list(by(part, tests).items())[:MOST_SHOWN]:
                write(f"{seconds:7.1f} s  {name}")
        for line in grown(before.get(tier, {}), by("folder", tests)) if is_whole and tier in before else ():
            write(line, yellow=True)
