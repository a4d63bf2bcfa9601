"""Counts the bytes that each exchange of tokens sends, and how long a layer waits for it.

A transfer is waited for as far as nothing else can run meanwhile:

    input     needs only what the layer has from its start, x or its gradient: it is sent beside the router, what is
              recomputed, or the layer's other work. Only `gathered` sends tokens before it is known where they go
    routing   needs the router's choices, and all experts wait for it
    experts   needs the last result of the experts, and the layer ends with it
    returned  the gradients of tokens: needs the experts' backward pass, but for the gradients of their matrices
    weights   feeds the gradient of the router's weights alone: the rest of the backward pass runs meanwhile

No result is sent again where the backward pass recomputes a layer: nothing reads it (dispatch.py).

C chunks or parts of the batch hide all but one C-th of the three in the middle, beside the matmuls of the others. So do
they with what needs the input alone, where the compiler begins it too late (`exposed_inputs`). Whatever the compiler
does not overlap with compute is waited for whole, except for a share that is known of what is returned
(`exposed_returns`). Over several nodes GPUs hide nothing beside the matmuls of other chunks (`chunks_wait_across`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from meshloom.models.parts import ONE_GROUP, ExpertGroups

from ...core.scopes import Pass
from ...core.traffic import CollectiveKind, DeviceTraffic, Traffic
from ...sharding.arrays import OpSite
from ...target.compiler_options import assumed_weight_presets, hidden_kinds
from ..operation import OpInputs, moved
from .dispatch import Experts
from .hierarchical import over_nodes, within_node

RAGGED, PADDED, GATHERED, CAPACITY = "ragged", "padded", "gathered", "capacity"
DEDUPLICATED, HIERARCHICAL = "deduplicated", "hierarchical"
_ROWS = 128  # buffers have a multiple of these rows: grouped matmuls on TPUs work on as many at once
Wait = Literal["input", "routing", "experts", "returned", "weights"]
_INT32 = _FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class ExchangeSizes:
    """The sizes of an exchange. tokens: those of this device in one chunk. num_chosen: the experts of a token.
    row_bytes: the bytes of a token. num_runs: the exchanges of a layer in one direction, one for each chunk of each
    part of the batch. token_bytes, gradient_bytes: the bytes of a token and of the gradient of its result where they
    are sent to experts in few bits, with a scale for each; None: they are sent as they are. num_nodes: the nodes in
    which the devices lie, as many in each. groups: those of which a token chooses its experts."""

    experts: Experts
    tokens: int
    num_chosen: int
    row_bytes: int
    num_runs: int
    token_bytes: int | None = None
    gradient_bytes: int | None = None
    num_nodes: int = 1
    groups: ExpertGroups = ONE_GROUP

    @property
    def choices(self) -> int:
        return self.tokens * self.num_chosen

    @property
    def most_of_device(self) -> int:
        """Returns the choices of the tokens of one device that can be for experts of one device."""
        return self.tokens * min(self.num_chosen, self.experts.num_local)

    @property
    def share_of_device(self) -> float:
        """Returns the share of tokens that have an expert on one device, on average."""
        return self._share_of(self.experts.num_local)

    @property
    def share_of_node(self) -> float:
        """Returns the share of tokens that have an expert in one node, on average."""
        return self._share_of(self.experts.num_experts // self.num_nodes)

    def _share_of(self, num_local: int) -> float:
        """Returns the share of tokens that have one of so many experts, if all are chosen alike: 1 less the chance that
        none of the K different experts of a token is one of these.

        A token chooses a group for the best experts in it. So each group that it chooses has one of its choices, and
        the others are anywhere in these groups."""
        num_groups, chosen = self.groups.num, min(self.groups.num_chosen, self.num_chosen)
        of_group = self.experts.num_experts // num_groups
        if num_local % of_group == 0:
            return 1 - _chance_of_none(num_groups, num_local // of_group, chosen)
        if of_group % num_local:  # parts of several groups: as if there were none
            return 1 - _chance_of_none(self.experts.num_experts, num_local, self.num_chosen)
        others = _chance_of_none(chosen * (of_group - 1), num_local, self.num_chosen - chosen)
        return chosen / num_groups * (1 - (1 - num_local / of_group) * others)


def _chance_of_none(num: int, num_local: int, num_chosen: int) -> float:
    """Returns the chance that none of so many different choices of all is one of `num_local`."""
    return math.comb(num - num_local, num_chosen) / math.comb(num, num_chosen)


@dataclass(frozen=True)
class ExchangeBuffers:
    """The sizes of the buffers of an exchange, for the tokens of one chunk.

    rows: those that a device receives (ragged), takes of the tokens that are there (gathered, deduplicated), sends to
    each device (padded), or that an expert takes of each device (capacity). most_rows: those with which nothing is ever
    dropped. filled: the share of the rows that tokens fill. tokens: those that a device receives (deduplicated), in
    total if the exchange is ragged, else of each device; or of each device of its node (hierarchical). tokens_to_node:
    those that it sends to each node (hierarchical); None: it sends all to all. sent: the share of the smaller buffer of
    a ragged exchange that is sent.
    """

    rows: int
    most_rows: int
    filled: float
    tokens: int = 0
    tokens_to_node: int | None = None
    sent: float = 1.0

    @property
    def is_dropless(self) -> bool:
        return self.rows >= self.most_rows


def buffers_of(name: str, sizes: ExchangeSizes, imbalance: float | None, *, is_ragged: bool) -> ExchangeBuffers:
    """Returns the buffers of an exchange with room for so many times the mean; None: for any imbalance."""

    def room(mean: float, most: int) -> int:
        return most if imbalance is None else min(most, math.ceil(imbalance * mean))

    n, mean, most = sizes.experts.num_devices, sizes.choices, sizes.experts.num_devices * sizes.most_of_device
    if name == PADDED:
        mean, most = math.ceil(mean / n), sizes.most_of_device
    rows = room(mean, most)
    rows += -rows % _ROWS
    buffers = ExchangeBuffers(rows, most, min(1.0, mean / rows))
    if name == HIERARCHICAL:
        m, to_node = sizes.num_nodes, room(sizes.tokens * sizes.share_of_node, sizes.tokens)
        inside = room(m * sizes.tokens * sizes.share_of_device, m * sizes.tokens)
        return replace(buffers, tokens=inside, tokens_to_node=to_node if to_node < sizes.tokens else None)
    if name != DEDUPLICATED:
        return buffers
    most = sizes.tokens * (n if is_ragged else 1)
    mean = most * sizes.share_of_device
    tokens = room(mean, most)
    smaller = min(tokens, sizes.tokens * min(n, sizes.num_chosen))
    return replace(buffers, tokens=tokens, sent=min(1.0, mean / smaller) if is_ragged else 1.0)


def exchange_in_words(name: str, over: str, buffers: ExchangeBuffers, *, is_ragged: bool) -> str:
    """Returns what an exchange sends. over: the mesh axes."""
    rows, taken = f"{buffers.rows:,}", f"{buffers.rows:,} rows of them taken"
    if name == RAGGED:
        return f"rows exchanged over {over}, as many as there are, {rows} received at most"
    if name == PADDED:
        return f"rows exchanged over {over}, {rows} for each device"
    if name == GATHERED:
        return f"all tokens gathered over {over}, {taken}"
    if name == DEDUPLICATED:
        to_each = "as many as there are" if is_ragged else f"{buffers.tokens:,} to each"
        return f"tokens sent over {over} once to each device with experts of theirs, {to_each}, {taken}"
    to_nodes = "all" if buffers.tokens_to_node is None else f"once, {buffers.tokens_to_node:,}"
    steps = f"{to_nodes} to each node, and there once, {buffers.tokens:,} to each device"
    return f"tokens sent over {over} in two steps to experts of theirs: {steps}, {taken}"


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


def exchange_legs(
    name: str, sizes: ExchangeSizes, buffers: ExchangeBuffers, *, is_ragged: bool = False
) -> tuple[Leg, ...]:
    """Returns the transfers of one layer, forward and backward."""
    n, rows, among = sizes.experts.num_devices, buffers.rows, _Legs(sizes, sizes.experts)
    if name == HIERARCHICAL:
        return _hierarchical_legs(sizes, buffers)
    if name == GATHERED:
        return *among.choices(sizes.tokens), *among.gathered(sizes.tokens)
    if name == DEDUPLICATED and is_ragged:
        tokens = math.ceil(sizes.tokens * sizes.share_of_device)
        buffer = n * sizes.tokens * min(n, sizes.num_chosen) * _FLOAT32  # a scale alone is no row (transfer.py)
        counts = among.forward("all-gather", n * n * _INT32, "routing", "routing")
        sent = among.rows("all-to-all", "all-to-all", n * n * tokens, "routing", ("all-gather", buffer))
        return *among.choices(sizes.tokens), counts, *sent
    if name == DEDUPLICATED:
        return *among.choices(sizes.tokens), *among.swapped(buffers.tokens)
    rows_of_all = {RAGGED: sizes.choices, PADDED: n * rows, CAPACITY: sizes.experts.num_experts * rows}[name] * n
    weights = rows_of_all * _FLOAT32  # ragged: what there is on average
    counts = n * sizes.experts.num_experts * _INT32
    beside: tuple[Leg, ...] = (
        among.forward("all-to-all", weights, "routing", "routing"),
        among.backward("all-to-all", weights, "weights"),
    )
    if name == PADDED:
        beside = (among.forward("all-to-all", counts, "routing", "routing"), *beside)
    if name == RAGGED:  # a weight alone is no row (dispatch.py)
        beside = (
            among.forward("all-gather", counts, "routing", "routing"),
            among.forward("all-gather", weights, "routing", "routing"),
            among.backward("all-gather", n * rows * _FLOAT32, "weights"),
        )
    of_scales: _Scales = ("all-gather" if name == RAGGED else "all-to-all", weights)
    return *beside, *among.rows("all-to-all", "all-to-all", rows_of_all, "routing", of_scales)


def _hierarchical_legs(sizes: ExchangeSizes, buffers: ExchangeBuffers) -> tuple[Leg, ...]:
    m, to_node = sizes.num_nodes, buffers.tokens_to_node
    nodes, inside = (_Legs(sizes, of(sizes.experts, m)) for of in (over_nodes, within_node))
    over = nodes.gathered(sizes.tokens) if to_node is None else nodes.swapped(to_node)
    arrived = m * (sizes.tokens if to_node is None else to_node)
    return *nodes.choices(sizes.tokens), *over, *inside.choices(arrived), *inside.swapped(buffers.tokens)


_Scales = tuple[CollectiveKind, int]  # how the scales of rows in few bits are sent, and their bytes


@dataclass(frozen=True)
class _Legs:
    """Makes the transfers among groups of devices. experts: as the devices of a group have them."""

    sizes: ExchangeSizes
    experts: Experts

    def forward(self, kind: CollectiveKind, num_bytes: int, waits: Wait, again: Wait | None) -> Leg:
        return Leg(self._moved(kind, num_bytes, "forward"), waits, again)

    def backward(self, kind: CollectiveKind, num_bytes: int, waits: Wait) -> Leg:
        return Leg(self._moved(kind, num_bytes, "backward"), waits)

    def _moved(self, kind: CollectiveKind, num_bytes: int, in_pass: Pass) -> DeviceTraffic:
        of = self.experts
        return moved(kind, of.axes, of.num_devices, num_bytes, self.sizes.num_runs, in_pass, of.groups)

    def choices(self, tokens: int) -> tuple[Leg, ...]:
        """Returns the transfers of the choices of so many tokens of each device, and of their weights, to all."""
        choices = self.experts.num_devices * tokens * self.sizes.num_chosen * _INT32
        return (
            self.forward("all-gather", choices, "routing", "routing"),
            self.forward("all-gather", choices, "routing", "routing"),  # their weights, in float32
            self.backward("reduce-scatter", choices, "weights"),
        )

    def gathered(self, tokens: int) -> tuple[Leg, ...]:
        """Returns the transfers of so many tokens of each device to all, and back."""
        num_rows = self.experts.num_devices * tokens
        return self.rows("all-gather", "reduce-scatter", num_rows, "input", ("all-gather", num_rows * _FLOAT32))

    def swapped(self, tokens: int) -> tuple[Leg, ...]:
        """Returns the transfers of so many tokens of each device to each, and back."""
        num_rows = self.experts.num_devices**2 * tokens
        return self.rows("all-to-all", "all-to-all", num_rows, "routing", ("all-to-all", num_rows * _FLOAT32))

    def rows(
        self, kind: CollectiveKind, back: CollectiveKind, num_rows: int, waits: Wait, scales: _Scales
    ) -> tuple[Leg, ...]:
        sizes = self.sizes
        there, home = num_rows * (sizes.token_bytes or sizes.row_bytes), num_rows * sizes.row_bytes
        of_gradients = num_rows * (sizes.gradient_bytes or sizes.row_bytes)
        return (
            self.forward(kind, there, waits, waits),
            self.forward(back, home, "experts", None),
            self.backward(kind, of_gradients, "input"),
            self.backward(back, home, "returned"),
            *((self.forward(*scales, waits, waits),) if sizes.token_bytes else ()),
            *((self.backward(*scales, "input"),) if sizes.gradient_bytes else ()),
        )


def sent_once(legs: Sequence[Leg]) -> tuple[Traffic, ...]:
    """Returns the collectives of a layer whose forward pass is not recomputed, equal ones together."""
    found: dict[tuple[Any, ...], Traffic] = {}
    for sent in (each.sent for each in legs):
        key = sent.kind, sent.groups, sent.bytes_each, sent.origin
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
    returns, shares = target.compiler.exposed_returns, {"input": target.compiler.exposed_inputs, "weights": 0.0}
    for each in legs:
        one = each.sent
        seconds = inputs.mesh.alone_seconds(one.kind, one.bytes_each, one.mesh_axes, one.groups)
        if seconds is None:
            return None
        is_across = inputs.mesh.placement.link_of(one.mesh_axes, one.groups).kind == "NIC"
        num_hiding = overlap.layers.batch_split if is_across and target.compiler.chunks_wait_across else num_runs
        for wait in (each.waits, each.again if is_recomputed else None):
            if wait is None:
                continue
            sent += one.count * seconds
            exposed = shares.get(wait, 1.0) / num_hiding if one.kind in hidden else 1.0
            if wait == "returned" and returns is not None:
                exposed = returns
            waited += one.count * seconds * exposed
    return ExchangeTime(sent, waited)
