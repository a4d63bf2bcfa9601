"""Counts the bytes that each exchange of tokens sends, and how long a layer waits for it.

A transfer is waited for as far as nothing else can run meanwhile:

    input     needs only what the layer has from its start, x or its gradient: it is sent beside the router, what is
              recomputed, or the layer's other work. Only `gathered` sends tokens before it is known where they go
    routing   needs the router's choices, and all experts wait for it
    experts   needs the last result of the experts, and the layer ends with it
    weights   feeds the gradient of the router's weights alone: the rest of the backward pass runs meanwhile

No result is sent again where the backward pass recomputes a layer: nothing reads it (dispatch.py).

C chunks or parts of the batch hide all but one C-th of the two in the middle, beside the matmuls of the others.
Whatever the compiler does not overlap with compute is waited for whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...core.traffic import CollectiveKind, DeviceTraffic, Traffic
from ...sharding.arrays import OpSite
from ...target.compiler_options import assumed_weight_presets, hidden_kinds
from ..operation import OpInputs, moved
from .dispatch import Experts

RAGGED, PADDED, GATHERED, CAPACITY = "ragged", "padded", "gathered", "capacity"
Wait = Literal["input", "routing", "experts", "weights"]
_INT32 = _FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class ExchangeSizes:
    """The sizes of an exchange. tokens: those of this device in one chunk. num_chosen: the experts of a token.
    row_bytes: the bytes of a token. num_runs: the exchanges of a layer in one direction, one for each chunk of each
    part of the batch."""

    experts: Experts
    tokens: int
    num_chosen: int
    row_bytes: int
    num_runs: int

    @property
    def choices(self) -> int:
        return self.tokens * self.num_chosen

    @property
    def most_of_device(self) -> int:
        """Returns the choices of the tokens of one device that can be for experts of one device."""
        return self.tokens * min(self.num_chosen, self.experts.num_local)


@dataclass(frozen=True)
class Leg:
    """A transfer of an exchange. waits: what it needs, as above. again: what it needs where the backward pass
    recomputes the forward pass, and it with it; None: it is not sent again."""

    sent: DeviceTraffic
    waits: Wait
    again: Wait | None = None


@dataclass(frozen=True)
class ExchangeTime:
    """The time of the exchanges of a layer, forward and backward. sent_seconds: on the links. waited_seconds: the part
    that nothing hides."""

    sent_seconds: float
    waited_seconds: float


def exchange_legs(name: str, sizes: ExchangeSizes, rows: int) -> tuple[Leg, ...]:
    """Returns the transfers of one layer, forward and backward. rows: that a device receives (ragged), sends to each
    (padded), or that an expert takes of each device (capacity)."""
    n, axes, times = sizes.experts.num_devices, sizes.experts.axes, sizes.num_runs

    def forward(kind: CollectiveKind, num_bytes: int, waits: Wait, again: Wait | None) -> Leg:
        return Leg(moved(kind, axes, n, num_bytes, times, "forward"), waits, again)

    def backward(kind: CollectiveKind, num_bytes: int, waits: Wait) -> Leg:
        return Leg(moved(kind, axes, n, num_bytes, times, "backward"), waits)

    if name == GATHERED:
        tokens, choices = n * sizes.tokens * sizes.row_bytes, n * sizes.choices * _INT32
        return (
            forward("all-gather", tokens, "input", "input"),
            forward("all-gather", choices, "routing", "routing"),
            forward("all-gather", choices, "routing", "routing"),  # their weights, in float32
            forward("reduce-scatter", tokens, "experts", None),
            backward("all-gather", tokens, "input"),
            backward("reduce-scatter", tokens, "experts"),
            backward("reduce-scatter", choices, "weights"),
        )
    rows_of_all = {RAGGED: sizes.choices, PADDED: n * rows, CAPACITY: sizes.experts.num_experts * rows}[name] * n
    sent, weights = rows_of_all * sizes.row_bytes, rows_of_all * _FLOAT32  # ragged: what there is on average
    counts = n * sizes.experts.num_experts * _INT32
    beside: tuple[Leg, ...] = (
        forward("all-to-all", weights, "routing", "routing"),
        backward("all-to-all", weights, "weights"),
    )
    if name == PADDED:
        beside = (forward("all-to-all", counts, "routing", "routing"), *beside)
    if name == RAGGED:  # a weight alone is no row (dispatch.py)
        beside = (
            forward("all-gather", counts, "routing", "routing"),
            forward("all-gather", weights, "routing", "routing"),
            backward("all-gather", n * rows * _FLOAT32, "weights"),
        )
    return (
        *beside,
        forward("all-to-all", sent, "routing", "routing"),
        forward("all-to-all", sent, "experts", None),
        backward("all-to-all", sent, "input"),
        backward("all-to-all", sent, "experts"),
    )


def sent_once(legs: Sequence[Leg]) -> tuple[Traffic, ...]:
    """Returns the collectives of a layer whose forward pass is not recomputed, equal ones together."""
    found: dict[tuple[Any, ...], Traffic] = {}
    for sent in (each.sent for each in legs):
        key = sent.kind, sent.bytes_each, sent.origin
        found[key] = found[key] + sent if key in found else sent
    return tuple(found.values())


def exchange_time(legs: Sequence[Leg], site: OpSite, inputs: OpInputs, num_runs: int) -> ExchangeTime | None:
    """Returns the time of an exchange; None where that of a collective is not known. num_runs: C above."""
    spec, sent, waited = inputs.spec, 0.0, 0.0
    is_recomputed = spec.remat.stacks.get(site.piece, spec.remat.policy) != "none"
    overlap, target = spec.overlap, inputs.target
    # With the declared presets, or with the one that `overlap.search` is taken to find.
    names = overlap.flag_presets if overlap.search is None else assumed_weight_presets(spec, target)
    hidden = hidden_kinds(names, spec, target)
    for each in legs:
        one = each.sent
        seconds = inputs.mesh.alone_seconds(one.kind, one.bytes_each, one.mesh_axes)
        if seconds is None:
            return None
        for wait in (each.waits, each.again if is_recomputed else None):
            if wait is None:
                continue
            sent += one.count * seconds
            share = 1.0 if one.kind not in hidden else 0.0 if wait in ("input", "weights") else 1.0 / num_runs
            waited += one.count * seconds * share
    return ExchangeTime(sent, waited)
