"""Learning rates over the steps of a run: a linear warm-up, then the decay of the schedule's kind.

Steps count from 0. Peak P, run of N steps, warm-up of W, final fraction f. The warm-up gives step n the rate
P (n + 1) / W, so that the first step trains, too, and its last step has the peak. So does the first step after it; the
last step of the run has the final rate P f. s = (n - W) / (N - 1 - W):

    constant  P
    cosine    P (f + (1 - f) (1 + cos(pi s)) / 2)
    linear    P (1 - (1 - f) s)
    wsd       P until the last D steps; in those, d = 1/D, 2/D, .. 1: P (1 - (1 - f) d), or sqrt(d) for d

If only one step follows the warm-up, cosine and linear give it the peak. If the decay of wsd begins right after the
warm-up (W + D = N), the last step of the warm-up alone has the peak, and without a warm-up no step.
"""

from typing import Literal

import jax.numpy as jnp
import optax
from pydantic import PositiveInt

from ..core.config_types import UpToOne
from ..core.errors import Problem
from ..core.format import counted
from .contract import ScheduleConfig


class ConstantSchedule(ScheduleConfig):
    kind: Literal["constant"]

    def decay(self, peak: float, num_steps: int) -> optax.Schedule:  # noqa: ARG002
        return optax.constant_schedule(peak)


class CosineSchedule(ScheduleConfig):
    """Cosine decay: Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts."""

    kind: Literal["cosine"]
    final_learning_rate_fraction: UpToOne  # of the peak, reached at the last step

    def decay(self, peak: float, num_steps: int) -> optax.Schedule:
        return optax.cosine_decay_schedule(peak, max(num_steps - 1, 1), alpha=self.final_learning_rate_fraction)


class LinearSchedule(ScheduleConfig):
    kind: Literal["linear"]
    final_learning_rate_fraction: UpToOne  # of the peak, reached at the last step

    def decay(self, peak: float, num_steps: int) -> optax.Schedule:
        return optax.linear_schedule(peak, peak * self.final_learning_rate_fraction, max(num_steps - 1, 1))


class WsdSchedule(ScheduleConfig):
    """Warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395. sqrt: Haegele et al. 2024, arXiv:2405.18392."""

    kind: Literal["wsd"]
    num_decay_steps: PositiveInt  # at the end of the run
    decay_shape: Literal["linear", "sqrt"]
    final_learning_rate_fraction: UpToOne  # of the peak, reached at the last step

    def problems(self, num_steps: int) -> list[Problem]:
        if (needed := self.num_warmup_steps + self.num_decay_steps) <= num_steps:
            return []
        what = f"a warm-up of {counted(self.num_warmup_steps, 'step')} and a decay of {self.num_decay_steps} "
        what += f"are {counted(needed, 'step')}, num_steps is {num_steps}"
        room = num_steps - self.num_warmup_steps
        fix = f"use schedule.num_decay_steps={room}" if room > 0 else f"use num_steps={needed}"
        return [Problem("schedule.num_decay_steps", what, fix)]

    def decay(self, peak: float, num_steps: int) -> optax.Schedule:
        fall = 1 - self.final_learning_rate_fraction

        def rate(step):
            done = jnp.clip((step + 1 - (num_steps - self.num_decay_steps)) / self.num_decay_steps, 0.0, 1.0)
            return peak * (1 - fall * (jnp.sqrt(done) if self.decay_shape == "sqrt" else done))

        return rate
