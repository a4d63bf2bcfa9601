"""Starts a launch: runs the commands of its engine, or, for `launch=local`, the processes of the run on this machine.

The latter rehearses a launch on many hosts. Process 0 has the terminal; the others write to files. A signal to this
process reaches all of them. When one fails, the others get time to notice and are then ended, and its exit code decides
whether all are started again.
"""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.visible import write_error, write_out
from meshloom.compiler.declare.launch_spec import LaunchSpec, LocalLaunch
from meshloom.compiler.declare.overrides import override
from meshloom.compiler.declare.run_spec import DistributedSpec

from ..core.failures import ASKING, FINAL, INTERRUPTED
from .engines import render
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


def run_launch(launch: LaunchSpec, timeouts: DistributedSpec, plan: LaunchPlan) -> int:
    """Starts the run, or shows the command that would. Returns the exit code. Raises ConfigError if the engine's tool
    is not installed, and launch.dry_run=false."""
    made = None if isinstance(launch, LocalLaunch) else render(launch, plan)
    for note in made.notes if made else ():
        write_error(f"launch: {note}")
    missing = f"{made.tool} is not installed here" if made and shutil.which(made.tool) is None else None
    if launch.dry_run is False and missing:
        raise ConfigError([Problem("launch", missing, "install it, or set launch.dry_run=true to see what would run")])
    if not launch.dry_run and not missing:
        write_error(f"launch: {plan.name}: {plan.hosts}, in {plan.run_dir}")
        if made is None:
            assert isinstance(launch, LocalLaunch)
            return run_local(plan, launch, timeouts)
        for folder in made.folders:
            Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="meshloom-launch-") as folder:
            if made.file:
                (Path(folder) / made.file).write_text(made.text)
            argv = [str(Path(folder) / word) if word == made.file else word for word in made.command]
            code = as_shell(subprocess.run(argv, check=False).returncode)
        if code:
            write_error(f"error: launch: {shlex.join(made.command)} failed with exit code {code}")
        return code
    if made is None:
        for process in local_processes(plan, PORT):
            write_out(str(process))
    else:  # the file is unchanged, so that standard output can be saved as that file, and commands are its comments
        if made.file:
            write_out(made.text.rstrip("\n"))
        # SLURM opens a job's log before the script runs, and ends the job if it cannot.
        for command in [*(("mkdir", "-p", folder) for folder in made.folders), made.command]:
            write_out(f"{'# ' if made.file else ''}{shlex.join(command)}")
    why = "launch.dry_run=true" if launch.dry_run else missing
    write_error(f"launch: {plan.name}: {plan.hosts}; nothing was started: {why}")
    return 0


def local_processes(plan: LaunchPlan, port: int | str) -> list[LocalProcess]:
    """Returns the processes of a plan, each playing a host. port: a free port, for process 0.

    Hosts of several slices get the variables that GKE's admission webhook sets there, and those that make JAX accept
    them on a machine without a TPU; others get keys of the declaration.
    """
    hosts, processes = plan.hosts, []
    program = plan.program if plan.program != ("meshloom",) else (sys.executable, "-m", "meshloom")
    for index in range(hosts.count):
        keys = {"coordinator_address": f"127.0.0.1:{port}", "num_processes": hosts.count, "process_id": index}
        environment = dict[str, str]()
        if hosts.num_slices > 1:
            slice_id, worker = divmod(index, hosts.per_slice)
            keys = {"cluster": "gketpu"}
            environment = {
                "TPU_WORKER_ID": str(worker),
                "TPU_WORKER_HOSTNAMES": ",".join(["127.0.0.1"] * hosts.per_slice),
                "MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.1:8080",  # JAX reads only its host
                "MEGASCALE_NUM_SLICES": str(hosts.num_slices),
                "MEGASCALE_SLICE_ID": str(slice_id),
                "JAX_COORDINATOR_PORT": str(port),
                "JAX_FORCE_TPU_INIT": "1",
                "JAX_PLATFORMS": "cpu",
                "TPU_SKIP_MDS_QUERY": "1",
            }
        words = [override(f"distributed.{key}", value) for key, value in keys.items()]
        processes.append(LocalProcess(index, (*program, *plan.words, *words), {**plan.environment, **environment}))
    return processes


def run_local(plan: LaunchPlan, launch: LocalLaunch, timeouts: DistributedSpec) -> int:
    """Runs the processes until all have ended, and restarts them as their exit codes and max_restarts allow. Returns 0
    if all ended with it, else the exit code of the first that did not."""
    grace_seconds = timeouts.heartbeat_timeout_seconds + timeouts.shutdown_timeout_seconds
    asked_to_stop, processes = list[int](), list[subprocess.Popen[bytes]]()

    def send(number: int) -> None:
        for process in processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def forward(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        asked_to_stop.append(number)
        send(number)

    (Path(plan.run_dir) / LOGS).mkdir(parents=True, exist_ok=True)
    heard = [number for number in (signal.SIGINT, *ASKING) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in heard}
    attempt = 0
    try:
        while True:
            try:
                for process in local_processes(plan, free_port()):
                    processes.append(_start(process, plan, launch.setup))
                exit_code, deadline = _first_failure(processes, plan), time.monotonic() + grace_seconds
                while any(process.poll() is None for process in processes):
                    if time.monotonic() > deadline:
                        write_error(f"launch: the others still ran {grace_seconds} s later, and are ended")
                        break
                    time.sleep(_POLL_SECONDS)
            finally:
                send(signal.SIGKILL)
                while processes:
                    processes.pop().wait()
            if exit_code == 0 or exit_code in FINAL or asked_to_stop or attempt == launch.max_restarts:
                return exit_code
            attempt += 1
            write_error(f"launch: exit code {exit_code}: restart {attempt} of {launch.max_restarts}")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first_failure(processes: Sequence[subprocess.Popen[bytes]], plan: LaunchPlan) -> int:
    """Waits until a process fails, or all have ended. Reports the failed process, and returns its exit code, else 0."""
    while True:
        codes = {index: process.poll() for index, process in enumerate(processes)}
        failed = {index: as_shell(code) for index, code in codes.items() if code}
        if failed:
            index = next((i for i, code in failed.items() if code in FINAL), min(failed))
            code, where = failed[index], "" if index == 0 else f": see {_output(plan, index)}"
            is_signal = code > 128 and code != INTERRUPTED and code - 128 in set(signal.Signals)
            name = f" ({signal.Signals(code - 128).name})" if is_signal else ""
            write_error(f"launch: process {index} of {len(processes)} ended with exit code {code}{name}{where}")
            return code
        if None not in codes.values():
            return 0
        time.sleep(_POLL_SECONDS)


def _start(process: LocalProcess, plan: LaunchPlan, setup: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own: it gets Ctrl-C once, from this process, and not from the terminal
    too."""
    argv, environment = list(process.argv), os.environ | process.environment
    if setup:
        argv = ["bash", "-c", "\n".join(["set -e", *setup, f"exec {shlex.join(argv)}"])]
    if process.index == 0:
        return subprocess.Popen(argv, env=environment, start_new_session=True)
    with _output(plan, process.index).open("ab") as output:
        return subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def as_shell(returncode: int) -> int:
    """Returns the exit code of a process as a shell gives it: -9 -> 137."""
    return 128 - returncode if returncode < 0 else returncode


def free_port() -> int:
    """Returns a port on which nothing listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _output(plan: LaunchPlan, index: int) -> Path:
    return Path(plan.run_dir) / LOGS / f"output-{index}.log"
