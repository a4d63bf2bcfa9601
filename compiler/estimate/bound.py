"""The least time of a step, whatever program runs it: what the declaration itself asks for, at the chip's peaks.

arithmetic    FLOPs of the model, forward and backward, nothing computed twice, attention's masked scores left out, at
              the peak of the compute type
memory        what training changes of the state that a device holds between two steps: read once and written once

The longer of the two is the bound: a program may do both at once. What a program adds (recomputation, collectives,
activations in memory) is in the roofline of that program (roofline.py), which another program can beat. Choices that an
expert drops for lack of room count, as in the model's FLOPs.
"""

from ..plan import Plan


def least_step_seconds(plan: Plan) -> float | None:
    """Returns the seconds that no step of this declaration can be shorter than; None where FLOPs or the target's peaks
    are not known."""
    target, memory = plan.target, plan.memory
    peak, bandwidth = target.peak_flops_per_second, target.hbm_bytes_per_second_per_device
    flops = plan.model_flops.least_per_step
    if flops is None or peak is None or bandwidth is None:
        return None
    trained = sum(each.bytes_per_device for each in plan.sharding.parameters if each.array.is_trained)
    written = trained + memory.master + memory.optimizer
    read = (memory.master or trained) + memory.optimizer
    return max(flops / (peak * target.num_devices), (read + written) / bandwidth)
