"""`hydra/launcher=meshloom_slurm`: the points of a sweep as an array of SLURM jobs (docs/launch.md)."""

# As launcher.py: no `from __future__ import annotations` in a module of Hydra's that has a dataclass.
from dataclasses import dataclass
from typing import Optional

from hydra.core.config_store import ConfigStore

from .launcher import PoolLauncher


@dataclass
class SlurmConf:
    """num_at_once: the most points that run at once; null: as many as SLURM has room for. The jobs themselves are as
    launch=slurm says."""

    _target_: str = "hydra_plugins.meshloom_sweeps.slurm.SlurmLauncher"
    num_at_once: Optional[int] = None  # noqa: UP045 (OmegaConf reads it)


ConfigStore.instance().store(group="hydra/launcher", name="meshloom_slurm", node=SlurmConf, provider="meshloom")


class SlurmLauncher(PoolLauncher):
    """Hands the points to Meshloom's engine, as the pool does."""
