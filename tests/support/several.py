"""Several processes: real ones, and the coordination service that they would share."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jax._src.lib import (
    _jax,  # pyright: ignore[reportPrivateImportUsage]  # what jax.distributed.initialize starts
)

from meshloom.compiler.core.errors import ConfigError
from meshloom.runtime.launch.local import free_port
from meshloom.runtime.processes.distributed import Processes
from support.forked import Process, start

TIMEOUTS = ("distributed.initialization_timeout_seconds=60", "distributed.heartbeat_timeout_seconds=10",
            "distributed.shutdown_timeout_seconds=30")  # fmt: skip


def slurm(num_processes: int, port: int) -> list[dict[str, str]]:
    """The variables of `srun`, for each of its processes."""
    same = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "127.0.0.1", "JAX_COORDINATOR_PORT": str(port)}
    return [same | {"SLURM_NTASKS": str(num_processes), "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}
            for i in range(num_processes)]  # fmt: skip


def open_mpi(num_processes: int, port: int) -> list[dict[str, str]]:
    """The variables of Open MPI's `mpirun`, for each of its processes."""
    same = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911", "JAX_COORDINATOR_PORT": str(port)}
    return [same | {"OMPI_COMM_WORLD_SIZE": str(num_processes), "OMPI_COMM_WORLD_RANK": str(i),
                    "OMPI_COMM_WORLD_LOCAL_RANK": str(i)} for i in range(num_processes)]  # fmt: skip


def keys(num_processes: int, port: int) -> list[tuple[str, ...]]:
    """Overrides that say it, for each process."""
    same = (f"distributed.coordinator_address=127.0.0.1:{port}", f"distributed.num_processes={num_processes}")
    return [(*same, f"distributed.process_id={i}") for i in range(num_processes)]


class Started:
    """Processes of `meshloom train` with these overrides each; `end` gives exit code, stdout and stderr of each.

    folder: where they run, or where each of them does. code: run by a process instead of the command. is_forked: a
    fresh process has its own hash seed.
    """

    def __init__(
        self,
        folder: Path | Sequence[Path],
        *lines: tuple[str, ...],
        env: list[dict[str, str]] | None = None,
        code: dict[int, str] | None = None,
        is_forked: bool = True,
    ):
        self.processes: list[Process] = []
        for index, line in enumerate(lines):
            program = ["-c", code[index]] if code and index in code else ["-m", "meshloom"]
            command = [*program, "train", *TIMEOUTS, *line]
            environment = os.environ | (env[index] if env else {})
            cwd = folder if isinstance(folder, Path) else folder[index]
            self.processes.append(start(command, cwd=cwd, env=environment, is_forked=is_forked))

    def end(self) -> list[tuple[int, str, str]]:
        try:
            said = [process.communicate(timeout=300) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        return [(p.returncode, _without_gloo(out), err) for p, (out, err) in zip(self.processes, said, strict=True)]


GLOO_SAYS = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"


def _without_gloo(out: str) -> str:
    """Leaves out what the collectives of simulated devices print by themselves. Threads write into each other's lines,
    so a line is theirs if all of its words are."""
    words = set(_words(GLOO_SAYS))
    return "".join(line for line in out.splitlines(keepends=True) if not words.issuperset(_words(line)))


def _words(line: str) -> list[str]:
    return re.findall(r"[^\s\d]+", line)


@contextmanager
def joined() -> Iterator[list[Processes]]:
    """Gives what two processes share before they have devices: a coordination service, here with both clients."""
    port = free_port()
    service = _jax.get_distributed_runtime_service(f"[::]:{port}", 2, heartbeat_timeout=300, shutdown_timeout=60)
    clients = [_jax.get_distributed_runtime_client(f"127.0.0.1:{port}", i, init_timeout=30) for i in (0, 1)]
    in_both(lambda i: clients[i].connect())
    yield [Processes(i, 2, 10, client) for i, client in enumerate(clients)]
    in_both(lambda i: clients[i].shutdown())
    service.shutdown()


def in_both(call: Callable[[int], Any]) -> list[Any]:
    """`call(0)` and `call(1)` at the same time: result or error of each."""

    def caught(index: int) -> Any:
        try:
            return call(index)
        except ConfigError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(caught, (0, 1)))
