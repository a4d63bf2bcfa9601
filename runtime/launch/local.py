"""Runs `launch=local`: the processes of a run on this machine, a rehearsal of a launch on many hosts.

Process 0 has the terminal; the others write to files. A signal to this process reaches all of them. When one fails, the
others get time to notice and are then ended, and its exit code decides whether all are started again.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from meshloom.compiler.core.visible import write_error
from meshloom.compiler.declare.launch_spec import LocalLaunch
from meshloom.compiler.declare.overrides import override
from meshloom.compiler.declare.run_spec import DistributedSpec

from ..core.failures import FINAL, INTERRUPTED
from .plan import LaunchPlan

_POLL_SECONDS = 0.1
LOGS = "logs"
PORT = "PORT"  # shown by a dry run; a free port is chosen at the start


@dataclass(frozen=True)
class LocalProcess:
    """One process: its command line, and its variables besides those of this process."""

    index: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        """Returns the shell command that starts it."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.argv)])


def local_processes(plan: LaunchPlan, port: int | str) -> list[LocalProcess]:
    """Returns the processes of a plan, each playing a host. port: a free port, for process 0."""
    hosts = plan.hosts
    find = _as_gke if hosts.num_slices > 1 else _by_keys
    program = plan.program if plan.program != ("meshloom",) else (sys.executable, "-m", "meshloom")
    processes = []
    for index in range(hosts.count):
        words, environment = find(plan, index, port)
        processes.append(LocalProcess(index, (*program, *plan.words, *words), {**plan.environment, **environment}))
    return processes


def run_local(plan: LaunchPlan, launch: LocalLaunch, timeouts: DistributedSpec) -> int:
    """Runs the processes until all have ended, and restarts them as their exit codes and max_restarts allow. Returns
    the exit code that decided."""
    for attempt in range(launch.max_restarts + 1):
        group = _Group(plan, launch.setup, timeouts)
        exit_code = group.run()
        if exit_code == 0 or exit_code in FINAL or group.asked_to_stop or attempt == launch.max_restarts:
            return exit_code
        write_error(f"launch: exit code {exit_code}: restart {attempt + 1} of {launch.max_restarts}")
    raise AssertionError


class _Group:
    """The processes of one attempt."""

    def __init__(self, plan: LaunchPlan, setup: Sequence[str], timeouts: DistributedSpec):
        self.plan, self.setup = plan, setup
        self.grace_seconds = timeouts.heartbeat_timeout_seconds + timeouts.shutdown_timeout_seconds
        self.asked_to_stop: signal.Signals | None = None
        self.processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        """Returns 0 if all processes ended with it, else the exit code of the first that did not."""
        with self._forwarding(), self._started():
            failed, deadline = self._first_failure(), None
            while any(process.poll() is None for process in self.processes):
                deadline = deadline or time.monotonic() + self.grace_seconds
                if time.monotonic() > deadline:
                    write_error(f"launch: the others still ran {self.grace_seconds} s later, and are ended")
                    self._signal(signal.SIGKILL)
                time.sleep(_POLL_SECONDS)
        return failed or 0

    def _first_failure(self) -> int | None:
        """Waits until a process fails, or all have ended. Reports the failed process, and returns its exit code."""
        left = dict(enumerate(self.processes))
        while left:
            ended = {index: process for index, process in left.items() if process.poll() is not None}
            failed = {index: code for index, process in ended.items() if (code := as_shell(process.returncode))}
            if failed:
                index = next((i for i, code in failed.items() if code in FINAL), min(failed))
                where = "" if index == 0 else f": see {_output(self.plan, index)}"
                write_error(
                    f"launch: process {index} of {len(self.processes)} ended with {_told(failed[index])}{where}"
                )
                return failed[index]
            for index in ended:
                del left[index]
            time.sleep(_POLL_SECONDS)
        return None

    @contextmanager
    def _started(self) -> Iterator[None]:
        port = free_port()
        (Path(self.plan.run_dir) / LOGS).mkdir(parents=True, exist_ok=True)
        try:
            for process in local_processes(self.plan, port):
                self.processes.append(self._start(process))
            yield
        finally:
            self._signal(signal.SIGKILL)
            for process in self.processes:
                process.wait()

    def _start(self, process: LocalProcess) -> subprocess.Popen[bytes]:
        """Starts a process in a session of its own: it gets Ctrl-C once, from this process, and not from the terminal
        too."""
        argv, environment = list(process.argv), os.environ | process.environment
        if self.setup:
            argv = ["bash", "-c", "\n".join(["set -e", *self.setup, f"exec {shlex.join(argv)}"])]
        if process.index == 0:
            return subprocess.Popen(argv, env=environment, start_new_session=True)
        with _output(self.plan, process.index).open("ab") as output:
            return subprocess.Popen(
                argv, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        def forward(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
            self.asked_to_stop = signal.Signals(number)
            self._signal(number)

        before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)


def as_shell(returncode: int) -> int:
    """Returns the exit code of a process as a shell gives it: -9 -> 137."""
    return 128 - returncode if returncode < 0 else returncode


def free_port() -> int:
    """Returns a port on which nothing listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _by_keys(plan: LaunchPlan, index: int, port: int | str) -> tuple[list[str], dict[str, str]]:
    keys = {"coordinator_address": f"127.0.0.1:{port}", "num_processes": plan.hosts.count, "process_id": index}
    return [override(f"distributed.{key}", value) for key, value in keys.items()], {}


def _as_gke(plan: LaunchPlan, index: int, port: int | str) -> tuple[list[str], dict[str, str]]:
    """Returns the variables that GKE's admission webhook sets on the hosts of several slices, and those that make JAX
    accept them on a machine without a TPU."""
    slice_id, worker = divmod(index, plan.hosts.per_slice)
    return ["distributed.cluster=gketpu"], {
        "TPU_WORKER_ID": str(worker),
        "TPU_WORKER_HOSTNAMES": ",".join(["127.0.0.1"] * plan.hosts.per_slice),
        "MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.1:8080",  # JAX reads only its host
        "MEGASCALE_NUM_SLICES": str(plan.hosts.num_slices),
        "MEGASCALE_SLICE_ID": str(slice_id),
        "JAX_COORDINATOR_PORT": str(port),
        "JAX_FORCE_TPU_INIT": "1",
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
    }


def _output(plan: LaunchPlan, index: int) -> Path:
    return Path(plan.run_dir) / LOGS / f"output-{index}.log"


def _told(exit_code: int) -> str:
    with suppress(ValueError):
        if exit_code > 128 and exit_code != INTERRUPTED:
            return f"exit code {exit_code} ({signal.Signals(exit_code - 128).name})"
    return f"exit code {exit_code}"
