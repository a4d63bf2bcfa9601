"""Adds `hydra/sweeper=meshloom_grid`: Hydra's basic sweeper, which does not compose each point first, at 0.3 s each.

Meshloom has checked all values before. A point that cannot be composed becomes a row with the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore


@dataclass
class GridConf:
    """The settings of Hydra's basic sweeper. max_batch_size: points that the launcher gets at once. params: swept
    too."""

    _target_: str = "hydra_plugins.meshloom_sweeps.sweeper.GridSweeper"
    max_batch_size: Optional[int] = None  # noqa: UP045 (OmegaConf reads it)
    params: dict[str, Any] = field(default_factory=dict)


ConfigStore.instance().store(group="hydra/sweeper", name="meshloom_grid", node=GridConf, provider="meshloom")


class GridSweeper(BasicSweeper):
    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Does nothing: each point checks itself."""
