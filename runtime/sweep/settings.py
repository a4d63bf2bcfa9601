"""Reads and checks the settings of the launchers meshloom_pool, meshloom_slurm and meshloom_jobset."""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshloom.compiler.core.errors import Problem, raise_if_any
from meshloom.compiler.declare.launch_spec import LaunchSpec

from .rows import SweepCommand

NAME = "meshloom_pool"
TARGET = "hydra_plugins.meshloom_sweeps.launcher.PoolLauncher"
CLUSTERS = {  # engines of launch
    "hydra_plugins.meshloom_sweeps.clusters.SlurmLauncher": "slurm",
    "hydra_plugins.meshloom_sweeps.clusters.JobSetLauncher": "jobset",
}
MOST_WORKERS = 1024
GIB = 2**30
# The memory that a point is expected to need before one was measured: imports, and tracing or compiling a large model.
EXPECTED_BYTES: dict[SweepCommand, int] = {"explain": GIB, "compile": 3 * GIB, "train": 3 * GIB}


@dataclass(frozen=True)
class PoolSettings:
    """The settings of the pool. num_workers: the most points at once. timeout_seconds: the most time of a point; None:
    no limit. worker_bytes: the memory that a point is expected to need, until one was measured. is_limit: a point that
    takes more is ended."""

    num_workers: int
    timeout_seconds: float | None
    worker_bytes: int
    is_limit: bool


@dataclass(frozen=True)
class ClusterSettings:
    """The settings of a cluster's launcher. engine: as in `launch`. num_at_once: the most points that run at once;
    None: as many as the cluster has room for."""

    engine: str
    num_at_once: int | None


def cluster_settings(launcher: Mapping[str, Any], command: SweepCommand, launch: LaunchSpec) -> ClusterSettings | None:
    """Returns the settings of a cluster's launcher; None if another launcher was chosen. Raises ConfigError if it
    cannot run this sweep."""
    engine = CLUSTERS.get(str(launcher.get("_target_")))
    if engine is None:
        return None
    num_at_once = launcher.get("num_at_once")
    problems = list[Problem]()
    if command != "train":
        what = f"meshloom_{engine} runs sweeps of train, and {command} needs no other machine"
        problems.append(Problem("hydra/launcher", what, "leave it out"))
    if launch.engine != engine:
        what = f"hydra/launcher=meshloom_{engine} submits what launch={engine} says, and launch is {launch.engine}"
        problems.append(Problem("launch", what, f"add launch={engine}, with what your cluster needs"))
    if num_at_once is not None and num_at_once < 1:
        what, fix = f"{num_at_once} is not a number of jobs", "give 1 or more, or null: as many as there is room for"
        problems.append(Problem("hydra.launcher.num_at_once", what, fix))
    raise_if_any(problems)
    return ClusterSettings(engine, num_at_once)


def pool_settings(launcher: Mapping[str, Any], command: SweepCommand, *, is_joined: bool) -> PoolSettings | None:
    """Returns the settings of the pool; None if another launcher was chosen. Raises ConfigError with all problems.

    is_joined: each point runs in several processes together, which go through the points in the same order.
    """
    if launcher.get("_target_") != TARGET:
        return None
    raise_if_any(_problems(launcher, is_joined=is_joined))
    # By default a worker for each core of this process; half as many for compilers, which use several threads.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_workers = launcher["num_workers"]
    if num_workers is None:
        num_workers = {"train": 1, "explain": cores, "compile": (cores + 1) // 2}[command]
    given = launcher["worker_bytes"]
    return PoolSettings(num_workers, launcher["timeout_seconds"], given or EXPECTED_BYTES[command], given is not None)


def _problems(values: Mapping[Any, Any], *, is_joined: bool) -> Iterator[Problem]:
    num, seconds, size = (values[name] for name in ("num_workers", "timeout_seconds", "worker_bytes"))
    if isinstance(num, int) and not 1 <= num <= MOST_WORKERS:
        fix = f"give 1 to {MOST_WORKERS:,}, or null: as many as cores and memory allow"
        yield Problem("hydra.launcher.num_workers", f"{num} is not a number of workers", fix)
    elif is_joined and isinstance(num, int) and num > 1:
        what = f"{num} points cannot run at once where each runs in several processes together"
        yield Problem("hydra.launcher.num_workers", what, "leave it out, or set it to 1")
    if isinstance(seconds, float) and not (seconds > 0 and math.isfinite(seconds)):
        fix = "give a number of seconds above 0, or null: no limit"
        yield Problem("hydra.launcher.timeout_seconds", f"{seconds:g} is not a time", fix)
    if isinstance(size, int) and size <= 0:
        fix = "give the bytes that a point may take, or null: as measured"
        yield Problem("hydra.launcher.worker_bytes", f"{size} is not a size", fix)
