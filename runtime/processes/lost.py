"""A process of the run is gone, or never came: the others say which one, and end with an exit code that restarts them.

JAX's coordination service finds it out, and ends each process by SIGABRT from a thread of C++, which no `except` sees,
with its stack on stderr. So stderr goes to a file while there are several processes. The signal is handled by `sleep`
of the C library: called with the signal's number, 6, it holds that thread for so many seconds. Meanwhile a thread of
Python reads the file, says in a line what happened, and ends the process. Where Python cannot run, the abort goes on
after the sleep, with exit code 134.
"""

import ctypes
import logging
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import jax

from meshloom.compiler.config.spec import DistributedSpec
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import be
from meshloom.compiler.core.visible import write_error
from meshloom.compiler.xla.stderr_capture import captured_tail

from ..core.failures import LOST
from ..core.interruptible import leave_now

LOG = logging.getLogger("meshloom")
_POLL_SECONDS = 0.2
LOOKS_PER_HEARTBEAT_TIMEOUT = 4
ENDED = "meshloom/ended"  # a folder in the store: why processes ended, each in its own words
# What jaxlib 0.10.2 writes: the fatal line, the status, and a line for each process (xla/pjrt/distributed/client.h,
# xla/tsl/distributed_runtime/coordination).
FATAL = b"the JAX distributed service detected fatal errors"
STATUS = re.compile(
    r"the JAX distributed service detected fatal errors.*?absl::Status: (.*?)(?=\*\*\* Check failure|\Z)", re.DOTALL
)
PROCESSES = re.compile(r"(?:stopped sending heartbeats\):|timed out task names:)\n((?:\S*\d\n)+)")
NO_ANSWER = re.compile(r"UNAVAILABLE|DEADLINE_EXCEEDED")  # of process 0, which runs the service

LossKind = Literal["never came", "gone", "did not end", "unknown"]


@dataclass(frozen=True)
class Loss:
    """What the coordination service found. missing: the processes that it names. why: the status in its words."""

    kind: LossKind
    missing: tuple[int, ...]
    why: str


def read_loss(text: str) -> Loss | None:
    """Returns what the coordination service said before it ended this process; None where it has not.

    "... absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\\n1\\n" ->
    Loss("gone", (1,), "UNAVAILABLE: ...")
    """
    if not (found := STATUS.search(text)):
        return None
    status = found[1]
    named = PROCESSES.search(status)
    missing = tuple(sorted(int(re.findall(r"\d+", line)[-1]) for line in named[1].splitlines())) if named else ()
    why = status.partition("\n")[0].strip()
    if "RegisterTask" in status or "Wait_for_all_tasks_to_register" in status:
        return Loss("never came", missing or (0,), why)
    if not missing and NO_ANSWER.match(status):
        return Loss("gone", (0,), why)
    if "Shutdown barrier" in status and missing:
        return Loss("did not end", missing, why)
    return Loss("gone" if missing else "unknown", missing, why)


@dataclass(frozen=True)
class Group:
    """The processes of a run as one of them knows them. address: of process 0's coordination service. hosts: names of
    their machines, () until all have come."""

    index: int
    count: int
    address: str
    timeouts: DistributedSpec
    hosts: tuple[str, ...] = ()

    def speaker(self, missing: Collection[int]) -> int:
        """Returns the process that speaks on the terminal: the first of those that are left."""
        return min(set(range(self.count)) - set(missing), default=self.index)

    def named(self, index: int) -> str:
        """Returns "process 1 on host-b"."""
        return f"process {index} on {self.hosts[index]}" if self.hosts else f"process {index}"


def describe_loss(loss: Loss, group: Group, last_step: int | None) -> Problem:
    """Returns who is missing, and what to do. last_step: the last that has ended here; None before the first."""
    timeouts = group.timeouts
    who = _listed([group.named(index) for index in loss.missing])
    match loss.kind:
        case "never came":
            came = sorted(set(range(group.count)) - set(loss.missing))
            # Without process 0 nobody knows of the others.
            others = f"; {_listed([group.named(index) for index in came])} did" if 0 not in loss.missing else ""
            where = f" to {group.address}" if 0 in loss.missing else ""
            seconds = timeouts.initialization_timeout_seconds
            what = f"{who} of {group.count} did not come{where} within {seconds} s{others}"
            fix = (
                f"see whether it was started and reaches {group.address} from its host; "
                "raise distributed.initialization_timeout_seconds where it is slow"
            )
        case "gone":
            sign = (
                f"nothing answers at {group.address}"
                if 0 in loss.missing
                else f"no heartbeat for {timeouts.heartbeat_timeout_seconds} s"
            )
            when = f"the last step that ended is {last_step}" if last_step is not None else "no step had ended"
            what = f"{who} {be(len(loss.missing))} gone: {sign}; {when}"
            fix = "see its host and logs/process-N.log; the same command goes on from the last checkpoint"
        case "did not end":
            seconds = timeouts.shutdown_timeout_seconds
            what = f"{who} did not come to the end of the run within {seconds} s; all is saved"
            fix = "see logs/process-N.log; raise distributed.shutdown_timeout_seconds where it is slow"
        case "unknown":
            what = f"JAX's coordination service ended the run: {loss.why}"
            fix = "see logs/process-N.log; the same command goes on from the last checkpoint"
    return Problem("distributed", what, fix)


def tell_reason(client: Any, index: int, why: str) -> None:
    """Tells the other processes why this one ends. Process 0, which runs the store, takes what it tells with it."""
    with suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(f"{ENDED}/{index:06}", why, allow_overwrite=True)


class Lookout:
    """Threads that wait for what JAX says before it ends this process, and for why others ended. group: as it is known
    so far; client: of the coordination service, while all are there; last_step: the last that has ended; has_log:
    whether what C++ prints is in a log of the run. They are set from outside."""

    group: Group
    client: Any = None
    last_step: int | None = None
    has_log: bool = False

    def __init__(self, end: Callable[[int], object] = leave_now):
        """end: ends this process."""
        self._end, self._over = end, threading.Event()
        self._reasons: dict[int, str] = {}
        self._speech = threading.Lock()  # several threads may find the same loss

    def start(self, group: Group) -> None:
        """Starts the threads, and has an abort wait for them."""
        self.group = group
        _hold_aborts()
        threading.Thread(target=self._watch, name="lookout", daemon=True).start()
        threading.Thread(target=self._listen, name="reasons of others", daemon=True).start()

    def stop(self) -> None:
        """Ends the threads: this process has left the others."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            tail = captured_tail()
            if FATAL in tail and (loss := read_loss(tail.decode(errors="replace"))):
                self.tell_reason_of_another()
                self.tell(describe_loss(loss, self.group, self.last_step), loss.missing, tail)
                return

    def _listen(self) -> None:
        """Asks why others ended while the store answers: it does not once this process is to be aborted."""
        while not self._over.wait(self.group.timeouts.heartbeat_timeout_seconds / LOOKS_PER_HEARTBEAT_TIMEOUT):
            self.ask_reasons()

    def ask_reasons(self) -> None:
        """Asks the store why others ended."""
        with suppress(jax.errors.JaxRuntimeError):
            told = self.client.key_value_dir_get(f"{ENDED}/") if self.client else ()
            self._reasons = {int(key.rsplit("/", 1)[1]): text for key, text in told}

    def tell_reason_of_another(self) -> None:
        """Ends this process, as `tell` does, if another one is known to have told why it ended."""
        if self._reasons:
            index, text = min(self._reasons.items())
            what = f"{self.group.named(index)} ended: {text}"
            self.tell(Problem("distributed", what, f"see logs/process-{index}.log"), missing=self._reasons)

    def tell(self, problem: Problem, missing: Collection[int] = (), printed: bytes = b"") -> None:
        """Says what happened, once for all processes that are left, and ends this one. printed: what C++ said of it,
        where no log has it."""
        self._speech.acquire()
        if not self.has_log:
            problem = Problem(problem.where, problem.what, f"{problem.fix}{_kept(printed, self.group.index)}")
        else:
            LOG.error("%s", problem)
        # Where nobody was named, or there was no process 0 to tell of the others, it knows of no better speaker.
        is_alone = not missing or (0 in missing and not self.group.hosts)
        if is_alone or self.group.index == self.group.speaker(missing):
            write_error(str(ConfigError([problem])))
        logging.shutdown()
        sys.stdout.flush()
        self._end(LOST)
        os._exit(LOST)


def _hold_aborts() -> None:
    """Has SIGABRT call `sleep(6)`, after which it goes on. Handlers that are set later, as by faulthandler, call this
    one in their turn."""
    if os.name != "posix":
        return
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _kept(printed: bytes, index: int) -> str:
    """Writes what C++ said to a file, and returns where it is."""
    if not printed:
        return ""
    try:
        number, path = tempfile.mkstemp(prefix=f"meshloom-process-{index}-", suffix=".log")
        with os.fdopen(number, "wb") as file:
            file.write(printed)
    except OSError:
        return ""
    return f"; JAX's own words are in {path}"


def _listed(names: list[str]) -> str:
    shown = names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
