"""Collectives: what is sent over which mesh axes, where it comes from, and what of its time compute waits for; and the
kinds of compute and of links. One vocabulary for the plan, the program and the report.

    Traffic    all-gather over fsdp of 64 x 90 MiB in bf16, of layers/mlp/up_EM, forward
    Timed      1.2 s alone, 1.1 s of it hidden behind compute, 0.1 s exposed
    Placed     on ICI, which it keeps busy in both directions of x

A planned collective is Traffic with the rule that causes it, one of a traced step has it, and a row of a report is
Traffic and Timed on a link. The sum of several is `+`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt

from .format import NUM_NAMED
from .known import OrUnknown, Unknown, all_known
from .scopes import Pass

ComputeKind = Literal["matmul", "attention", "other"]
# Passes over memory by what they do with it. "tile": an update of a part of tiles, of the bytes of whole tiles;
# "transpose": a copy of packed elements that makes columns of rows; "retile": a copy into tiles of another shape.
PassKind = Literal["read", "write", "update", "tile", "transpose", "retile"]
CollectiveKind = Literal[
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "collective-broadcast", "send",
]  # fmt: skip
HostCopyKind = Literal["copy-to-device", "copy-to-host"]  # between a device and its host, not between devices
HOST_COPIES: tuple[Literal["copy-to-device"], Literal["copy-to-host"]] = ("copy-to-device", "copy-to-host")
TransferKind = Literal[CollectiveKind, HostCopyKind]  # all that a link carries
HOST = "host"  # what they run over, where a collective has mesh axes
PAIRS = ("collective-permute", "send")  # kinds whose groups are pairs of a sender and a receiver
MOVING = ("all-gather", "all-to-all")  # kinds without a reduction: each device's operand is a part of the full array
COMPUTE = "compute"  # the track of a timeline on which compute runs; the others are links
LinkKind = Literal["ICI", "DCN", "NVLink", "NIC", "host link", "memory"]  # memory: simulated devices of one host


NotNegative = Annotated[float, Ge(0)]


@dataclass(frozen=True)
class TrafficSource:
    """The array that a collective moves, and the pass in which it does.

    parameter: the path of the parameter that it gathers, or whose gradient it reduces. activation: what else it moves:
    an activation, or the operation that it belongs to; neither: the compiler made it. others: what it may be instead,
    where only its size says it. num_more: the arrays that are combined with it. is_inferred: whether its size alone
    says what it is. in_pass: empty where that is not known.
    """

    parameter: str = ""
    activation: str = ""
    others: tuple[str, ...] = ()
    num_more: int = 0
    is_inferred: bool = False
    in_pass: Pass | Literal[""] = ""

    @property
    def name(self) -> str:
        """Returns the name of what it moves."""
        return self.parameter or self.activation or "made by the compiler"

    @property
    def what(self) -> str:
        """Returns what it moves, in words: 'one of head/kernel_EV, embed/table_VE and 2 more'."""
        more = f" and {self.num_more} more" if self.num_more else ""
        return f"{_one_of((self.name, *self.others))}{more}"

    def __str__(self) -> str:
        in_pass = f", {self.in_pass}" if self.in_pass else ""
        return f"{self.what}{in_pass}{' (inferred from its size)' if self.is_inferred else ''}"


def _one_of(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    others = f" or {len(names) - NUM_NAMED} others" if len(names) > NUM_NAMED else ""
    return f"one of {', '.join(names[:NUM_NAMED])}{others}"


@dataclass(frozen=True)
class Crossing:
    """A kind of transfer over mesh axes; of copies to the host and back, over `HOST`. Where the axes of a program have
    no names, they are the sizes and strides of its groups in the program's order of devices: "4 (stride 8)"."""

    kind: TransferKind
    mesh_axes: tuple[str, ...]


@dataclass(frozen=True)
class Traffic(Crossing):
    """Collectives that are equal. bytes: of the full array, within the shards of other mesh axes, in all executions.
    count: executions. dtype: empty where it does not matter."""

    group_size: Annotated[int, Gt(0)]
    bytes: Annotated[int, Ge(0)]
    count: Annotated[int, Gt(0)] = 1
    dtype: str = ""
    origin: TrafficSource = field(default=TrafficSource(), kw_only=True)

    @property
    def bytes_each(self) -> int:
        """Returns the bytes of the full array of one execution."""
        return self.bytes // self.count

    def times(self, count: int) -> Self:
        """Returns so many executions of each of these."""
        return replace(self, bytes=self.bytes * count, count=self.count * count)

    def __add__(self, other: "Traffic") -> Self:
        return replace(self, bytes=self.bytes + other.bytes, count=self.count + other.count)


@dataclass(frozen=True)
class AxisGroups:
    """Groups of the devices along mesh axes: of `size` devices, each `stride` after the one before. Of 32 devices in 4
    nodes, those of a node are a group of 8 (stride 1), those with the same place in their nodes one of 4 (stride 8)."""

    size: int
    stride: int

    def members(self, num_devices: int) -> list[list[int]]:
        """Returns the devices of each group. num_devices: those along the axes."""
        block = self.size * self.stride
        firsts = (start + offset for start in range(0, num_devices, block) for offset in range(self.stride))
        return [list(range(first, first + block, self.stride)) for first in firsts]


@dataclass(frozen=True)
class DeviceTraffic(Traffic):
    """Collectives between devices that are equal. groups: the devices of one along the mesh axes; None: all."""

    kind: CollectiveKind
    groups: AxisGroups | None = field(default=None, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The time of collectives alone on their links, the part hidden behind compute, and the exposed part."""

    alone_seconds: OrUnknown[NotNegative]
    hidden_seconds: OrUnknown[NotNegative]
    exposed_seconds: OrUnknown[NotNegative]


@dataclass(frozen=True)
class TimedTraffic(Timed, Traffic):
    """Collectives on one kind of link, with their time."""

    link: LinkKind = field(kw_only=True)

    def __add__(self, other: Traffic) -> Self:
        times = (getattr(other, name, NOT_TIMED) for name in Timed.__dataclass_fields__)
        sums = {
            name: all_known((getattr(self, name), time), math.fsum)
            for name, time in zip(Timed.__dataclass_fields__, times, strict=True)
        }
        return replace(super().__add__(other), **sums)


NOT_TIMED = Unknown("the time of a part is not known")


@dataclass(frozen=True)
class Placed:
    """The place of one collective on its links.

    alone_seconds: its time with its links to itself; None where that is not known, and it counts as zero. links: the
    links that it keeps busy, each direction of a torus axis separately: 'ICI x+'. level: their kind. mesh_axes: the
    axes along which its groups lie, empty if the program does not say. why: the reason why alone_seconds is unknown.
    is_certain: False if irregular groups were priced by one order of sending.
    """

    alone_seconds: float | None
    links: tuple[str, ...]
    level: LinkKind = "memory"
    mesh_axes: tuple[str, ...] = ()
    group_size: int = 1
    why: str | None = None
    is_certain: bool = True
