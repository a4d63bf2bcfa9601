"""The figures of a step: how long it takes, what it needs, and what follows from both.

A step has them up to three times: estimated from its plan, compiled (read in its program) and measured. Files, views,
searches and sweeps have the same values under the same names. FIGURES says how each is written and compared. To add a
figure, register it: it is then in report.json, plan.json, the summary, diffs and the rows of sweeps. Rates follow from
the work of a step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from meshloom.models.record import Record

from .core.format import human_bytes, human_count, human_seconds, human_share, three_digits
from .core.known import OrUnknown, Unknown, all_known, each_known, or_unknown, text_of
from .core.traffic import HOST

SLICES = "slices"  # in exposed_by_axes: slices wait for the slowest of them, whatever axes cross them
NO_PEAK_RATE = "the chip's peak in the compute type is not known"


@dataclass(frozen=True)
class StepWork:
    """The work of a step. model_flops: of a step on all devices, remat excluded. peak_flops_per_second: of all devices,
    in the compute type. saved_seconds: what matmuls in types of few bits take less than at this peak, so that MFU is a
    share of what each site's own type allows."""

    tokens_per_step: int | Unknown
    model_flops: int | Unknown
    num_chips: int
    peak_flops_per_second: float | Unknown
    saved_seconds: float = 0.0

    def seconds_at_peak(self, flops: float | Unknown) -> float | Unknown:
        """Returns the time of this many FLOPs, with all matmuls among them, if every device computes at its peak."""
        known = (self.peak_flops_per_second, flops)
        return all_known(known, lambda both: max(both[1] / both[0] - self.saved_seconds, 0.0))

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
            saved_seconds=program.get("saved_seconds", 0.0),
        )


def _of_a_step(seconds: float | Unknown) -> float | Unknown:
    return seconds or (seconds if isinstance(seconds, Unknown) else Unknown("the step takes no time"))


FigureKind = Literal["seconds", "share", "count", "bytes", "cost", "loss"]
NOT_RATED = Unknown("it follows from other figures, which were not asked for it")
_HUMAN: dict[FigureKind, Callable[[float], str]] = {
    "seconds": human_seconds,
    "share": human_share,
    "count": human_count,
    "bytes": lambda count: human_bytes(round(count)),
    "cost": three_digits,
    "loss": lambda loss: f"{loss:.4f}",
}


class StepFigures(Record):
    """The figures of a step; bytes are of a chip.

    step_seconds: compute, exposed and bubble; of a pipeline these are means over its stages. range_factor: the step may
    take this many times more or less; range_basis: the published runs that this comes from. exposed_by_axes: exposed
    seconds by the mesh axes of the collectives, "fsdp+context"; "host": of copies to the host and back. bubble_seconds:
    waits of a pipeline's stages for other stages; 0 without one. limit_bytes: what a program may use; host_limit_bytes:
    the chip's share of its host's memory. Registered figures are further values.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, OrUnknown[float]]  # pyright: ignore[reportIncompatibleVariableOverride]

    step_seconds: OrUnknown[NonNegativeFloat]
    range_factor: OrUnknown[PositiveFloat]
    range_basis: OrUnknown[str]
    compute_seconds: OrUnknown[NonNegativeFloat]
    exposed_seconds: OrUnknown[NonNegativeFloat]
    bubble_seconds: OrUnknown[NonNegativeFloat]
    peak_bytes: OrUnknown[NonNegativeInt]
    limit_bytes: OrUnknown[NonNegativeInt]
    fits: OrUnknown[bool]
    host_bytes: OrUnknown[NonNegativeInt]
    host_limit_bytes: OrUnknown[NonNegativeInt]
    host_fits: OrUnknown[bool]
    exposed_by_axes: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    exposed_fraction: OrUnknown[NonNegativeFloat] = NOT_RATED
    bubble_fraction: OrUnknown[NonNegativeFloat] = NOT_RATED
    memory_fraction: OrUnknown[NonNegativeFloat] = NOT_RATED
    mfu: OrUnknown[NonNegativeFloat] = NOT_RATED
    tokens_per_second_per_chip: OrUnknown[NonNegativeFloat] = NOT_RATED

    def rated(self, work: StepWork) -> Self:
        """Returns these figures with those that follow from them."""
        return self.model_copy(update={one.name: one.of(self, work) for one in FIGURES.values() if one.of})

    def alone(self) -> "StepFigures":
        """Returns these figures without what a subclass adds."""
        names = StepFigures.model_fields.keys() | FIGURES.keys()
        return StepFigures(**{name: value for name, value in self if name in names})

    def range_of(self, value: float | Unknown) -> tuple[float, float] | Unknown:
        """Returns the range of a value that is proportional to the step."""
        return all_known((value, self.range_factor), lambda known: (known[0] / known[1], known[0] * known[1]))

    @property
    def exposed_host_seconds(self) -> float:
        """Returns the part of the exposed seconds that waits for copies to the host and back."""
        return self.exposed_by_axes.get(HOST, 0.0)

    @property
    def runs(self) -> bool | None:
        """Returns whether the step fits in both memories; None where that is not known."""
        return False if self.host_fits is False else None if isinstance(self.fits, Unknown) else self.fits


def no_figures(why: str) -> StepFigures:
    """Returns the figures of a step of which nothing is known."""
    names = {*StepFigures.model_fields, *(one.name for one in FIGURES.values() if one.of)} - {"exposed_by_axes"}
    values: dict[str, Any] = dict.fromkeys(names, Unknown(why))
    return StepFigures(**values)


@dataclass(frozen=True)
class Figure:
    """A figure of a step. name: its key in files. heading: its name in views. of: computes it from the other figures
    and the work of the step; None for one that is found with them."""

    name: str
    heading: str
    better: Literal["less", "more"]
    kind: FigureKind
    of: Callable[[StepFigures, StepWork], float | Unknown] | None = None

    def human(self, value: float) -> str:
        return _HUMAN[self.kind](value)


FIGURES: dict[str, Figure] = {}


def text_of_figure(figures: StepFigures, name: str) -> str:
    """Returns a figure as text."""
    return text_of(getattr(figures, name), FIGURES[name].human)


def register(*figures: Figure) -> None:
    """Adds figures, which all views then show in this order."""
    FIGURES.update({one.name: one for one in figures})


def registered_figures() -> list[Figure]:
    """Returns the figures of a step that are registered, besides the fields of StepFigures."""
    return [one for one in FIGURES.values() if one.of and one.name not in StepFigures.model_fields]


def _fraction(part: float | Unknown, whole: float | Unknown) -> float | Unknown:
    return all_known((part, whole), lambda both: both[0] / both[1] if both[1] else 0.0)


register(
    Figure("step_seconds", "step", "less", "seconds"),
    Figure("mfu", "MFU", "more", "share", lambda step, work: work.mfu(step.step_seconds)),
    Figure("tokens_per_second_per_chip", "tokens/s/chip", "more", "count",
           lambda step, work: work.tokens_per_second_per_chip(step.step_seconds)),
    Figure("compute_seconds", "compute", "less", "seconds"),
    Figure("exposed_seconds", "exposed time", "less", "seconds"),
    Figure("exposed_fraction", "exposed", "less", "share",
           lambda step, _: _fraction(step.exposed_seconds, step.step_seconds)),
    Figure("bubble_seconds", "bubble time", "less", "seconds"),
    Figure("bubble_fraction", "bubble", "less", "share",
           lambda step, _: _fraction(step.bubble_seconds, step.step_seconds)),
    Figure("peak_bytes", "memory", "less", "bytes"),
    Figure("memory_fraction", "of the memory", "less", "share",
           lambda step, _: _fraction(step.peak_bytes, step.limit_bytes)),
)  # fmt: skip
