"""The bases of every optimizer and learning-rate schedule: what a declaration has of them, and what they build."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax
import optax
from pydantic import NonNegativeInt, PositiveFloat

from meshloom.models.config import Config

from ..core.errors import Problem

DecayOn = Literal["matrices", "all"]


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


class OptimizerConfig(Config):
    """The base of every optimizer. A subclass adds its name, `name: Literal["adamw"]`, and the keys that it needs."""

    if TYPE_CHECKING:
        name: Any

    learning_rate: PositiveFloat  # the peak; `schedule` sets the warm-up and the decay
    max_grad_norm: PositiveFloat | None  # gradients with a larger global norm are scaled down to it

    def build(self, setting: Setting) -> optax.GradientTransformation:
        """Returns the transformation from clipped gradients to what is added to the parameters, both in float32."""
        raise NotImplementedError


class ScheduleConfig(Config):
    """The base of every schedule: `decay` is what follows the warm-up. A subclass adds its kind, `kind:
    Literal[...]`."""

    if TYPE_CHECKING:
        kind: Any

    num_warmup_steps: NonNegativeInt  # linear, from peak / num_warmup_steps to the peak

    def decay(self, peak: float, num_steps: int) -> optax.Schedule:
        """Returns the learning rate over the `num_steps` after the warm-up, as a function of 0 .. num_steps - 1."""
        raise NotImplementedError

    def problems(self, num_steps: int) -> list[Problem]:  # noqa: ARG002
        """Returns what is wrong with it in a run of `num_steps`."""
        return []

    def warnings(self, peak: float, num_steps: int) -> list[Problem]:
        """Returns warnings about a run of `num_steps` that is valid but seldom intended: it may end in its warm-up."""
        if self.num_warmup_steps <= num_steps:
            return []
        last = peak * num_steps / self.num_warmup_steps
        what = f"is {self.num_warmup_steps} and num_steps is {num_steps}: the learning rate ends at {last:.3g} and never reaches {peak:.3g}"  # noqa: E501
        fix = f"use schedule.num_warmup_steps={num_steps // 10}, or a larger num_steps"
        return [Problem("schedule.num_warmup_steps", what, fix)]

    def build(self, peak: float, num_steps: int) -> optax.Schedule:
        """Returns a function of the step to its learning rate; the first step is 0."""
        decay = self.decay(peak, max(num_steps - self.num_warmup_steps, 1))
        if not self.num_warmup_steps:
            return decay

        def rise(step):
            return peak * (step + 1) / self.num_warmup_steps

        return optax.join_schedules([rise, decay], [self.num_warmup_steps])
