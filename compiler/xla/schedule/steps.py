"""The steps of a scheduled program: what one device does, one thing after the other."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from ...core.traffic import ComputeKind, TransferKind

PricedBy = Literal["cycles", "bound", "flops", "bytes", "nothing"]


@dataclass(frozen=True)
class Compute:
    """One operation on the compute unit. seconds: its time; None where nothing is known of it. estimated_seconds: the
    compiler's estimate, if the price is bounded below it. unknown: the kernel, if it takes at least `seconds` and
    nobody knows how much longer. dtype: of what it multiplies, by the name of the peak; empty where it does not."""

    name: str
    kind: ComputeKind
    seconds: float | None
    priced_by: PricedBy
    op_name: str
    estimated_seconds: float | None = None
    unknown: str = ""
    dtype: str = ""


@dataclass(frozen=True)
class Collective:
    """One collective operation, or a copy to the host or back, named by the instruction that starts it: "NAME", or
    "NAME (all-gather)" for one that shares its call with another kind.

    num_bytes: the bytes of the full arrays together: before a reduce-scatter, after an all-gather, all parts of an
    all-to-all. num_elements: the elements of each array. groups: positions in the mesh's order of devices; for permutes
    and sends, pairs (from, to); empty where they are not known. num_slices: the slices of a collective across slices,
    in which each device meets those at its place in the other slices; it has no groups. is_padded: it is an all-reduce
    to which each device contributes its own part of the array alone. num_axes: the axes of the torus that carry it at
    once; None: all of its group. form: how the program writes it. made_by: if it has no op_name, those of the matmuls
    that compute its operands, the nearest first.
    """

    name: str
    kind: TransferKind
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
    def instruction(self) -> str:
        """Returns the name of the instruction that starts it."""
        return self.name.partition(" ")[0]

    @property
    def group_size(self) -> int:
        return len(self.groups[0]) if self.groups else 1


@dataclass(frozen=True)
class Start:
    """A collective begins; the steps that follow run beside it."""

    collective: Collective


@dataclass(frozen=True)
class Done:
    """The steps that follow need the result of the collective of this name. by: the instruction that waits for it."""

    name: str
    by: str = ""


@dataclass(frozen=True)
class Loop:
    """A loop. num_trips: its iterations; None where the program does not say, and it counts once."""

    name: str
    num_trips: int | None
    body: tuple["Step", ...]


@dataclass(frozen=True)
class Branches:
    """A conditional, which runs one of its branches. share: the share of executions that run the branch that ends last,
    while the others run the one that ends first; None: it is not known, and the last one counts. op_name: its names in
    the program. on: the place of the branch that runs where a predicate is true; None where there are not two."""

    name: str
    branches: tuple[tuple["Step", ...], ...]
    share: float | None = None
    op_name: str = ""
    on: int | None = None


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


ALL = ""  # the key of the choice for all others


@dataclass(frozen=True)
class Choices:
    """Facts of a run that its user gives because the program does not contain them. trips: the iterations of loops
    whose number is not known, by name. shares: by the name of a conditional, the share of its executions that run the
    branch that ends last."""

    trips: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)


def apply_choices(steps: tuple[Step, ...], choices: Choices) -> tuple[Step, ...]:
    """Returns the steps with a user's choices. A computation that runs in several places stays one object."""
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
