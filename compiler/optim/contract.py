"""Defines the arrays that an optimizer is built for, and the bases of all optimizers and schedules (configs.py)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax

from .configs import DecayOn, OptimizerConfig, ScheduleConfig

__all__ = ["OptimizerConfig", "ScheduleConfig", "Setting"]


@dataclass(frozen=True)
class Setting:
    """An optimizer is built for a setting. schedule: step -> learning rate. kinds: the ParameterKind of every trained
    parameter, as a tree like the parameters. layouts: the PartitionSpec in which each is updated. mesh: the size of
    each mesh axis."""

    schedule: optax.Schedule
    kinds: Any
    layouts: Any
    mesh: Mapping[str, int]

    def decay_mask(self, weight_decay_on: DecayOn) -> Any:
        """Returns a tree of booleans: True for parameters that decay. `matrices`: not norm scales and biases."""
        return jax.tree.map(lambda kind: kind.is_matrix or weight_decay_on == "all", self.kinds)
