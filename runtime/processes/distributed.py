"""Joins the processes of a run, and lets them exchange texts without a device.

Texts go through the key-value store of JAX's coordination service, which process 0 runs. It works before there is any
program, and each text has a sender. docs/processes.md says when processes meet.
"""

import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import jax

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.visible import write_error, write_problems
from meshloom.compiler.declare.problems import MISTAKES, as_config_error
from meshloom.compiler.declare.run_spec import DistributedSpec
from meshloom.compiler.spec.target_spec import TargetSpec

from ..core.failures import LOST, RunFailed, interruptibly
from ..core.stderr_capture import captured_native_stderr
from .initialize import initialize, plan_start
from .jax_private import joined
from .lost import Lookout, tell_reason

T = TypeVar("T")
COMMUNICATION = re.compile(r"gloo|nccl|connection|unavailable|heartbeat|coordination", re.IGNORECASE)
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_OVER_HEARTBEAT = 10
SECONDS_UNTIL_NOTE = 20  # of waiting for the others
COMPILED = "compiled programs"  # the meeting of processes after the compile
USUAL_TIMEOUT = "distributed.initialization_timeout_seconds"
TIMEOUT_OF = {COMPILED: "distributed.compile_timeout_seconds"}  # of meetings with their own time limit
# JAX's errors if a cluster tells it too little.
TOO_LITTLE_KNOWN = (ValueError, LookupError, RuntimeError, ImportError, OSError)


class Disagreement(ConfigError):
    """The processes of a run are about to run different things. All of them raise the same error."""


@dataclass(frozen=True)
class Processes:
    """The processes of this run, and the index of this one; a single process without `jax.distributed`.

    num_on_host: the number of processes on this machine. hosts: the names of the machines of all processes.
    """

    index: int = 0
    count: int = 1
    timeout_seconds: int = 0  # how long they wait for each other
    client: Any = None  # of JAX's coordination service
    num_on_host: int = 1
    hosts: tuple[str, ...] = ()
    lookout: Lookout | None = None  # for processes that are lost

    @property
    def is_first(self) -> bool:
        """Returns True in the process that writes to the terminal and to the files that are written once."""
        return self.index == 0

    def gather(self, name: str, text: str, *, timeout_seconds: int | None = None) -> list[str]:
        """Returns the texts of all processes, in their order, once all have given theirs. A name is used once.

        timeout_seconds: a time limit for the wait other than the usual one. Ctrl-C ends the wait. Raises RunFailed with
        the processes that did not come.
        """
        if self.count == 1:
            return [text]
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        self.client.key_value_set(f"meshloom/{name}/{self.index:06}", text)
        try:
            with self._note_of_wait(name, seconds):
                interruptibly(lambda: self.client.wait_at_barrier(f"meshloom/{name}", seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise self._not_come(name, self._missing(name), seconds) from error
        return [value for _, value in sorted(self.client.key_value_dir_get(f"meshloom/{name}/"))]

    def from_first(self, name: str, text: str | None = None) -> str:
        """Returns the text of process 0, which does not wait for the others. A name is used once."""
        if self.count == 1 or self.is_first:
            assert text is not None
            if self.count > 1:
                self.client.key_value_set(f"meshloom/{name}", text)
            return text
        try:
            key, milliseconds = f"meshloom/{name}", self.timeout_seconds * 1000
            return interruptibly(lambda: self.client.blocking_key_value_get(key, milliseconds))
        except jax.errors.JaxRuntimeError as error:
            raise self._not_come(name, [0], self.timeout_seconds) from error

    def _missing(self, name: str) -> list[int]:
        """Returns the processes that have not come to this meeting yet."""
        came = {int(key.rsplit("/", 1)[1]) for key, _ in self.client.key_value_dir_get(f"meshloom/{name}/")}
        return sorted(set(range(self.count)) - came)

    @contextmanager
    def _note_of_wait(self, name: str, seconds: int) -> Iterator[None]:
        """Within the `with`, process 0 reports the processes that it waits for, once the wait is long."""

        def note() -> None:
            missing = name_processes(self._missing(name), self.count)
            write_error(f"process 0: waiting for {missing} at '{name}', at most {seconds} s")

        timer = threading.Timer(SECONDS_UNTIL_NOTE, note)
        timer.daemon = True
        if self.is_first:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _not_come(self, name: str, missing: list[int], seconds: int) -> RunFailed:
        """Returns the error for a wait that ended without some of the processes."""
        who = f"{name_processes(missing, self.count)} did not come" if missing else "a process was lost"
        what = f"{who} to '{name}' within {seconds} s"
        fix = f"see their logs and terminals; raise {TIMEOUT_OF.get(name, USUAL_TIMEOUT)} where they are slow"
        return RunFailed(Problem("distributed", what, fix), LOST)


_joined = Processes()  # like JAX's own state, one for each process of the operating system
_held = ExitStack()  # contexts that last until `leave`


def current() -> Processes:
    """Returns the processes that this one has joined; before `join`, itself alone."""
    return _joined


def join(timeouts: DistributedSpec, target: TargetSpec) -> Processes:
    """Joins the other processes of the run, if any. Raises ConfigError if they cannot be found."""
    global _joined
    arguments = plan_start(timeouts, target, os.environ)
    if arguments is None:
        return _joined
    seconds = timeouts.initialization_timeout_seconds

    def say_waiting() -> None:  # JAX waits in silence, and ends the process when the time is up
        where = f"process {joined().process_id}: waiting for the others at {joined().coordinator_address}"
        write_error(f"{where}, at most {seconds} s")

    note = threading.Timer(SECONDS_UNTIL_NOTE, say_waiting)
    note.daemon = True
    note.start()
    _held.enter_context(captured_native_stderr())
    lookout = Lookout()
    try:
        interruptibly(lambda: initialize(arguments, timeouts, lookout))
    except KeyboardInterrupt:
        write_error("\ninterrupted while waiting for the other processes")
        os._exit(128 + signal.SIGINT)  # an orderly exit would wait for the other thread
    except ConfigError:
        raise
    except TOO_LITTLE_KNOWN as error:
        what = f"JAX could not start: {type(error).__name__}: {error}"
        fix = "set distributed.coordinator_address, num_processes and process_id, or choose distributed=alone"
        raise ConfigError([Problem("distributed", what, fix)]) from error
    finally:
        note.cancel()
    state = joined()
    _joined = Processes(state.process_id, state.num_processes, seconds, state.client, lookout=lookout)
    hosts = tuple(_joined.gather("hosts", socket.gethostname()))
    _joined = replace(_joined, num_on_host=hosts.count(socket.gethostname()), hosts=hosts)
    lookout.group, lookout.client = replace(lookout.group, hosts=hosts), _joined.client
    return _joined


def together(
    name: str, step: Callable[[], T], *, processes: Processes | None = None, timeout_seconds: int | None = None
) -> T:
    """Returns the result of a step that all processes take. If it fails in one, it fails in all, with the same
    problems.

    processes: default: those that this process has joined. timeout_seconds: as for `gather`.
    """
    result, error = None, None
    try:
        result = step()
    except MISTAKES as raised:
        error = as_config_error(raised)
    told = {
        "is_disagreement": isinstance(error, Disagreement),
        "problems": list(map(astuple, error.problems if error else ())),
        "exit_code": error.exit_code if error else 0,
    }
    processes = processes or current()
    texts = processes.gather(name, json.dumps(told), timeout_seconds=timeout_seconds)
    everyone = [json.loads(text) for text in texts]
    if error and all(each["is_disagreement"] for each in everyone):
        raise error
    # A mistake that one process finds in its own declaration explains why its declaration differs from the others'.
    found = [[] if each["is_disagreement"] else [Problem(*fields) for fields in each["problems"]] for each in everyone]
    if any(found):
        failure = ConfigError(_whose(problem, found) for problems in found for problem in problems)
        failure.exit_code = max(each["exit_code"] for each in everyone)
        raise failure
    return result  # type: ignore[return-value]


def leave() -> None:
    """Leaves the other processes, once all are done."""
    global _joined
    if _joined.client is not None:
        if _joined.lookout:
            _joined.lookout.client = None
        jax.distributed.shutdown()
        if _joined.lookout:
            _joined.lookout.stop()
        _joined = Processes()
    _held.close()


def crash(error: BaseException, run_dir: Path | None = None) -> None:
    """Ends one of several processes at once: the others may be waiting for it, and it must not wait for them.

    Process 0 prints the whole traceback, the others its last line; their logs hold the rest.
    """
    if _joined.count == 1:
        return
    lookout, is_of_another = _joined.lookout, isinstance(error, jax.errors.JaxRuntimeError)
    if lookout and is_of_another and COMMUNICATION.search(str(error)):
        # Another process is gone. It says why, or JAX finds that it is gone; either ends this process.
        deadline = time.monotonic() + lookout.group.timeouts.heartbeat_timeout_seconds + SECONDS_OVER_HEARTBEAT
        while time.monotonic() < deadline:
            lookout.ask_reasons()
            lookout.tell_reason_of_another()
            time.sleep(SECONDS_BETWEEN_LOOKS)
    why = str(error) if isinstance(error, ConfigError) else traceback.format_exception_only(error)[-1]
    tell_reason(_joined.client, _joined.index, why.strip())
    if isinstance(error, KeyboardInterrupt):
        write_error(f"process {_joined.index}: interrupted; nothing was saved since the last checkpoint")
    elif isinstance(error, ConfigError):
        write_problems(f"process {_joined.index}: {error}")
    elif _joined.is_first:
        write_error("".join(traceback.format_exception(error)).rstrip("\n"))
    else:
        last = traceback.format_exception_only(error)[-1].strip()
        log = f" ({run_dir}/logs/process-{_joined.index}.log)" if run_dir else ""
        write_error(f"process {_joined.index}: {last}{log}")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(error, KeyboardInterrupt):
        os._exit(128 + signal.SIGINT)
    os._exit(error.exit_code if isinstance(error, ConfigError) else 1)


def name_processes(indices: list[int], count: int) -> str:
    """Returns the processes as text: [1] -> "process 1"; [0, 2, 3] of 4 -> "processes 0, 2, 3"; most of many -> "the
    other 63"."""
    if len(indices) == 1:
        return f"process {indices[0]}"
    if len(indices) > 4 and 2 * len(indices) > count:
        return f"the other {len(indices)}"
    return f"processes {', '.join(map(str, indices))}"


def _whose(problem: Problem, found: list[list[Problem]]) -> Problem:
    """Returns the problem unchanged if all processes found it, otherwise with the processes that did."""
    owners = [index for index, problems in enumerate(found) if problem in problems]
    if len(owners) == len(found):
        return problem
    return Problem(f"{problem.where} ({name_processes(owners, len(found))})", problem.what, problem.fix)
