"""Reads a scheduled program as what one device does, one step after the other."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from ...core.collectives import CollectiveKind, ComputeKind

PricedBy = Literal["cycles", "bound", "flops", "bytes", "nothing"]


@dataclass(frozen=True)
class Compute:
    """One operation on the compute unit. seconds: None where nothing is known of its time. estimated_seconds: what the
    compiler estimates, where the price is bounded below that. unknown: the kernel, if all that is known is that
    it takes `seconds` at least."""

    name: str
    kind: ComputeKind
    seconds: float | None
    priced_by: PricedBy
    op_name: str
    estimated_seconds: float | None = None
    unknown: str = ""


@dataclass(frozen=True)
class Collective:
    """One collective operation, named by the instruction that starts it.

    num_bytes: of the full array (before a reduce-scatter, after an all-gather, all parts of an all-to-all), of all
    arrays that it takes together; num_elements: of each of those. groups: positions in the mesh's order of devices, of
    permutes and sends pairs (from, to); empty where they are not known. num_slices: of a collective across slices, each
    device with those at its place in the others; it has no groups. is_padded: of an all-reduce, that each device
    fills its part of the array alone. num_axes: of the torus that carry it at once; None: all of its group's. form: how
    the program says it. made_by: where it has no op_name, those of the matmuls that compute its operands, the nearest
    first.
    """

    name: str
    kind: CollectiveKind
    num_bytes: int
    dtype: str
    groups: tuple[tuple[int, ...], ...]
    is_async: bool
    form: str
    op_name: str
    computation: str
    num_elements: tuple[int, ...]
    num_slices: int | None = None
    is_padded: bool = False
    num_axes: int | None = None
    is_certain: bool = True
    made_by: tuple[str, ...] = ()

    @property
    def group_size(self) -> int:
        return len(self.groups[0]) if self.groups else 1


@dataclass(frozen=True)
class Start:
    """The collective begins; what follows runs meanwhile."""

    collective: Collective


@dataclass(frozen=True)
class Done:
    """The steps that follow need the result of the collective of this name. by: the instruction that waits for it."""

    name: str
    by: str = ""


@dataclass(frozen=True)
class Loop:
    """num_trips: None where it cannot be read from the program; then it counts once."""

    name: str
    num_trips: int | None
    body: tuple["Step", ...]


@dataclass(frozen=True)
class Branches:
    """One of them runs. share: of executions in which the one runs that ends last, in others that which ends first;
    None: nobody says it, and the last one counts."""

    name: str
    branches: tuple[tuple["Step", ...], ...]
    share: float | None = None


Step = Compute | Start | Done | Loop | Branches
S = TypeVar("S", Compute, Start, Done, Loop, Branches)


def every(steps: tuple[Step, ...], kind: type[S]) -> Iterator[S]:
    """Returns every step of a kind in a program, the outer ones first; of a computation that runs in several places
    once."""
    seen = set[int]()

    def within(steps: tuple[Step, ...]) -> Iterator[S]:
        if id(steps) in seen:
            return
        seen.add(id(steps))
        for step in steps:
            if isinstance(step, kind):
                yield step
            if isinstance(step, Loop):
                yield from within(step.body)
            elif isinstance(step, Branches):
                for branch in step.branches:
                    yield from within(branch)

    return within(steps)


def collectives_of(steps: tuple[Step, ...]) -> Iterator[Collective]:
    """Returns every collective of a program, once."""
    return (start.collective for start in every(steps, Start))


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
