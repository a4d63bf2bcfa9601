"""Learning rates over the steps of a run: a linear warm-up, then what the kind says.

peak P, run of N steps, warm-up of W, final fraction f, s = (step - W) / (N - W):

    constant  P
    cosine    P (f + (1 - f) (1 + cos(pi s)) / 2)
    linear    P (1 - (1 - f) s)
    wsd       P until the last D steps; with d = how far those are done: P (1 - (1 - f) d), or sqrt(d) for d
"""

from typing import Annotated, Literal

import jax.numpy as jnp
import optax
from pydantic import Field, NonNegativeInt, PositiveInt

from meshloom.models.config import Config

from .config_types import UpToOne
from .problems import Problem


class ScheduleConfig(Config):
    """The base of every schedule: what comes behind the warm-up is `decay`. One adds its kind, `kind: Literal[...]`."""

    num_warmup_steps: NonNegativeInt  # linear from 0 to the peak

    def decay(self, peak: float, num_steps: int) -> optax.Schedule:
        """The learning rate over the `num_steps` behind the warm-up; it is called with 0 for the first of them."""
        raise NotImplementedError

    def problems(self, num_steps: int) -> list[Problem]:  # noqa: ARG002
        """What is wrong with it in a run of `num_steps`. (A run shorter than its warm-up ends on the way up.)"""
        return []

    def build(self, peak: float, num_steps: int) -> optax.Schedule:
        """step -> learning rate; the first step is 0."""
        decay = self.decay(peak, max(num_steps - self.num_warmup_steps, 1))
        if not self.num_warmup_steps:
            return decay
        rise = optax.linear_schedule(0.0, peak, self.num_warmup_steps)
        return optax.join_schedules([rise, decay], [self.num_warmup_steps])


class ConstantSchedule(ScheduleConfig):
    kind: Literal["constant"]

    def decay(self, peak: float, num_steps: int) -> optax.Schedule:  # noqa: ARG002
        return optax.constant_schedule(peak)


class CosineSchedule(ScheduleConfig):
    """Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts."""

    kind: Literal["cosine"]
    final_learning_rate_fraction: UpToOne  # of the peak, reached at the last step

    def decay(self, peak: float, num_steps: int) -> optax.Schedule:
        return optax.cosine_decay_schedule(peak, num_steps, alpha=self.final_learning_rate_fraction)


class LinearSchedule(ScheduleConfig):
    kind: Literal["linear"]
    final_learning_rate_fraction: UpToOne  # of the peak, reached at the last step

    def decay(self, peak: float, num_steps: int) -> optax.Schedule:
        return optax.linear_schedule(peak, peak * self.final_learning_rate_fraction, num_steps)


class WsdSchedule(ScheduleConfig):
    """Warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395. sqrt: Haegele et al. 2024, arXiv:2405.18392."""

    kind: Literal["wsd"]
    num_decay_steps: PositiveInt  # the last ones
    decay_shape: Literal["linear", "sqrt"]
    final_learning_rate_fraction: UpToOne  # of the peak, reached at the last step

    def problems(self, num_steps: int) -> list[Problem]:
        if (needed := self.num_warmup_steps + self.num_decay_steps) <= num_steps:
            return []
        what = f"a warm-up of {self.num_warmup_steps} steps and a decay of {self.num_decay_steps} are {needed} steps, num_steps is {num_steps}"  # noqa: E501
        room = num_steps - self.num_warmup_steps
        fix = f"use schedule.num_decay_steps={room}" if room > 0 else f"use num_steps={needed}"
        return [Problem("schedule.num_decay_steps", what, fix)]

    def decay(self, peak: float, num_steps: int) -> optax.Schedule:
        fall = 1 - self.final_learning_rate_fraction

        def rate(step):
            done = jnp.clip((step - (num_steps - self.num_decay_steps)) / self.num_decay_steps, 0.0, 1.0)
            return peak * (1 - fall * (jnp.sqrt(done) if self.decay_shape == "sqrt" else done))

        return rate


ScheduleSpec = Annotated[ConstantSchedule | CosineSchedule | LinearSchedule | WsdSchedule, Field(discriminator="kind")]
