"""Reports a process of the run that is gone or never came, and ends the others with an exit code that restarts them.

JAX's coordination service detects the loss, and ends each process by SIGABRT from a C++ thread, which no `except`
catches, with a stack on stderr. So stderr goes to a file while there are several processes. The signal is handled by
the C library's `sleep`: called with the signal's number, 6, it holds that thread for six seconds. Meanwhile a Python
thread reads the file, reports what happened in a line, and ends the process. If Python cannot run, the abort continues
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

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import be
from meshloom.compiler.core.visible import write_problems
from meshloom.compiler.declare.run_spec import DistributedSpec

from ..core.failures import LOST, leave_now
from ..core.stderr_capture import captured_tail

LOG = logging.getLogger("meshloom")
_POLL_SECONDS = 0.2
LOOKS_PER_HEARTBEAT_TIMEOUT = 4
ENDED = "meshloom/ended"  # a folder in the store: the reasons why processes ended
# Output of jaxlib 0.10.2: the fatal line, the status, and a line for each process (xla/pjrt/distributed/client.h,
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
    """A loss that the coordination service found. missing: the processes that it names. why: its status text."""

    kind: LossKind
    missing: tuple[int, ...]
    why: str


def read_loss(text: str) -> Loss | None:
    """Returns the loss that the coordination service reports before it ends this process; None if it reports none.

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
    """The processes of a run as one of them knows them. address: the address of process 0's coordination service.
    hosts: the names of their machines, () until all have come."""

    index: int
    count: int
    address: str
    timeouts: DistributedSpec
    hosts: tuple[str, ...] = ()

    def speaker(self, missing: Collection[int]) -> int:
        """Returns the process that writes to the terminal: the first one that is not missing."""
        return min(set(range(self.count)) - set(missing), default=self.index)

    def named(self, index: int) -> str:
        """Returns "process 1 on host-b"."""
        return f"process {index} on {self.hosts[index]}" if self.hosts else f"process {index}"


def describe_loss(loss: Loss, group: Group, last_step: int | None) -> Problem:
    """Returns the missing processes and a fix. last_step: the last step that ended here; None before the first."""
    timeouts = group.timeouts
    who = _listed([group.named(index) for index in loss.missing])
    match loss.kind:
        case "never came":
            came = sorted(set(range(group.count)) - set(loss.missing))
            # Without process 0 no process knows of the others.
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
    """Tells the other processes why this one ends. If it is process 0, the store ends with it."""
    with suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(f"{ENDED}/{index:06}", why, allow_overwrite=True)


class Lookout:
    """Threads that watch for JAX's last message before it ends this process, and for the reasons why others ended.

    The attributes are set from outside. group: the processes as known so far. client: the client of the coordination
    service, while all processes are there. last_step: the last step that has ended. has_log: the output of C++ is in a
    log of the run.
    """

    group: Group
    client: Any = None
    last_step: int | None = None
    has_log: bool = False

    def __init__(self, end: Callable[[int], object] = leave_now):
        """Makes a lookout that is not started. end: ends this process."""
        self._end, self._over = end, threading.Event()
        self._reasons: dict[int, str] = {}
        self._speech = threading.Lock()  # several threads may find the same loss

    def start(self, group: Group) -> None:
        """Starts the threads, and makes an abort wait for them."""
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
        """Asks why others ended, while the store still answers: it stops before this process is aborted."""
        while not self._over.wait(self.group.timeouts.heartbeat_timeout_seconds / LOOKS_PER_HEARTBEAT_TIMEOUT):
            self.ask_reasons()

    def ask_reasons(self) -> None:
        """Asks the store why others ended."""
        with suppress(jax.errors.JaxRuntimeError):
            told = self.client.key_value_dir_get(f"{ENDED}/") if self.client else ()
            self._reasons = {int(key.rsplit("/", 1)[1]): text for key, text in told}

    def tell_reason_of_another(self) -> None:
        """Ends this process, as `tell` does, if another one has said why it ended."""
        if self._reasons:
            index, text = min(self._reasons.items())
            what = f"{self.group.named(index)} ended: {text}"
            self.tell(Problem("distributed", what, f"see logs/process-{index}.log"), missing=self._reasons)

    def tell(self, problem: Problem, missing: Collection[int] = (), printed: bytes = b"") -> None:
        """Reports what happened, once for all processes that are left, and ends this one. printed: the output of C++,
        if no log has it."""
        self._speech.acquire()
        if not self.has_log:
            problem = Problem(problem.where, problem.what, f"{problem.fix}{_kept(printed, self.group.index)}")
        else:
            LOG.error("%s", problem)
        # If no process was named, or process 0 could not name the others, every process speaks for itself.
        is_alone = not missing or (0 in missing and not self.group.hosts)
        if is_alone or self.group.index == self.group.speaker(missing):
            write_problems(str(ConfigError([problem])))
        logging.shutdown()
        sys.stdout.flush()
        self._end(LOST)
        os._exit(LOST)


def _hold_aborts() -> None:
    """Makes SIGABRT call `sleep(6)` before it takes effect. Handlers that are set later, such as faulthandler's, call
    this one afterwards."""
    if os.name != "posix":
        return
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _kept(printed: bytes, index: int) -> str:
    """Writes the output of C++ to a file, and returns a phrase with its path; "" if there is none."""
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
