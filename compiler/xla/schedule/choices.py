"""Facts of a run that a program does not contain and its user gives: trips of loops, shares of branches."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .steps import Branches, Loop, Step, every

ALL = ""  # the key of a choice for all that have none of their own


@dataclass(frozen=True)
class Choices:
    """trips: iterations of loops whose number is not known, by name. shares: of conditionals, by name, the share of
    executions in which the branch runs that ends last."""

    trips: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)


def apply_choices(steps: tuple[Step, ...], choices: Choices) -> tuple[Step, ...]:
    """Returns the steps with a user's choices; what was one computation in several places is one still."""
    known: dict[int, tuple[Step, ...]] = {}

    def applied(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        if id(steps) not in known:
            known[id(steps)] = tuple(map(chosen, steps))
        return known[id(steps)]

    def chosen(step: Step) -> Step:
        if isinstance(step, Loop):
            trips = choices.trips.get(step.name, choices.trips.get(ALL)) if step.num_trips is None else step.num_trips
            return replace(step, num_trips=trips, body=applied(step.body))
        if isinstance(step, Branches):
            share = choices.shares.get(step.name, choices.shares.get(ALL))
            return replace(step, branches=tuple(map(applied, step.branches)), share=share)
        return step

    return applied(steps)


def open_loops(steps: tuple[Step, ...]) -> list[str]:
    """Returns the loops whose number of iterations the program does not say."""
    return sorted({each.name for each in every(steps, Loop) if each.num_trips is None})


def conditionals(steps: tuple[Step, ...]) -> list[str]:
    """Returns the conditionals of a program."""
    return sorted({each.name for each in every(steps, Branches)})
