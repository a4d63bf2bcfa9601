"""Faults in a run of two processes: after each it is started again, and has to go on as if nothing had happened.

    pip install -e '.[test]' && python bench/chaos.py [--faults N] [--only TEXT] [--seed S] [--again]

A fault strikes one process, at one place of the code: it is killed, told to stop, frozen, its disk is full, its clock
jumps, or a file is damaged while nobody runs. What launches a run would do then is done here: when all processes have
ended, all are started again (or, for a restart of the coordinator, each by itself). Afterwards

* no exit code was one that starts nothing again, and nothing hung;
* where a process was killed or frozen, one that was left has named it;
* the run continued from the newest checkpoint that was whole, so no more was lost than the steps since;
* each loss, gradient norm and held-out loss is, bit for bit, that of a run that nothing disturbed.

Results are kept in bench/chaos.jsonl, a line for each fault, and are not measured again unless `--again` is given.
Prints a table in Markdown; exits with 1 where a run did not recover. A full disk needs the right to mount a tmpfs. The
clock that jumps is Python's: to move that of C++, one would have to move that of the machine.
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import wraps
from importlib import import_module
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from meshloom.runtime.launch.local import as_shell, free_port

KEPT = Path(__file__).with_suffix(".jsonl")
NUM_PROCESSES, NUM_STEPS, STEPS_BETWEEN_SAVES = 2, 16, 4
SECONDS_UNTIL_NOTICED, SECONDS_UNTIL_SAVED = 1.5, 5
HEARTBEAT_SECONDS, START_SECONDS = 6, 15
MOST_SECONDS = 1500  # Orbax gives up in a barrier after 20 minutes
RUN = ("model=linear_stack", "model.num_layers=2", "target=cpu-4", "sharding=fsdp", "global_batch_size=8",
       "sequence_length=16", "data=synthetic", "precision=float32", "logging=quiet",
       "evaluation.every_num_steps=5", "evaluation.num_batches=2", f"checkpoint.every_num_steps={STEPS_BETWEEN_SAVES}",
       f"distributed.heartbeat_timeout_seconds={HEARTBEAT_SECONDS}", "distributed.shutdown_timeout_seconds=30",
       "hydra.run.dir=run")  # fmt: skip
FINAL = (2, 3, 4, 5, 130)  # docs/launch.md: nothing is started again
DISK_BYTES = 32 * 2**20
FILLER = Path("run", "filler")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["meshloom.runtime.cli.main", "meshloom.runtime.cli.train"])

Kind = Literal["kill", "terminate", "freeze", "fill disk", "truncate", "flip", "clock", "restart coordinator"]
# Where a process is struck: what it is about to call, of meshloom.runtime.
PHASES = {
    "join": "processes.distributed:initialize",
    "start": "cli.train:check_same_data",
    "compile": "compile.run_programs:build",
    "step": "train.feed:Feed.next",
    "save": "checkpoint.checkpoints:Checkpoints.save",
    "evaluation": "train.loop:TrainingLoop._evaluate",
}
SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "freeze": signal.SIGSTOP,
           "truncate": signal.SIGKILL, "flip": signal.SIGKILL, "restart coordinator": signal.SIGKILL}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """hit: at which call of the phase. delay_seconds: after the call begins. detail: which file, or by how many seconds
    the clock jumps."""

    kind: Kind
    phase: str
    process: int
    hit: int = 1
    delay_seconds: float = 0.0
    detail: str = ""

    @property
    def name(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.kind}{detail}, {self.phase}, process {self.process}"

    @property
    def is_named(self) -> bool:
        """Returns whether the surviving processes have to say which one it struck."""
        return self.kind in ("kill", "freeze", "truncate", "flip", "restart coordinator")


@dataclass
class Outcome:
    """codes: exit codes of the start that the fault struck. num_done: steps that were done. whole: those whose
    checkpoints are there, and undamaged. from_step: what the next start continued from. lost: steps that it repeats.
    wrong: what was not as it has to be."""

    codes: list[int] = field(default_factory=list)
    num_done: int = 0
    whole: list[int] = field(default_factory=list)
    from_step: int = 0
    lost: int = 0
    wrong: list[str] = field(default_factory=list)


# A process of the run, which a fault may strike.


def run_command(folder: Path, said: Path, fault: Fault | None, arguments: Sequence[str]) -> None:
    """Runs the command in this process, which has just been forked. said: takes what it prints."""
    os.chdir(folder)
    with said.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    if fault:
        prepare_strike(fault)
    sys.argv = ["meshloom", *arguments]
    import_module("meshloom.runtime.cli.main").main()


def prepare_strike(fault: Fault) -> None:
    """Has the fault strike this process at one of the calls of its phase."""
    module, _, attributes = PHASES[fault.phase].partition(":")
    owner, (*within, name) = import_module(f"meshloom.runtime.{module}"), attributes.split(".")
    for part in within:
        owner = getattr(owner, part)
    struck, calls = getattr(owner, name), count(1)

    @wraps(struck)
    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == fault.hit:
            timer = threading.Timer(fault.delay_seconds, strike, [fault])
            timer.start() if fault.delay_seconds else strike(fault)
        return struck(*args, **kwargs)

    setattr(owner, name, call)


def strike(fault: Fault) -> None:
    """Does to this process what the fault is."""
    if fault.kind in ("truncate", "flip"):
        deadline = time.monotonic() + SECONDS_UNTIL_SAVED
        while len(whole_steps(Path("run"))) < 2 and time.monotonic() < deadline:  # one to damage, one to go back to
            time.sleep(0.01)
    if fault.kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault.kind])
        if fault.kind == "terminate":  # JAX looks for it once a second, and this run is short
            time.sleep(SECONDS_UNTIL_NOTICED)
    elif fault.kind == "fill disk":
        with FILLER.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
    elif fault.kind == "clock":
        now, now_ns, by = time.time, time.time_ns, int(fault.detail)
        time.time, time.time_ns = lambda: now() + by, lambda: now_ns() + by * 10**9


# What starts the processes, and starts them again. They are forked from a server that has imported what they need.


@dataclass
class Launch:
    """Starts the processes of a run in a folder, which gets the run directory and what they say."""

    folder: Path
    cache: Path  # of compiled programs
    num_steps: int
    num_starts: int = 0

    def run(self, fault: Fault | None) -> list[int]:
        """Starts all processes once. Returns their exit codes, as a shell has them; one that is frozen is killed when
        the others have ended. Raises TimeoutError for a run that hangs."""
        with self._processes() as (start, processes):
            for index in range(NUM_PROCESSES):
                start(index, fault)
            frozen = fault.process if fault and fault.kind == "freeze" else None
            for _ in self._waiting():
                ended = [index for index, process in processes.items() if process.exitcode is not None]
                if frozen is not None and len(ended) == NUM_PROCESSES - 1 and frozen not in ended:
                    processes[frozen].kill()
                if len(ended) == NUM_PROCESSES:
                    break
            return [as_shell(process.exitcode or 0) for process in processes.values()]

    def run_each(self, fault: Fault) -> list[int]:
        """Likewise, but a process that fails is started again by itself, at once, until all have ended well. Returns
        the exit codes of those that failed."""
        codes = []
        with self._processes() as (start, processes):
            for index in range(NUM_PROCESSES):
                start(index, fault)
            for _ in self._waiting():
                for index, process in processes.items():
                    if process.exitcode:
                        codes.append(as_shell(process.exitcode))
                        start(index, None)
                if all(process.exitcode == 0 for process in processes.values()):
                    break
        return codes

    def text(self) -> str:
        """Returns what the processes of the last start said."""
        return "".join(path.read_text() for index in range(NUM_PROCESSES) if (path := self._said(index)).exists())

    @contextmanager
    def _processes(self) -> Iterator[tuple[Callable[[int, Fault | None], None], dict[int, BaseProcess]]]:
        """Gives what starts a process, which a fault strikes if it is the one, and those that were started."""
        self.num_starts += 1
        port, processes = free_port(), dict[int, BaseProcess]()

        def start(index: int, fault: Fault | None) -> None:
            keys = {"coordinator_address": f"127.0.0.1:{port}", "num_processes": NUM_PROCESSES, "process_id": index}
            words = [f"num_steps={self.num_steps}", *(f"distributed.{key}={value}" for key, value in keys.items())]
            is_compiled = fault is not None and fault.phase == "compile"
            words.append(f"compilation_cache={'null' if is_compiled else self.cache}")
            if fault and fault.phase == "join":
                words.append(f"distributed.initialization_timeout_seconds={START_SECONDS}")
            struck = fault if fault and fault.process == index else None
            arguments = (self.folder, self._said(index), struck, ["train", *RUN, *words])
            processes[index] = FORKS.Process(target=run_command, args=arguments)
            processes[index].start()

        try:
            yield start, processes
        finally:
            for process in processes.values():
                process.kill()
                process.join()

    def _waiting(self) -> Iterator[None]:
        deadline = time.monotonic() + MOST_SECONDS
        while time.monotonic() < deadline:
            yield
            time.sleep(0.02)
        raise TimeoutError(f"start {self.num_starts} hung for {MOST_SECONDS} s: {self.text()[-500:]}")

    def _said(self, index: int) -> Path:
        return self.folder / f"start-{self.num_starts}-process-{index}.txt"


# Faults, one after the other, in a run that each of them disturbs.


def recover(faults: Sequence[Fault], folder: Path, cache: Path, undisturbed: Sequence[dict[str, Any]]) -> list[Outcome]:
    """Runs with each fault in turn, each start going on from the one before it, and last without. Returns what came of
    each fault. cache: compiled programs, which all runs share."""
    if any(fault.detail == "compiled" for fault in faults):
        shutil.copytree(cache, folder / "cache")  # to be damaged
        cache = folder / "cache"
    launch, run_dir, outcomes = Launch(folder, cache, len(undisturbed)), folder / "run", list[Outcome]()
    with small_disk(run_dir) if any(fault.kind == "fill disk" for fault in faults) else nullcontext():
        try:
            for fault in faults:
                outcomes.append(outcome := strike_once(fault, launch, outcomes))
                outcome.num_done, outcome.whole = len(lines_of(run_dir)), whole_steps(run_dir)
                if fault.kind in ("truncate", "flip"):
                    damaged = damage(fault, folder, cache, random.Random(fault.name))
                    outcome.whole = [
                        step for step in outcome.whole if run_dir / f"checkpoints/{step}" not in damaged.parents
                    ]
                (folder / FILLER).unlink(missing_ok=True)
            codes = launch.run(None)
            if any(codes):
                outcomes[-1].wrong.append(f"the next start ended with {codes}: {launch.text()[-500:]}")
            check_continued(outcomes, launch.text())
            # Lines that were cut off are not written again, where their steps are not.
            cut = max((o.from_step for o, f in zip(outcomes, faults, strict=True) if f.detail == "metrics"), default=0)
            outcomes[-1].wrong += differences(lines_of(run_dir), undisturbed, cut=cut)
        except Exception as error:  # the others are still to be tried
            outcomes.append(Outcome(wrong=[f"{type(error).__name__}: {error}"]))
    return outcomes


def strike_once(fault: Fault, launch: Launch, before: Sequence[Outcome]) -> Outcome:
    """Runs the start that the fault strikes, and looks at how it ended. before: of the starts before it."""
    codes = launch.run_each(fault) if fault.kind == "restart coordinator" else launch.run(fault)
    outcome, text = Outcome(codes), launch.text()
    is_full = fault.kind == "fill disk" and fault.phase == "start"  # refused until somebody makes room
    if not is_full and any(code in FINAL for code in codes):
        outcome.wrong.append(f"exit codes {codes} start nothing again: {text[-500:]}")
    if fault.kind != "clock" and not any(codes):
        outcome.wrong.append("the fault did not strike")
    if fault.is_named and not re.search(rf"process {fault.process}\b.* (gone|did not come|ended)", text):
        outcome.wrong.append(f"nobody named process {fault.process}: {text[-500:]}")
    if "Check failure stack trace" in text:
        outcome.wrong.append("a stack of C++ is on the terminal")
    if fault.phase not in ("join", "start", "compile") and before:
        check_continued(before, text)
    return outcome


def check_continued(outcomes: Sequence[Outcome], text: str) -> None:
    """Checks from which step a start went on. outcomes: of the faults before it; text: what it said."""
    last = outcomes[-1]
    found = re.search(r"continuing after step (\d+)|(\d+) steps? (?:is|are) done already", text)
    last.from_step = int(found[1] or found[2]) if found else 0
    last.lost = max(0, last.num_done - last.from_step)
    if last.from_step < max(last.whole, default=0):
        last.wrong.append(f"continued from {last.from_step}, and {max(last.whole)} was whole")


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics that can be read."""
    path, lines = run_dir / "metrics.jsonl", []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


def whole_steps(run_dir: Path) -> list[int]:
    """Returns the steps that were saved: a save is finished by a rename."""
    return sorted(int(path.name) for path in (run_dir / "checkpoints").glob("*") if path.name.isdigit())


def differences(lines: Sequence[dict[str, Any]], undisturbed: Sequence[dict[str, Any]], *, cut: int = 0) -> list[str]:
    """Returns where a run's curves are not, bit for bit, those of the other. cut: lines up to this step may be gone."""
    steps, expected = [line["step"] for line in lines], {line["step"]: line for line in undisturbed}
    if len(steps) != len(set(steps)) or {step for step in expected if step > cut} - set(steps):
        return [f"steps {steps}"]
    return [
        f"{key} of step {line['step']}: {line[key]} is not {expected[line['step']][key]}"
        for line in lines
        for key in ("loss", "grad_norm", "eval_loss", "learning_rate")
        if line[key] != expected[line["step"]][key]
    ]


def damage(fault: Fault, folder: Path, cache: Path, choose: random.Random) -> Path:
    """Truncates a file, or flips one of its bits. Returns which one."""
    newest = folder / "run" / "checkpoints" / str(max(whole_steps(folder / "run")))
    candidates = {
        "array": newest.glob("state/**/d/*"),
        "any of a checkpoint": newest.rglob("*"),
        "metrics": folder.glob("run/metrics.jsonl"),
        "record": folder.glob("run/run.json"),
        "compiled": cache.rglob("*"),
    }[fault.detail]
    file = choose.choice(sorted(path for path in candidates if path.is_file() and path.stat().st_size))
    content = bytearray(file.read_bytes())
    if fault.kind == "truncate":
        content = content[: choose.randrange(len(content))]
    else:
        content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
    file.write_bytes(content)
    return file


@contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """Within the `with`, a file system of a few megabytes is mounted there."""
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def undisturbed_run(folder: Path, cache: Path, num_steps: int = NUM_STEPS) -> list[dict[str, Any]]:
    """Returns the metrics of the run that nothing disturbs."""
    folder.mkdir(parents=True)
    launch = Launch(folder, cache, num_steps)
    codes = launch.run(None)
    assert codes == [0] * NUM_PROCESSES, launch.text()
    return lines_of(folder / "run")


# Which faults, and the table.


def all_faults(seed: int) -> list[Fault]:
    """Returns the faults, in an order and with details that the seed decides."""
    choose = random.Random(seed)
    phases = ("start", "compile", "step", "save", "evaluation")
    most_hits = {"step": NUM_STEPS - 2, "save": NUM_STEPS // STEPS_BETWEEN_SAVES, "evaluation": NUM_STEPS // 5}

    def fault(kind: Kind, phase: str, process: int, detail: str = "", first: int = 1) -> Fault:
        last = most_hits.get(phase, 1) - (kind == "terminate" and phase == "save")  # after the last there is no step
        delay = round(choose.uniform(0.0, 0.05), 3) if phase == "save" and kind != "terminate" else 0.0
        return Fault(kind, phase, process, choose.randint(min(first, last), last), delay, detail)

    both = range(NUM_PROCESSES)
    kinds: tuple[Kind, ...] = ("kill", "terminate", "freeze")
    faults = [fault(kind, phase, process) for kind in kinds for phase in phases for process in both]
    faults += [fault("kill", "join", process) for process in both]
    faults += [fault("fill disk", phase, choose.choice(both)) for phase in ("start", "step", "save", "evaluation")]
    faults += [
        fault(kind, "step", choose.choice(both), file, first=2 * STEPS_BETWEEN_SAVES + 3)
        for kind in ("truncate", "flip")
        for file in ("array", "any of a checkpoint", "metrics", "record", "compiled")
    ]
    jumps = (("step", 0, "+3600"), ("step", 1, "-3600"), ("save", 0, "-86400"), ("evaluation", 1, "+86400"))
    faults += [fault("clock", phase, process, by) for phase, process, by in jumps]
    faults += [fault("restart coordinator", phase, 0) for phase in ("compile", "step", "save", "evaluation")]
    choose.shuffle(faults)
    return faults


def kept_results(seed: int) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    return {row["name"]: row for row in rows if row["seed"] == seed}


def measure(faults: Sequence[Fault], seed: int, *, again: bool) -> list[dict[str, Any]]:
    """Returns a row for each fault, kept or new."""
    kept = {} if again else kept_results(seed)
    rows = []
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   console=Console(stderr=True))  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, bar:
        folder = Path(name)
        undisturbed = undisturbed_run(folder / "undisturbed", folder / "cache")
        task = bar.add_task("", total=len(faults))
        for number, fault in enumerate(faults):
            bar.update(task, description=fault.name)
            if fault.name not in kept or kept[fault.name]["wrong"]:
                (place := folder / str(number)).mkdir()
                begin = time.monotonic()
                outcome = recover([fault], place, folder / "cache", undisturbed)[-1]
                row = {"seed": seed, "name": fault.name, **asdict(fault), **asdict(outcome),
                       "seconds": round(time.monotonic() - begin, 1)}  # fmt: skip
                with KEPT.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                kept[fault.name] = row
                if outcome.wrong:
                    bar.console.print(f"{fault.name}: {outcome.wrong}", markup=False)
            rows.append(kept[fault.name])
            bar.advance(task)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as Markdown: a line for each kind of fault."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["kind"]].append(row)
    lines = ["| fault | where | number | recovered | exit codes | steps lost, most |", "|---|---|---|---|---|---|"]
    for kind, group in groups.items():
        where = ", ".join(sorted({row["detail"] if kind in ("truncate", "flip") else row["phase"] for row in group}))
        codes = ", ".join(map(str, sorted({code for row in group for code in row["codes"]})))
        recovered = sum(not row["wrong"] for row in group)
        lines.append(f"| {kind} | {where} | {len(group)} | {recovered} | {codes} | {max(r['lost'] for r in group)} |")
    return "\n".join(lines)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, help="the first N only")
    parser.add_argument("--only", help="faults whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="also measure faults whose results are saved")
    options = parser.parse_args()
    faults = [fault for fault in all_faults(options.seed) if not options.only or options.only in fault.name]
    rows = measure(faults[: options.faults], options.seed, again=options.again)
    print(table(rows))
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
