"""Deliberate faults in the code, each of which has to make its test fail: proof that the tests can.

    pip install -e '.[test]' && python bench/faults.py [--only TEXT] [--again] [--workers N]

bench/faults.toml has the faults. Each is made in a copy of the tracked files, and its test is run there in a process
of its own. A fault counts as caught where the test fails by an assertion; an exception that the fault raises itself is
not enough. All these tests first have to pass without a fault. What was found is kept in bench/faults.jsonl, a line for
each fault, until the fault changes or `--again` is given. Prints a table in Markdown; exits with 1 where a fault is not
caught.
"""

import argparse
import ast
import hashlib
import importlib
import json
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_suffix(".toml")
KEPT = Path(__file__).with_suffix(".jsonl")
TIMEOUT_SECONDS = 900
TIERS = ("plain", "ci", "release")

# As tests/conftest.py has it before it imports JAX, which here is imported before that.
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost",
               "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # fmt: skip
# Imported once, by a server that each process is forked from. None of them is changed by a fault, and JAX starts its
# threads later. (Packages with plugins of pytest, such as hydra, must not be there before it.)
IMPORTED_ONCE = ("numpy", "jax", "jax.numpy", "flax.nnx", "optax", "optax.contrib", "grain", "omegaconf",
                 "pydantic", "orbax.checkpoint.v1", "tensorboardX", "jinja2", "psutil", "annotated_types",
                 "jax.experimental.pallas.ops.tpu.splash_attention")  # fmt: skip
warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)


@dataclass(frozen=True)
class Fault:
    """name: what is wrong. file: below the repository's root. old: text that is in it once; new: what replaces it.
    test: FILE::NAME, or FILE::NAME[PARAMETERS], of the test that has to fail."""

    name: str
    area: str
    file: str
    old: str
    new: str
    test: str

    @property
    def test_file(self) -> str:
        return self.test.partition("::")[0]

    @property
    def test_name(self) -> str:
        return self.test.partition("::")[2].partition("[")[0]

    @property
    def key(self) -> str:
        """Changes with the fault."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Ran:
    """The results of one pytest. passed: test ids. failed: test id -> what was raised, and whether that was an
    assertion of the test. tiers: of each test id. log: its output."""

    passed: tuple[str, ...]
    failed: dict[str, tuple[str, bool]]
    tiers: dict[str, str]
    log: str

    @property
    def caught_by(self) -> str | None:
        """The first test that fails by an assertion."""
        return next((test for test, (_, is_assertion) in self.failed.items() if is_assertion), None)

    @property
    def said(self) -> str:
        """The first failure, in a line."""
        return next((what for what, _ in self.failed.values()), "")


@dataclass(frozen=True)
class Result:
    """The outcome of one fault. tier: of the test that caught it, or "". outcome: caught; passed: the test saw nothing;
    raised: an exception, and no assertion; ended: no pytest came to its end."""

    key: str
    name: str
    area: str
    test: str
    tier: str
    outcome: str
    said: str

    @property
    def line(self) -> str:
        """The result on one line, or more where the fault is not caught."""
        line = f"{self.outcome:>7}  {self.tier:>7}  {self.area}: {self.name}"
        return line if self.outcome == "caught" else f"{line}\n         {self.test}\n         {self.said}"


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """Returns all faults, in the order of the file."""
    return [Fault(**entry) for entry in tomllib.loads(path.read_text())["fault"]]


def mistakes_in(faults: Sequence[Fault]) -> list[str]:
    """Returns what is wrong with the table itself: stale text, a test that is gone, two faults of one name."""
    found = [f"{name}: {count} faults have this name" for name, count in Counter(f.name for f in faults).items() if count > 1]  # fmt: skip  # noqa: E501
    for fault in faults:
        count = (ROOT / fault.file).read_text().count(fault.old)
        if count != 1:
            found.append(f"{fault.name}: the old text is {count} times in {fault.file}")
        if fault.old == fault.new:
            found.append(f"{fault.name}: it changes nothing")
        if not (ROOT / fault.test_file).is_file() or fault.test_name not in _functions_in(fault.test_file):
            found.append(f"{fault.name}: there is no test {fault.test}")
    return found


@cache
def _functions_in(test_file: str) -> set[str]:
    return {node.name for node in ast.parse((ROOT / test_file).read_text()).body if isinstance(node, ast.FunctionDef)}


class Recorder:
    """A plugin of pytest that notes which tests pass, how others fail, and of which tier each is."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: dict[str, tuple[str, bool]] = {}
        self.tiers: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        assert Path(str(sys.modules["meshloom"].__file__)).is_relative_to(Path.cwd()), "another Meshloom is tested"
        tier_of = importlib.import_module("conftest").tier_of
        self.tiers = {item.nodeid: tier_of(item) for item in session.items}

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.excinfo is None:
            if call.when == "call":
                self.passed.append(item.nodeid)
            return
        said = " ".join(call.excinfo.exconly().split())[:200]
        is_assertion = call.when == "call" and issubclass(call.excinfo.type, AssertionError | pytest.fail.Exception)
        if not issubclass(call.excinfo.type, pytest.skip.Exception):
            self.failed.setdefault(item.nodeid, (said, is_assertion))


def _pytest_in(copy: str, arguments: Sequence[str], log: str, is_done: Connection) -> None:
    """Runs pytest in a copy of the repository; in a process of its own, whose output goes to `log`."""
    os.setsid()
    with open(log, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = package = os.path.join(copy, ".pkg")
    sys.path.insert(0, package)
    recorder = Recorder()
    pytest.main(["-n0", "-q", "-p", "no:cacheprovider", *arguments], plugins=[recorder])
    sys.stdout.flush()
    is_done.send((tuple(recorder.passed), recorder.failed, recorder.tiers))


class Copy:
    """A copy of the tracked files, in which faults are made and tests are run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, tracked.split("\0")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)

    @contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """Within the `with`, the file has the fault."""
        path = self.folder / fault.file
        content, times = path.read_text(), path.stat()
        path.write_text(content.replace(fault.old, fault.new))
        try:
            yield
        finally:
            path.write_text(content)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # compiled modules are known by it

    def run(self, *arguments: str) -> Ran:
        context = multiprocessing.get_context("forkserver")
        receiver, sender = context.Pipe(duplex=False)
        log = self.folder / "pytest.log"
        process = context.Process(target=_pytest_in, args=(str(self.folder), arguments, str(log), sender))
        process.start()
        sender.close()
        found: tuple[Any, ...] = ((), {}, {})
        try:
            if receiver.poll(TIMEOUT_SECONDS):
                found = receiver.recv()
        except EOFError:  # the process ended before
            pass
        finally:
            if process.is_alive() and not found[2]:
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
        return Ran(*found, log=log.read_text(errors="replace"))


def run_unchanged(copy: Copy, faults: Sequence[Fault]) -> tuple[set[str], list[str]]:
    """Runs the tests of these faults without a fault; returns those that pass, and what is wrong."""
    tests = list(dict.fromkeys(fault.test for fault in faults))
    ran = copy.run(*tests)
    if not ran.tiers:
        return set(), [f"nothing was run of {faults[0].test_file}: {ran.log[-1000:]}"]
    passed, wrong = set(), [f"{test} fails without a fault: {said}" for test, (said, _) in ran.failed.items()]
    for test in tests:
        is_run = any(each == test or each.startswith(f"{test}[") for each in ran.passed)
        is_failed = any(each == test or each.startswith(f"{test}[") for each in ran.failed)
        if is_run and not is_failed:
            passed.add(test)
        elif not is_failed:
            wrong.append(f"{test} was not run, or skipped")
    return passed, wrong


def run_fault(copy: Copy, fault: Fault) -> Result:
    """Makes a fault and runs its test."""
    with copy.with_fault(fault):
        ran = copy.run("-x", fault.test)
    ended = "raised" if ran.failed else "passed" if ran.passed else "ended"
    outcome = "caught" if ran.caught_by else ended
    said = ran.said or ("" if ran.passed else ran.log[-200:])
    tier = ran.tiers[ran.caught_by] if ran.caught_by else ""
    return Result(fault.key, fault.name, fault.area, fault.test, tier, outcome, said)


def run_group(copies: "queue.SimpleQueue[Copy]", faults: Sequence[Fault], tell: Callable[[Result | str], None]) -> None:
    """Runs faults whose tests are in one file: first these tests without a fault, then fault after fault."""
    copy = copies.get()
    try:
        passed, wrong = run_unchanged(copy, faults)
        for line in wrong:
            tell(line)
        for fault in faults:
            if fault.test in passed:
                tell(run_fault(copy, fault))
    finally:
        copies.put(copy)


def read_kept(path: Path) -> dict[str, Result]:
    """Returns the results of earlier runs, by key."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {result.key: result for result in (Result(**json.loads(line)) for line in lines)}


def write_kept(path: Path, faults: Sequence[Fault], kept: Mapping[str, Result]) -> None:
    """Writes the results of these faults in their order, and no others."""
    results = [kept[fault.key] for fault in faults if fault.key in kept]
    path.write_text("".join(json.dumps(asdict(result)) + "\n" for result in results))


def run_all(faults: Sequence[Fault], kept: Path, num_workers: int, console: Console) -> None:
    """Runs faults, shows what is found and appends it to a file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", *IMPORTED_ONCE])
    groups: dict[str, list[Fault]] = {}
    for fault in faults:
        groups.setdefault(fault.test_file, []).append(fault)
    columns = (TextColumn("faults"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    folder = tempfile.TemporaryDirectory(prefix="meshloom-faults-")
    with folder, Progress(*columns, console=console) as bar, kept.open("a") as file:
        copies, task, lock = queue.SimpleQueue[Copy](), bar.add_task("", total=len(faults)), threading.Lock()
        for number in range(num_workers):
            copies.put(Copy(Path(folder.name, str(number))))

        def tell(found: Result | str) -> None:
            with lock:
                console.print(
                    f"error: {found}" if isinstance(found, str) else found.line, markup=False, highlight=False
                )
                if isinstance(found, Result):
                    file.write(json.dumps(asdict(found)) + "\n")
                    file.flush()
                    bar.advance(task)

        with ThreadPoolExecutor(num_workers) as threads:
            longest_first = sorted(groups.values(), key=len, reverse=True)
            for future in [threads.submit(run_group, copies, group, tell) for group in longest_first]:
                future.result()


def tables(results: Sequence[Result]) -> str:
    """Returns in Markdown: how many faults of each area each tier caught, and those that none did."""
    areas = list(dict.fromkeys(result.area for result in results))
    caught = Counter((result.area, result.tier) for result in results if result.outcome == "caught")
    lines = [f"| area | faults | {' | '.join(TIERS)} | not caught |", "|---" * (len(TIERS) + 3) + "|"]
    for area in [*areas, None]:
        own = [result for result in results if area in (None, result.area)]
        cells = [sum(n for (a, t), n in caught.items() if t == tier and area in (None, a)) for tier in TIERS]
        row = [area or "all", len(own), *cells, len(own) - sum(cells)]
        lines.append(f"| {' | '.join(map(str, row))} |")
    missed = [f"- {each.area}: {each.name}: {each.outcome} ({each.test})" for each in results if each.outcome != "caught"]  # fmt: skip  # noqa: E501
    return "\n".join([*lines, "", *(missed or ["Each fault is caught."])])


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with this in their name, area, file or test")
    parser.add_argument("--again", action="store_true", help="run also what was found before")
    parser.add_argument("--workers", type=int, default=2, help="tests at a time (default: 2)")
    parser.add_argument("--kept", type=Path, default=KEPT, help="file of results (default: bench/faults.jsonl)")
    arguments = parser.parse_args()
    console, faults = Console(soft_wrap=True), read_faults()
    chosen = [f for f in faults if arguments.only in " ".join((f.name, f.area, f.file, f.test))]
    if mistakes := mistakes_in(chosen):
        console.print("\n".join(mistakes), markup=False, highlight=False)
        return 2
    kept = read_kept(arguments.kept)
    if arguments.again:
        kept = {key: result for key, result in kept.items() if key not in {fault.key for fault in chosen}}
    write_kept(arguments.kept, faults, kept)
    if due := [fault for fault in chosen if fault.key not in kept]:
        run_all(due, arguments.kept, arguments.workers, console)
    kept = read_kept(arguments.kept)
    write_kept(arguments.kept, faults, kept)
    shown = [kept[fault.key] for fault in chosen if fault.key in kept]
    console.print(tables(shown), markup=False, highlight=False)
    if num_left := len(chosen) - len(shown):
        console.print(f"{num_left} could not be run: the errors above say why", highlight=False)
    return 0 if len(shown) == len(chosen) and all(each.outcome == "caught" for each in shown) else 1


if __name__ == "__main__":
    sys.exit(main())
