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

import jax.numpy as jnp
import optax

from .configs import ConstantSchedule, CosineSchedule, LibrarySchedule, LinearSchedule, ScheduleConfig, WsdSchedule


def learning_rates(schedule: ScheduleConfig, peak: float, num_steps: int) -> optax.Schedule:
    """Returns a function of the step to its learning rate; the first step is 0."""
    decay = schedule.decay(peak, max(num_steps - schedule.num_warmup_steps, 1))
    if not schedule.num_warmup_steps:
        return decay

    def rise(step):
        return peak * (step + 1) / schedule.num_warmup_steps

    return optax.join_schedules([rise, decay], [schedule.num_warmup_steps])


def decay_of(schedule: LibrarySchedule, peak: float, num_steps: int) -> optax.Schedule:
    """Returns the learning rate over the `num_steps` after the warm-up, as a function of 0 .. num_steps - 1."""
    match schedule:
        case ConstantSchedule():
            return optax.constant_schedule(peak)
        case CosineSchedule():
            return optax.cosine_decay_schedule(peak, max(num_steps - 1, 1), alpha=schedule.final_learning_rate_fraction)
        case LinearSchedule():
            final = peak * schedule.final_learning_rate_fraction
            return optax.linear_schedule(peak, final, max(num_steps - 1, 1))
        case WsdSchedule():
            return _wsd(schedule, peak, num_steps)
    raise AssertionError(schedule)


def _wsd(schedule: WsdSchedule, peak: float, num_steps: int) -> optax.Schedule:
    fall = 1 - schedule.final_learning_rate_fraction

    def rate(step):
        done = jnp.clip((step + 1 - (num_steps - schedule.num_decay_steps)) / schedule.num_decay_steps, 0.0, 1.0)
        return peak * (1 - fall * (jnp.sqrt(done) if schedule.decay_shape == "sqrt" else done))

    return rate
