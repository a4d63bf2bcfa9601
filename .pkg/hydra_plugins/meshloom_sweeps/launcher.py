"""`hydra/launcher=meshloom_pool`: the points of a sweep in worker processes that stay warm (docs/sweeps.md)."""

# Hydra executes this before it is in sys.modules: with `from __future__ import annotations` a dataclass would fail.
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class PoolConf:
    """num_workers: points at once; null: as cores and memory allow, and one for `train`. timeout_seconds: of a point;
    null: no limit. worker_bytes: memory that a point is expected to need until one was measured; null: by command."""

    _target_: str = "hydra_plugins.meshloom_sweeps.launcher.PoolLauncher"
    num_workers: Optional[int] = None  # noqa: UP045 (OmegaConf reads it)
    timeout_seconds: Optional[float] = None  # noqa: UP045
    worker_bytes: Optional[int] = None  # noqa: UP045


ConfigStore.instance().store(group="hydra/launcher", name="meshloom_pool", node=PoolConf, provider="meshloom")


class PoolLauncher(Launcher):
    """Hands the points to Meshloom's own engine, which has the settings of this launcher already."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Needs nothing of Hydra's: the points are composed in the workers."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs a batch of points. Returns one JobReturn for each, whose value is the objective."""
        from meshloom.runtime.sweep.hydra_points import launch  # noqa: PLC0415 (it is heavy)

        return launch(job_overrides, initial_job_idx)
