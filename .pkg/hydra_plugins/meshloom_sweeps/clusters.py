"""Adds `hydra/launcher=meshloom_slurm` and `meshloom_jobset`: points of a sweep become jobs of a cluster.

`launch` declares the jobs (docs/launch.md). Meshloom's engine runs them, as it runs the pool.
"""

# No `from __future__ import annotations`, for the reason in launcher.py.
from dataclasses import dataclass
from typing import Optional

from hydra.core.config_store import ConfigStore

from .launcher import PoolLauncher


@dataclass
class SlurmConf:
    """The settings of meshloom_slurm. num_at_once: the most points that run at once; null: as many as SLURM has room
    for."""

    _target_: str = "hydra_plugins.meshloom_sweeps.clusters.SlurmLauncher"
    num_at_once: Optional[int] = None  # noqa: UP045 (OmegaConf reads it)


@dataclass
class JobSetConf:
    """The settings of meshloom_jobset: none, as Kueue decides how many points run at once."""

    _target_: str = "hydra_plugins.meshloom_sweeps.clusters.JobSetLauncher"


STORE = ConfigStore.instance()
STORE.store(group="hydra/launcher", name="meshloom_slurm", node=SlurmConf, provider="meshloom")
STORE.store(group="hydra/launcher", name="meshloom_jobset", node=JobSetConf, provider="meshloom")


class SlurmLauncher(PoolLauncher):
    """Submits an array of jobs for the points of each kind of hosts."""


class JobSetLauncher(PoolLauncher):
    """Applies a JobSet for each point."""
