"""What one step does on its target: what turns the seconds of a step, estimated, compiled or measured, into rates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from .core.known import Unknown, all_known, each_known, or_unknown

NO_PEAK_RATE = "the chip's peak in the compute type is not known"


@dataclass(frozen=True)
class StepWork:
    """The work of a step. model_flops: of a step on all devices, remat excluded. peak_flops_per_second: of all devices,
    in the compute type."""

    tokens_per_step: int | Unknown
    model_flops: int | Unknown
    num_chips: int
    peak_flops_per_second: float | Unknown

    def seconds_at_peak(self, flops: float | Unknown) -> float | Unknown:
        """Returns the time of this many FLOPs if every device computes at its peak."""
        return all_known((self.peak_flops_per_second, flops), lambda known: known[1] / known[0])

    def mfu(self, seconds: float | Unknown) -> float | Unknown:
        """Returns the model FLOPs utilisation of a step that takes this long."""
        known = (self.seconds_at_peak(self.model_flops), _of_a_step(seconds))
        return all_known(known, lambda times: times[0] / times[1])

    def tokens_per_second_per_chip(self, seconds: float | Unknown) -> float | Unknown:
        known = (self.tokens_per_step, _of_a_step(seconds))
        return all_known(known, lambda both: both[0] / both[1] / self.num_chips)

    @classmethod
    def of_plan_file(cls, plan: Mapping[str, Any]) -> Self:
        """Returns the work of the step that a plan.json describes."""
        target, program = plan["target"], plan["program"]
        peak = or_unknown(target["peak_flops_per_second_per_device"], NO_PEAK_RATE)
        return cls(
            tokens_per_step=program["tokens_per_step"],
            model_flops=or_unknown(program["model_flops_per_step"], "plan.json has the reason"),
            num_chips=target["num_chips"],
            peak_flops_per_second=each_known(peak, lambda of_one: of_one * target["num_devices"]),
        )


def _of_a_step(seconds: float | Unknown) -> float | Unknown:
    return seconds or (seconds if isinstance(seconds, Unknown) else Unknown("the step takes no time"))
