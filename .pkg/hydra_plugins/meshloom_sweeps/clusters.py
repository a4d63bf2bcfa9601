"""`hydra/launcher=meshloom_slurm` and `meshloom_jobset`: the points of a sweep as jobs of a cluster (docs/launch.md).

The jobs are as `launch` says. Meshloom's engine runs them, as it runs the pool.
"""

# As launcher.py: no `from __future__ import annotations` in a module of Hydra's that has a dataclass.
from dataclasses import dataclass
from typing import Optional

from hydra.core.config_store import ConfigStore

from .launcher import PoolLauncher


@dataclass
class SlurmConf:
    """num_at_once: the most points that run at once; null: as many as SLURM has room for."""

    _target_: str = "hydra_plugins.meshloom_sweeps.clusters.SlurmLauncher"
    num_at_once: Optional[int] = None  # noqa: UP045 (OmegaConf reads it)


@dataclass
class JobSetConf:
    """Kueue says how many run at once."""

    _target_: str = "hydra_plugins.meshloom_sweeps.clusters.JobSetLauncher"


STORE = ConfigStore.instance()
STORE.store(group="hydra/launcher", name="meshloom_slurm", node=SlurmConf, provider="meshloom")
STORE.store(group="hydra/launcher", name="meshloom_jobset", node=JobSetConf, provider="meshloom")


class SlurmLauncher(PoolLauncher):
    """An array of jobs for the points of each kind of hosts."""


class JobSetLauncher(PoolLauncher):
    """A JobSet for each point."""
