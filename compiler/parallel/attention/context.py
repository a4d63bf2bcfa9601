"""Context parallelism: how attention works where mesh axes split the length of sequences, chosen by price or by name.

What each way costs beside the kernels' arithmetic, which is the same for all in zig-zag order: what is sent and not
hidden, and passes over memory. Each of n shards has 2 K T D elements of keys and values:

    ring        n - 1 permutes of the shard forward, as many with float32 gradients beside it backward; hidden as far
                as two whole blocks of attention take longer than one permute, but for a share
    all_gather  a gather forward, another and a reduce-scatter backward; nothing runs beside them
    ulysses     all-to-alls of queries, keys, values and outputs, backward of their gradients; nothing beside them

docs/context.md has the formulas, and where each wins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import jax.numpy as jnp
import numpy as np

from meshloom.models.attention import Mask

from ...core.format import human_names, human_seconds
from ...core.kernels import AttentionCall
from ...core.partition_spec import axes_of
from ...core.scopes import OperationName, fact_scope
from ...core.traffic import CollectiveKind, Traffic
from ...sharding.arrays import OpSite
from ...sharding.batch import TokenOrder
from ...spec.cost_model import cost_model
from ...target.compiler_options import why_permutes_wait
from ...target.target import TargetPlan
from ..operation import Cost, Exposed, OpInputs, OpPlan, ParallelOp, Refusal, Strategy, moved, refused
from .attention import cudnn_refusal, plan_backward
from .exchange import ALL_GATHER, EXCHANGE, RING, ULYSSES, Exchange, ExchangeName, full_steps
from .splash_kernels import ONE_KERNEL, TWO_KERNELS

FORWARD_MATMULS = 2  # attention's; backward it has 5 in one kernel, 7 in two (splash_kernels.py)


class ContextOp(ParallelOp):
    """The exchange of keys and values. It runs no operation itself: attention is built with what is chosen here
    (attention.py)."""

    kind = "context"
    title = "attention"
    names = (RING, ALL_GATHER, ULYSSES)
    fallback = ALL_GATHER

    def sites(self, inputs: OpInputs) -> Sequence[OpSite]:
        """Returns the attention of a model."""
        return [replace(site, kind=self.kind) for site in inputs.arrays.sites if site.kind == "attention"]

    def scope(self, plan: OpPlan) -> str:
        """Returns the scope within that of attention, which runs the exchange."""
        return fact_scope(EXCHANGE, plan.chosen.name)

    def hiding(self, plan: OpPlan, target: TargetPlan) -> Exposed:
        is_beside = plan.chosen.name == RING and why_permutes_wait(target) is None
        return Exposed(cost_model().exposed_ring_permutes, is_beside_attention=True) if is_beside else Exposed(1.0)

    def source(self, name: OperationName) -> str | None:
        """Returns 'attention, all_gather' for the collectives of an exchange."""
        exchange = name.fact(EXCHANGE)
        return f"{self.title}, {exchange}" if exchange else None

    def strategies(self, site: OpSite, inputs: OpInputs) -> Sequence[Strategy]:
        axes = inputs.roles.length
        order = inputs.batch.token_order
        if not axes:
            why = "no mesh axis splits the length of sequences (sharding=fsdp_context with mesh.context=2 does)"
            whole = Strategy(ALL_GATHER, "whole sequences on each device", reason=why, is_trivial=True)
            return whole, *(Strategy(name, f"by {name}", refusal=Refusal(why)) for name in (RING, ULYSSES))
        local = _local(site, inputs, order)
        over = " and ".join(axes)
        balance = f"{order.name} order, {balance_text(order, inputs.spec.sequence_length, local.masks)}"
        what = {
            RING: f"keys and values in a ring over {over}, {balance}",
            ALL_GATHER: f"keys and values gathered over {over}, {balance}",
            ULYSSES: f"heads exchanged for tokens over {over}",
        }
        each_way = [Exchange(name, axes, order) for name in (RING, ALL_GATHER, ULYSSES)]
        matmuls = {each.name: _backward_matmuls(each, site, inputs) for each in each_way}
        seconds = {name: _seconds(name, local, inputs, matmuls[name]) for name in self.names}
        known = {name: value for name, value in seconds.items() if value is not None}
        figures = "; ".join(f"{name} {human_seconds(value)}" for name, value in known.items())
        waited = f"beside attention itself{_more(matmuls)}, per layer: {figures}"
        made = [
            Strategy(
                name,
                what[name],
                Exchange(name, axes, order),
                _collectives(name, local, inputs),
                Cost(known[name], "seconds") if name in known else None,
                waited if figures else "it holds the keys and values of one other device at a time",
            )
            for name in (RING, ALL_GATHER, ULYSSES)
        ]
        ring, gather, ulysses = made
        instead = ALL_GATHER if inputs.why_no_ring else RING
        ulysses = replace(ulysses, refusal=refused(_too_few_heads(local), instead=instead))
        ring = replace(ring, refusal=refused(inputs.why_no_ring))
        if inputs.target.platform == "gpu":
            return _with_kernels((ulysses, ring, gather), site, inputs)
        if ring.refusal is None and order.name == "contiguous" and any(mask.sees_all_before for mask in local.masks):
            why = "the first devices wait for the last in contiguous order: token_order=zigzag balances them"
            ring = replace(ring, refusal=Refusal(why, is_hard=False))
        return ring, gather, ulysses


def _with_kernels(made: Sequence[Strategy], site: OpSite, inputs: OpInputs) -> Sequence[Strategy]:
    """Returns the strategies for GPUs: `auto` leaves out those in which cuDNN's kernel cannot run, if it can run in
    another."""
    why_not = {each.name: cudnn_refusal(site, inputs, cast(ExchangeName, each.name)) for each in made}
    if all(each.refusal or why_not[each.name] for each in made):
        return made
    objections = {name: f"cuDNN's kernel cannot be used: {why}" for name, why in why_not.items() if why}
    return [replace(each, refusal=each.refusal or refused(objections.get(each.name), is_hard=False)) for each in made]


@dataclass(frozen=True)
class _Local:
    """Attention of one part of a microbatch on a device. masks: the masks of all calls in a layer."""

    sequences: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    order: TokenOrder
    masks: tuple[Mask, ...]

    @property
    def kv_bytes(self) -> int:
        return 2 * self.sequences * self.length * self.kv_heads * self.head_dim * self.itemsize

    @property
    def q_bytes(self) -> int:
        return self.sequences * self.length * self.heads * self.head_dim * self.itemsize

    @property
    def chunk(self) -> int:
        return self.length // self.order.chunks_per_shard

    @property
    def exchanged_kv_heads(self) -> int:
        """Returns the kv_heads that Ulysses exchanges: they are repeated until each device has one."""
        return max(self.kv_heads, self.order.num_shards)

    def steps(self, mask: Mask) -> int:
        """Returns the permutes of keys and values in a ring."""
        steps = mask.reach(self.chunk, self.order.num_chunks)
        return steps if steps < full_steps(self.order) else self.order.num_shards - 1


def _local(site: OpSite, inputs: OpInputs, order: TokenOrder) -> _Local:
    spec, mesh = inputs.spec, inputs.mesh
    (_, _, heads, head_dim), (_, _, kv_heads, _) = (site.operands[i].shape for i in (0, 1))
    split = {
        name: mesh.num_shards(axes_of(inputs.sharding.auto_spec(None, None, name, None)[2]))
        for name in ("heads", "kv_heads")
    }
    length = inputs.batch.length_of_device
    return _Local(
        sequences=inputs.batch.sequences_of_device // spec.overlap.layers.batch_split,
        length=length,
        heads=heads // split["heads"],
        kv_heads=kv_heads // split["kv_heads"],
        head_dim=head_dim,
        itemsize=jnp.dtype(spec.precision.compute).itemsize,
        order=order,
        masks=tuple(mask.within(spec.sequence_length) for mask in site.options_of("mask")),
    )


def _too_few_heads(local: _Local) -> str | None:
    n, heads, kv_heads = local.order.num_shards, local.heads, local.kv_heads
    if heads % n:
        return f"{n} shards of the length do not divide the {heads} heads of a device; a ring splits no heads"
    if kv_heads % n and n % kv_heads:
        why = f"{kv_heads} kv_heads of a device can be neither split nor repeated over {n} shards of the length"
        return f"{why}; a ring splits no heads"
    return None


def balance(order: TokenOrder, length: int, mask: Mask) -> float:
    """Returns the work of the device with most, in causal attention, as a multiple of the mean."""
    seen = mask.num_keys(np.arange(length, dtype=np.int64))
    of_chunks = seen.reshape(order.num_chunks, -1).sum(axis=1)
    of_shards = of_chunks[order.chunks()].sum(axis=1)
    return float(of_shards.max() / of_shards.mean())


def balance_text(order: TokenOrder, length: int, masks: Sequence[Mask]) -> str:
    most = max(balance(order, length, mask) for mask in masks)
    return "all devices have the same work" if most < 1.005 else f"the busiest device has {most:.2f} times the mean"


def _collectives(name: str, local: _Local, inputs: OpInputs) -> tuple[Traffic, ...]:
    """Returns the collectives of one execution of each call in a layer."""
    axes, n = inputs.roles.length, local.order.num_shards
    each_kv, num_parts = local.kv_bytes // 2, inputs.spec.overlap.layers.batch_split
    times = num_parts * len(local.masks)
    if name == ALL_GATHER:
        return (
            moved("all-gather", axes, n, n * each_kv, 2 * times, "forward"),
            moved("all-gather", axes, n, n * each_kv, 2 * times, "backward"),
            moved("reduce-scatter", axes, n, n * each_kv, 2 * times, "backward"),
        )
    if name == ULYSSES:
        kv = each_kv * n * local.exchanged_kv_heads // local.kv_heads
        both: list[Traffic] = []
        for direction in ("forward", "backward"):
            both.append(moved("all-to-all", axes, n, n * local.q_bytes, 2 * times, direction))
            both.append(moved("all-to-all", axes, n, kv, 2 * times, direction))
        return tuple(both)
    chunks = local.order.chunks_per_shard
    count = 2 * chunks * num_parts * sum(local.steps(mask) for mask in local.masks)
    as_float32 = each_kv // chunks * 4 // local.itemsize
    if not count:  # a window of one token: no device sees another's keys
        return ()
    return (
        moved("collective-permute", axes, n, each_kv // chunks, count, "forward"),
        moved("collective-permute", axes, n, each_kv // chunks, count, "backward"),
        moved("collective-permute", axes, n, as_float32, count, "backward"),
    )


def _backward_matmuls(exchange: Exchange, site: OpSite, inputs: OpInputs) -> int:
    """Returns the matmuls of attention's backward pass: splash has one kernel or two, by the length that the exchange
    leaves to a device."""
    is_two = inputs.target.platform == "tpu" and plan_backward(site, inputs, exchange).keys_block is None
    return TWO_KERNELS if is_two else ONE_KERNEL


def _more(matmuls: Mapping[str, int]) -> str:
    """Returns a line on strategies that have more arithmetic than others; '' if all have the same."""
    if len(set(matmuls.values())) == 1:
        return ""
    return f" and a second backward kernel of {human_names([n for n, m in matmuls.items() if m == TWO_KERNELS], 3)}"


def _pairs(local: _Local) -> float:
    """Returns the pairs of queries and keys that see each other in a layer, for each head and sequence of a device."""
    length = local.order.num_shards * local.length
    return sum(mask.num_pairs(length) for mask in local.masks) / local.order.num_shards


def _seconds(name: str, local: _Local, inputs: OpInputs, matmuls: int) -> float | None:
    """Returns the seconds that a layer's forward and backward pass take beside the arithmetic of attention, as far as
    nothing hides them: sending, and passes over memory. None where they are not known. matmuls: of the
    backward pass; those that one kernel would not have count, too."""
    mesh, target, axes = inputs.mesh, inputs.target, inputs.roles.length
    n, bandwidth = local.order.num_shards, target.hbm_bytes_per_second_per_device
    rate = target.kernel_rate(AttentionCall(local.head_dim))
    num_calls = inputs.spec.overlap.layers.batch_split * len(local.masks)
    exchanged_kv_bytes = local.kv_bytes * local.exchanged_kv_heads // local.kv_heads
    sizes: dict[str, tuple[CollectiveKind, int]] = {
        "gather": ("all-gather", n * local.kv_bytes),
        "scatter": ("reduce-scatter", n * local.kv_bytes),
        "exchange of q": ("all-to-all", n * local.q_bytes),
        "exchange of kv": ("all-to-all", n * exchanged_kv_bytes),
        "permute": ("collective-permute", local.kv_bytes),
    }
    found = {what: mesh.alone_seconds(*one, axes) for what, one in sizes.items()}
    took = {what: seconds for what, seconds in found.items() if seconds is not None}
    if len(took) < len(sizes) or rate is None or bandwidth is None or target.chip is None:
        return None
    memory = bandwidth * target.chip.efficiency.memory
    of_matmul = 2 * local.sequences * local.heads * local.head_dim / rate  # seconds for each pair
    more = inputs.spec.overlap.layers.batch_split * (matmuls - ONE_KERNEL) * of_matmul * _pairs(local)
    numbers = cost_model()
    ordered = numbers.ordered_bytes_tpu if target.platform == "tpu" else numbers.ordered_bytes
    copied = 0 if local.order.chunks_per_shard == 1 else ordered
    if name == ALL_GATHER:
        return more + num_calls * (2 * took["gather"] + took["scatter"] + 3 * copied * n * local.kv_bytes / memory)
    if name == ULYSSES:
        copies = copied * (2 * local.q_bytes + exchanged_kv_bytes) / memory
        return more + num_calls * 2 * (2 * took["exchange of q"] + took["exchange of kv"] + copies)
    block = 2 * FORWARD_MATMULS * of_matmul * local.chunk**2  # the pairs of two whole blocks
    sent = took["permute"] * (1 + 4 / local.itemsize)  # backward, float32 gradients beside keys and values
    if why_permutes_wait(target) is not None:
        each = took["permute"] + sent
    else:
        pairs = ((took["permute"], block), (sent, matmuls / FORWARD_MATMULS * block))
        each = sum(max(numbers.exposed_ring_permutes * one, one - beside) for one, beside in pairs)
    each += numbers.ring_attention_bytes * local.q_bytes / local.itemsize / bandwidth
    steps = sum(local.steps(mask) for mask in local.masks)
    return more + inputs.spec.overlap.layers.batch_split * steps * each
