"""Adds launchers of sweeps: `hydra/launcher=meshloom_pool`, and for clusters `meshloom_slurm` and `meshloom_jobset`.

Points run in worker processes that stay warm (docs/sweeps.md), or as jobs that `launch` declares (docs/launch.md).
"""

# Hydra executes this before it is in sys.modules: with `from __future__ import annotations` a dataclass would fail.
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class PoolConf:
    """The settings of meshloom_pool. num_workers: points at once; null: as many as cores and memory allow, and one for
    `train`. timeout_seconds: the most time of a point; null: no limit. worker_bytes: the most memory of a point; null:
    no limit, and the first points are expected to need what their command usually does."""

    _target_: str = "hydra_plugins.meshloom_sweeps.launcher.PoolLauncher"
    num_workers: Optional[int] = None  # noqa: UP045 (OmegaConf reads it)
    timeout_seconds: Optional[float] = None  # noqa: UP045
    worker_bytes: Optional[int] = None  # noqa: UP045


@dataclass
class SlurmConf:
    """The settings of meshloom_slurm. num_at_once: the most points that run at once; null: as many as SLURM has room
    for."""

    _target_: str = "hydra_plugins.meshloom_sweeps.launcher.SlurmLauncher"
    num_at_once: Optional[int] = None  # noqa: UP045


@dataclass
class JobSetConf:
    """The settings of meshloom_jobset: none, as Kueue decides how many points run at once."""

    _target_: str = "hydra_plugins.meshloom_sweeps.launcher.JobSetLauncher"


for name, conf in {"meshloom_pool": PoolConf, "meshloom_slurm": SlurmConf, "meshloom_jobset": JobSetConf}.items():
    ConfigStore.instance().store(group="hydra/launcher", name=name, node=conf, provider="meshloom")


class PoolLauncher(Launcher):
    """Hands the points to Meshloom's own engine, which already has the settings of this launcher."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Does nothing: the workers compose the points."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs a batch of points. Returns a JobReturn for each, with the objective as its value."""
        from meshloom.runtime.sweep.engine import launch  # noqa: PLC0415 (it is heavy)

        values = launch(job_overrides, initial_job_idx)
        returns = [JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED) for overrides in job_overrides]
        for returned, value in zip(returns, values, strict=True):
            returned.return_value = value
        return returns


class SlurmLauncher(PoolLauncher):
    """Submits an array of jobs for the points of each kind of hosts."""


class JobSetLauncher(PoolLauncher):
    """Applies a JobSet for each point."""
