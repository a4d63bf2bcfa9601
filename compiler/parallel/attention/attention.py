"""Which implementation of attention the step calls, and how it is called.

    xla     plain operations, anywhere: all scores are in memory (models/attention.py), or those of a tile where the
            length is split (blocks.py)
    cudnn   cuDNN's fused kernel, NVIDIA GPUs; no soft cap, and in a ring or with gathered keys no window or documents
    splash  JAX's Pallas kernel, TPUs: a kernel is not an operation that the partitioner can split, so it runs under a
            shard_map over the mesh axes of the heads

Neither kernel keeps the length x length scores. `auto` is the kernel of the platform; a choice that cannot run is an
error, never another implementation.

The arithmetic of the kernels that it runs, by the blocks of queries x keys that the mask leaves. The scope says how
many they are (`blocks_scope`); without one the mask is causal.

    traced splash      the matmuls of the kernel's body, once for each of these blocks of its grid
    traced cuDNN       queries x keys x depth by shapes, of these blocks
    compiled splash    the square by shapes, of these blocks
    compiled cuDNN     nothing to add: its own text says what it computes (xla/schedule/kernels.py)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from meshloom.models.attention import OWN_KEY, Mask, attend

from ...core.kernels import AttentionCall, KernelCall, KernelCost, contracted_size
from ...core.partition_spec import Axes, axes_in, axes_of
from ...core.scopes import ATTENTION, OperationName, fact_scope, nested_scope
from ...core.traffic import ComputeKind
from ...jaxpr.flops import matmul_flops
from ...jaxpr.program import LANES
from ...jaxpr.subprograms import subprograms
from ...sharding.arrays import OpSite
from ...spec.step_spec import StepSpec
from ..operation import Lowered, NewestTokens, OpInputs, OpPlan, ParallelOp, Strategy, refused
from ..remat import ATTENTION_RESULT, marked
from .blocks import used_blocks
from .cudnn import attend_cudnn, most_head_dim, takes_other_values
from .exchange import (
    EXCHANGE,
    RING,
    ULYSSES,
    Exchange,
    ExchangeName,
    attend_by_blocks,
    attend_over_length,
    block_kernel,
)
from .splash import Cut, attend_splash, plan_cut, shard_places
from .splash_kernels import (
    NO_BUDGET,
    AttentionShape,
    Backward,
    Budget,
    all_blocks,
    block_sizes,
    choose_backward,
    plan_budget,
    seen_blocks,
)

Implementation = Literal["xla", "cudnn", "splash"]
XLA, CUDNN, SPLASH = "xla", "cudnn", "splash"
PLATFORM_OF = {CUDNN: "gpu", SPLASH: "tpu"}


@dataclass(frozen=True)
class Kernel:
    """An implementation of attention. heads: how queries (batch, length, heads, head_dim) lie over `partitioner`.
    exchange: how keys and values reach the queries of other devices, where mesh axes split the length. budget: what one
    backward kernel of splash may cost."""

    implementation: Implementation
    heads: PartitionSpec
    exchange: Exchange | None = None
    partitioner: Axes = ()
    budget: Budget = NO_BUDGET


class AttentionOp(ParallelOp):
    kind = "attention"
    title = "attention"
    names = (XLA, CUDNN, SPLASH)
    fallback = XLA
    after = ("context",)

    def strategies(self, site: OpSite, inputs: OpInputs) -> Sequence[Strategy]:
        heads, platform = inputs.sharding.auto_spec(None, None, "heads", None), inputs.target.platform
        (contexts,) = inputs.after
        exchange = next((each.chosen.parameters for each in contexts if each.site.path == site.path), None)
        merit, head_dim = f"the kernel for {platform}", site.operands[0].shape[-1]
        budget, chip = plan_budget(inputs.target, head_dim, _itemsize(inputs)), inputs.target.chip
        priced = f"{merit}, priced as {chip.attention.title}" if chip else merit
        kernels = [
            Strategy(
                name,
                f"by {name}",
                Kernel(name, heads, exchange, inputs.roles.partitioner, budget),
                reason=f"{priced}; {plan_backward(site, inputs, exchange).reason}" if name == SPLASH else priced,
                refusal=refused(
                    _refusal(name, site, inputs, exchange),
                    loss="attention keeps all scores in memory" if PLATFORM_OF[name] == platform else "",
                ),
            )
            for name in (CUDNN, SPLASH)
        ]
        kernel = Kernel(XLA, heads, exchange, inputs.roles.partitioner)
        plain = Strategy(XLA, f"by {XLA}", kernel, reason=merit)
        own, others = ([k for k in kernels if (PLATFORM_OF[k.name] == platform) is is_own] for is_own in (True, False))
        return (*own, plain, *others)

    def lower(self, plan: OpPlan) -> Lowered:
        return build_attend(plan.chosen.parameters)

    def per_token(self, plain: Lowered, *operands: Any, **options: Any) -> Array:
        out = jax.eval_shape(lambda: plain(*operands, **options))
        arrays = [x for x in operands if x is not None and x.ndim > 2]
        sums = (jnp.sum(x, axis=range(2, x.ndim), keepdims=True) for x in arrays)
        return jnp.broadcast_to(sum(sums, start=jnp.zeros(())), out.shape).astype(out.dtype)

    def with_cache(self, tokens: NewestTokens, name: str, plain: Lowered, *operands: Any, **options: Any) -> Array:
        """Returns the attention of queries to the keys of a cache, up to their own, without those of padding."""
        queries, keys, values, _, *sinks = operands
        if keys.shape[1] != tokens.num_slots:
            what = f"attend('{name}') gets keys of {keys.shape[1]} of {tokens.num_slots} tokens"
            raise ValueError(f"{what}: pass what keys and values are made of through context.remember")
        slots_S = jnp.arange(tokens.num_slots)
        distance_TS = tokens.slots_T[:, None] - slots_S[None, :]
        mask: Mask = options["mask"]
        is_seen_BTS = mask.sees(distance_TS)[None] & (slots_S[None, None, :] >= tokens.padding_B[:, None, None])
        return plain(queries, keys, values, None, *sinks, **options, is_seen=is_seen_BTS[:, None, None])

    def masked_share(self, spec: StepSpec, *operands: Any, **options: Any) -> Fraction:
        """Returns the share of scores that are hidden. Where documents are isolated, how much a query sees is up to the
        data: its own key at least."""
        queries, keys = (operand.shape[1] for operand in operands[:2])
        if queries != keys:
            return Fraction(0)
        mask: Mask = OWN_KEY if spec.data.isolate_documents else options["mask"]
        return 1 - Fraction(mask.num_pairs(keys), queries * keys)

    def compute_kind(self, name: OperationName, *, is_pallas: bool) -> ComputeKind | None:
        return "attention" if name.is_attention else None

    def kernel_cost(self, call: KernelCall) -> KernelCost | None:
        return attention_cost(call)

    def scope(self, plan: OpPlan) -> str:
        exchange = plan.chosen.parameters.exchange
        return ATTENTION if exchange is None else nested_scope(ATTENTION, fact_scope(EXCHANGE, exchange.name))


def _itemsize(inputs: OpInputs) -> int:
    return jnp.dtype(inputs.spec.precision.compute).itemsize


def plan_backward(site: OpSite, inputs: OpInputs, exchange: Exchange | None) -> Backward:
    """Returns how many kernels compute the gradients of splash attention, and why."""
    (heads, head_dim), kv_heads = site.operands[0].shape[2:], site.operands[1].shape[2]
    spec, mesh, itemsize = inputs.spec, inputs.mesh, _itemsize(inputs)
    budget = plan_budget(inputs.target, head_dim, itemsize)
    split = mesh.num_shards(axes_of(inputs.sharding.auto_spec(None, None, "heads", None)[2]))
    if exchange is not None and exchange.name != ULYSSES:
        order = exchange.order
        chunk = spec.sequence_length // order.num_chunks
        num_queries = chunk if exchange.name == RING else spec.sequence_length // order.num_shards
        num_keys = chunk if exchange.name == RING else spec.sequence_length
        block = block_sizes(budget, chunk, num_keys)[0] if chunk % LANES == 0 else 0
        if exchange.name == RING or not block:
            seen = all_blocks(num_queries, block, num_keys)
        else:
            seen = seen_blocks(shard_places(order.chunks(), chunk, block) * block, block, num_keys, Mask())
    else:
        split *= 1 if exchange is None else exchange.order.num_shards
        num_keys = spec.sequence_length
        cut = plan_cut(num_keys, Mask(), budget) if num_keys % LANES == 0 else Cut(0, 0)
        num_queries, block = cut.part, cut.block
        seen = seen_blocks(np.arange(num_keys - num_queries, num_keys, max(1, block))[None], block, num_keys, Mask())
    sequences = inputs.batch.sequences_of_device // spec.overlap.layers.batch_split
    heads, kv_heads = heads // split, max(1, kv_heads // split)  # where each has no head, one is repeated
    if 0 in (block, heads, sequences):  # refused elsewhere
        return Backward(None, reason="two backward kernels")
    shape = AttentionShape(sequences, heads, kv_heads, num_queries, num_keys, head_dim, itemsize, block)
    return choose_backward(shape, seen, budget)


def _refusal(name: str, site: OpSite, inputs: OpInputs, exchange: Exchange | None) -> str | None:
    """Returns why the kernel cannot do this run; None where it can."""
    length, target = inputs.spec.sequence_length, inputs.target
    if PLATFORM_OF[name] != target.platform:
        return f"it does not run on {target.platform} (target {target.name})"
    if name == SPLASH:
        if exchange is not None and exchange.name != ULYSSES:
            num_chunks = exchange.order.num_chunks
            if (chunk := length // num_chunks) % LANES == 0:
                return None
            why = f"chunks of {chunk} tokens are not a multiple of {LANES}"
            return f"{why}: sequence_length has to be a multiple of {num_chunks * LANES}"
        return f"sequence_length={length} is not a multiple of {LANES}" if length % LANES else None
    return cudnn_refusal(site, inputs, None if exchange is None else exchange.name)


def cudnn_refusal(site: OpSite, inputs: OpInputs, exchange: ExchangeName | None) -> str | None:
    """Returns what of this run cuDNN's kernel cannot do with keys and values exchanged so; None where it can run."""
    spec, target = inputs.spec, inputs.target
    if spec.precision.compute == "float32":
        return "it computes in 16 bits, and precision.compute=float32"
    if spec.sequence_length % 2:
        return f"sequence_length={spec.sequence_length} is odd"
    if (soft_cap := site.option("soft_cap")) is not None:
        return f"it has no soft cap, and the model's is {soft_cap}"
    head_dim, of_values = site.operands[0].shape[-1], site.operands[2].shape[-1]
    if of_values != head_dim and not takes_other_values(target):
        return f"queries and keys have a head_dim of {head_dim}, and values one of {of_values}, which needs Hopper"
    most = most_head_dim(target)
    for size in (head_dim, of_values):
        if size % 8 or size > most:
            return f"it takes a head_dim of a multiple of 8 up to {most}, and the model's is {size}"
    if exchange in (None, ULYSSES):
        return None
    instead = f"parallel.context={ULYSSES} gives it whole sequences"
    if not all(mask.within(spec.sequence_length).sees_all_before for mask in site.options_of("mask")):
        return f"it has no windows between parts of a sequence; {instead}"
    if spec.data.isolate_documents:
        return f"it knows no documents between parts of a sequence; {instead}"
    return None


def build_attend(kernel: Kernel) -> Callable[..., Array]:
    """Returns a function with the signature of `models.attention.attend`."""
    on_a_device: Callable[..., Array] = {
        "cudnn": attend_cudnn,
        "splash": partial(attend_splash, budget=kernel.budget, interpret=False),
        "xla": _attend_plain,
    }[kernel.implementation]
    chosen, exchange = on_a_device, kernel.exchange
    if exchange is not None:
        blocks = block_kernel(kernel.implementation, kernel.budget)
        whole = partial(attend_by_blocks, blocks) if kernel.implementation == XLA else on_a_device
        exchanged = partial(attend_over_length, exchange, blocks, whole)
        chosen = partial(_on_shards, exchanged, kernel.heads, kernel.partitioner)
    elif kernel.implementation != XLA:  # the partitioner cannot split a kernel
        chosen = partial(_on_shards, on_a_device, kernel.heads, axes_in(kernel.heads))

    return chosen


def _attend_plain(*args: Any, **options: Any) -> Array:
    """Returns `models.attention.attend`, by plain operations that JAX differentiates."""
    return marked(ATTENTION_RESULT, attend(*args, **options))


def _on_shards(
    kernel: Callable[..., Array], heads: PartitionSpec, axes: Axes, q: Array, k: Array, v: Array,
    segment_ids: Array | None, sinks: Array | None = None, **options: float | Mask | None,
) -> Array:  # fmt: skip
    """Runs the kernel on each shard of the heads. axes: the mesh axes that split them, and maybe others."""
    if not axes:
        return kernel(q, k, v, segment_ids, sinks, **options)
    names = set(axes)
    if kernel is attend_cudnn:  # JAX partitions its calls where an axis is left over, and fails if it has one device
        mesh = jax.sharding.get_abstract_mesh()
        names |= {name for name, size in mesh.shape.items() if size == 1 and name not in mesh.manual_axes}
    run = jax.shard_map(
        partial(kernel, **options),
        in_specs=(heads, heads, heads, PartitionSpec(), PartitionSpec(heads[2])),
        out_specs=heads,
        axis_names=names,
        check_vma=False,
    )
    return run(q, k, v, segment_ids, sinks)


_CUDNN = ("dot_product_attention_fwd", "dot_product_attention_bwd")  # JAX's primitives (cudnn.py)
_CUDNN_BLOCK = 128  # the keys of a block of cuDNN's kernels


def attention_cost(call: KernelCall) -> KernelCost | None:
    """Returns the cost of a call of splash or cuDNN; None for other kernels, and where only their text says it."""
    if not call.is_traced:
        return _compiled_splash(call) if call.is_pallas else None
    if call.is_pallas:
        return _traced_splash(call) if "splash" in call.kernel else None
    return _traced_cudnn(call) if call.kernel.startswith(_CUDNN) else None


def _traced_splash(call: KernelCall) -> KernelCost:
    grid = call.parameters["grid_mapping"].grid
    rows, entries = grid[-3 if "dkv" in call.kernel else -2], grid[-1]  # the table of blocks that it runs over
    num_calls = math.prod(n for n in grid if isinstance(n, int))
    flops = num_calls * sum(matmul_flops(inner) for inner in subprograms(call.parameters))
    used = used_blocks(call.name)
    flops = _causal_flops(flops, rows, entries) if used is None else flops * used[0] // (rows * entries)
    queries, keys = [each.shape for each in call.operands if len(each.shape) > 2 and "float" in each.dtype][:2]
    attention = _attention(call, queries, keys[-2], _num_matmuls(call, queries))
    return KernelCost(flops, unit="attention", attention=attention)


def _traced_cudnn(call: KernelCall) -> KernelCost:
    # Two matmuls forward; backward the scores again, and a gradient of each of four factors (arXiv:2205.14135).
    queries, keys, values = (each.shape for each in call.operands[:3])
    num_keys = keys[2 if call.parameters["layout"] else 1]
    count = 2 if call.kernel.startswith(_CUDNN[0]) else 5
    flops = 2 * math.prod(queries[:-1]) * num_keys * contracted_size(count, queries[-1], values[-1])
    blocks, used = max(1, num_keys // _CUDNN_BLOCK), used_blocks(call.name)
    flops = _causal_flops(flops, blocks, blocks) if used is None else flops * used[0] // used[1]
    return KernelCost(flops, unit="attention", attention=AttentionCall(queries[-1], num_keys, matmuls=count))


def _attention(call: KernelCall, queries: Sequence[int], num_keys: int, matmuls: int) -> AttentionCall:
    """Returns what the rate of a call of splash depends on. A block of queries x keys has its mean size."""
    _, num_blocks = used_blocks(call.name) or (0, 0)
    block = round(math.sqrt(queries[-2] * num_keys / num_blocks)) if num_blocks else 0
    return AttentionCall(queries[-1], num_keys, block, matmuls)


def _num_matmuls(call: KernelCall, queries: Sequence[int]) -> int:
    """Returns the matmuls of a traced kernel of splash. That of keys' gradients which also returns partial sums of the
    queries' computes all five."""
    if "dkv" in call.kernel:
        return 5 if any(len(each.shape) > len(queries) for each in call.results) else 4
    return 3 if "_dq" in call.kernel else 2


def _compiled_splash(call: KernelCall) -> KernelCost | None:
    """Returns the cost of a compiled kernel of splash. A table of public libraries takes the mask for causal, and
    counts half of the square."""
    used, stated = used_blocks(call.name), call.stated
    if used is None or stated is None or stated.unit != "attention":
        return None
    queries = next(each.shape for each in call.operands if len(each.shape) > 2 and "float" in each.dtype)
    assert stated.attention is not None
    attention = _attention(call, queries, stated.attention.length, stated.attention.matmuls)
    return replace(stated, flops=2 * stated.flops * used[0] / used[1], attention=attention)


def _causal_flops(flops: int, rows: int, entries: int) -> int:
    """Returns the FLOPs of the blocks that a causal mask leaves, of those of all entries: at the edge a row has one,
    two, three, .. and all other rows have all of them."""
    return flops * (2 * rows - entries + 1) // (2 * rows)
