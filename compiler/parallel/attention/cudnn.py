"""cuDNN's fused attention for NVIDIA GPUs.

JAX's primitives are bound here, and not called by `jax.nn.dot_product_attention`: it asks the attached GPU and its
cuDNN what they can do, which need not be there when a step is compiled ahead of time or estimated; it takes no values
of another width than keys; and it computes a gradient of the mask. What a GPU can do is in `most_head_dim` and
`takes_other_values`. The primitives are private.

It also computes attention of some queries to some of the keys, with the log of the softmax's denominator. The kernel
of the gradients is given the result and the logarithm of all keys, as in Transformer Engine
(docs.nvidia.com/deeplearning/transformer-engine, context parallelism). It knows two masks for parts of a sequence: all
keys, and the causal one from the first query and key on. So gathered keys are two parts: the chunks before the
queries', by a padding mask with their number of tokens, which only the device knows; and the queries' own chunk.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.models.attention import Mask, is_same_document

from ...jax_private import cudnn, cudnn_backward_p, cudnn_forward_p
from ...sharding.batch import TokenOrder
from ...target.target import TargetPlan
from ..remat import ATTENTION_LSE, ATTENTION_RESULT, marked
from .blocks import (
    HIDDEN,
    Attended,
    Gradient,
    Gradients,
    Keys,
    Queries,
    Sight,
    blocks_scope,
    gradient_of_sinks,
    merge,
    split_length,
    with_sinks,
)

CAUSAL, ALL_KEYS, SOME_KEYS = cudnn.MaskType.CAUSAL, cudnn.MaskType.NO_MASK, cudnn.MaskType.PADDING
BTHD, BHTD = cudnn.AttentionLayout.BTNH.value, cudnn.AttentionLayout.BNTH.value
_HOPPER = 9, 0


def most_head_dim(target: TargetPlan) -> int:
    """Returns the largest head that the kernel takes, as JAX has it: 256 from Hopper on, else 128."""
    return 256 if _is_hopper_or_later(target) else 128


def takes_other_values(target: TargetPlan) -> bool:
    """Returns True if values may have another width than keys, as JAX has it: from Hopper on, with cuDNN 9.10, which
    the CUDA plugin requires."""
    return _is_hopper_or_later(target)


def _is_hopper_or_later(target: TargetPlan) -> bool:
    processor = target.chip.processor if target.chip else None
    return processor is not None and processor.compute_capability >= _HOPPER


class Operands(NamedTuple):
    """Queries, keys and values. bias: an array that is added to the scores. lengths: int32, for SOME_KEYS the number of
    queries and of keys of each sequence that count."""

    q: Array
    k: Array
    v: Array
    bias: Array | None = None
    lengths: tuple[Array, Array] | None = None


@dataclass(frozen=True)
class Mode:
    """The options of a kernel. layout: the order of dimensions of queries, keys and values. window: the number of keys
    that a query sees, its own the last."""

    scale: float
    mask: Any
    layout: int
    window: int | None = None


def bind_forward(operands: Operands, mode: Mode) -> tuple[Array, Array]:
    """Returns the result and the log of the softmax's denominator, float32 (batch, heads, length)."""
    parameters = _parameters(operands, mode) | {"is_training": True}
    out, lse = cudnn_forward_p.bind(*_arguments(operands), **parameters)
    return out, lse


def bind_backward(operands: Operands, lse: Array, out: Array, gradient: Array, mode: Mode) -> tuple[Array, ...]:
    """Returns the gradients of queries, keys and values. These keys may be some of those that `out` and `lse` cover."""
    arguments = (*_arguments(operands), lse, out, gradient)
    return tuple(cudnn_backward_p.bind(*arguments, **_parameters(operands, mode)))


def _arguments(operands: Operands) -> tuple[Array, ...]:
    q, k, v, bias, lengths = operands
    none = jnp.zeros(0, q.dtype)
    return q, k, v, none if bias is None else bias, *(lengths or (none, none)), none, none, none, none


def _parameters(operands: Operands, mode: Mode) -> dict[str, Any]:
    return {
        "scale": mode.scale, "mask_type": mode.mask, "layout": mode.layout, "sliding_window_length": mode.window,
        "seed": 42, "dropout_rate": 0.0, "variadic_args": (operands.bias is not None, False),
    }  # fmt: skip


def attend_cudnn(
    q_BTHD: Array, k_BSKD: Array, v_BSKD: Array, segment_ids_BT: Array | None, sinks_H: Array | None = None,
    *, scale: float, mask: Mask, soft_cap: float | None,
) -> Array:  # fmt: skip
    """Returns causal attention. Segments are a mask: two bytes for each pair of tokens of a sequence."""
    assert soft_cap is None  # `cudnn_refusal`
    bias = None
    if segment_ids_BT is not None:
        is_same_BTS = is_same_document(segment_ids_BT, segment_ids_BT)
        bias = cudnn.combine_bias_and_mask(None, is_same_BTS[:, None], q_BTHD.dtype)
    return _attend(Operands(q_BTHD, k_BSKD, v_BSKD, bias), sinks_H, Mode(scale, CAUSAL, BTHD, mask.window))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attend(operands: Operands, sinks_H: Array | None, mode: Mode) -> Array:
    return _forward_with_sinks(operands, sinks_H, mode)[0]


def _forward_with_sinks(operands: Operands, sinks_H: Array | None, mode: Mode) -> tuple[Array, Array]:
    out_BTHD, lse_BHT = bind_forward(operands, mode)
    if sinks_H is None:
        return out_BTHD, lse_BHT
    out_BHTD, lse_BHT = with_sinks(Attended(jnp.swapaxes(out_BTHD, 1, 2), lse_BHT), sinks_H)
    return jnp.swapaxes(out_BHTD, 1, 2), lse_BHT


def _attend_forward(operands: Operands, sinks_H: Array | None, mode: Mode) -> tuple[Array, Any]:
    out, lse = _forward_with_sinks(operands, sinks_H, mode)
    out, lse = marked(ATTENTION_RESULT, out), marked(ATTENTION_LSE, lse)
    return out, (operands, sinks_H, lse, out)


def _attend_backward(mode: Mode, saved: Any, gradient: Array) -> tuple[Operands, Array | None]:
    operands, sinks_H, lse, out = saved
    dq, dk, dv = bind_backward(operands, lse, out, gradient, mode)
    if sinks_H is None:
        return Operands(dq, dk, dv), None
    dot_BTH = jnp.sum(out.astype(jnp.float32) * gradient.astype(jnp.float32), axis=-1)
    return Operands(dq, dk, dv), gradient_of_sinks(sinks_H, lse, jnp.swapaxes(dot_BTH, 1, 2))


_attend.defvjp(_attend_forward, _attend_backward)


class ChunkSight(NamedTuple):
    """The keys of a whole sequence that chunks of queries see. starts: the place of each chunk, in tokens. num_used:
    the blocks before the chunks that are seen, of num_blocks."""

    starts: Array
    num_used: int
    num_blocks: int


class CudnnBlocks:
    def forward(self, queries: Queries, keys: Keys, sight: Sight | ChunkSight) -> Attended:
        if isinstance(sight, Sight):
            is_causal = _is_causal(sight)
            with _scope(is_causal=is_causal):
                return _forward(queries, keys, None, is_causal=is_causal)
        parts = [self._after(own, keys, start, sight) for own, start in self._chunks(queries, sight)]
        out, lse = (jnp.concatenate(each, axis=2) for each in zip(*parts, strict=True))
        return Attended(out, lse)

    def gradients(self, queries: Queries, keys: Keys, sight: Sight | ChunkSight, gradient: Gradient) -> Gradients:
        if isinstance(sight, Sight):
            is_causal = _is_causal(sight)
            with _scope(is_causal=is_causal):
                return _backward(queries, keys, None, gradient, is_causal=is_causal)
        of_keys = tuple(jnp.zeros(x.shape, jnp.float32) for x in keys[:2])
        found = []
        for (own, start), g in zip(
            self._chunks(queries, sight), split_length(gradient, len(sight.starts)), strict=True
        ):
            dq, of_keys = self._gradients_after(own, keys, start, sight, g, of_keys)
            found.append(dq)
        return Gradients(jnp.concatenate(found, axis=2), *of_keys)

    def shard_sight(self, order: TokenOrder, shard: Array, length: int, mask: Mask) -> ChunkSight:
        assert mask.sees_all_before  # `cudnn_refusal`
        chunks = order.chunks()
        starts = jnp.asarray(chunks * (length // order.chunks_per_shard), jnp.int32)[shard]
        return ChunkSight(starts, int(chunks.sum(axis=1).max()), order.chunks_per_shard * order.num_chunks)

    def _chunks(self, queries: Queries, sight: ChunkSight) -> list[tuple[Queries, Array]]:
        return list(zip(split_length(queries, len(sight.starts)), sight.starts, strict=True))

    def _after(self, queries: Queries, keys: Keys, start: Array, sight: ChunkSight) -> Attended:
        """Returns attention of one chunk of queries to the keys before it, and to its own."""
        with jax.named_scope(blocks_scope(sight.num_used, sight.num_blocks)):
            out, lse = _forward(queries, keys, _num_keys(queries, start), is_causal=False)
        before = Attended(jnp.where(start > 0, out, 0), jnp.where(start > 0, lse, HIDDEN))
        return merge(before, _forward(queries, _own(keys, queries, start), None, is_causal=True))

    def _gradients_after(
        self, queries: Queries, keys: Keys, start: Array, sight: ChunkSight, gradient: Gradient, of_keys: Any
    ) -> tuple[Array, Any]:
        """Returns the gradients of the queries, and what was known of those of keys and values with theirs added."""
        far = gradient._replace(lse_BHT=jnp.where(start > 0, gradient.lse_BHT, -HIDDEN))
        with jax.named_scope(blocks_scope(sight.num_used, sight.num_blocks)):
            dq, *d_keys = _backward(queries, keys, _num_keys(queries, start), far, is_causal=False)
        is_before = (jnp.arange(keys.k_BKSD.shape[2]) < start)[:, None]
        of_keys = tuple(x + jnp.where(is_before, d, 0) for x, d in zip(of_keys, d_keys, strict=True))
        own = _backward(queries, _own(keys, queries, start), None, gradient, is_causal=True)
        added = []
        for x, d in zip(of_keys, own[1:], strict=True):
            there = jax.lax.dynamic_slice_in_dim(x, start, d.shape[2], axis=2)
            added.append(jax.lax.dynamic_update_slice_in_dim(x, there + d, start, axis=2))
        return jnp.where(start > 0, dq, 0).astype(jnp.float32) + own.q_BHTD, tuple(added)


def _is_causal(sight: Sight) -> bool:
    assert isinstance(sight.distance, int)
    assert sight.mask.sees_all_before  # `cudnn_refusal`
    return sight.distance == 0


def _scope(*, is_causal: bool) -> AbstractContextManager[object]:
    """Returns the scope of a kernel, by which its FLOPs are counted: without one, they are those of a causal mask."""
    return nullcontext() if is_causal else jax.named_scope(blocks_scope(1, 1))


def _num_keys(queries: Queries, start: Array) -> Array:
    """Returns how many keys each sequence sees: at least one, as what the kernel does without any is not documented."""
    return jnp.full(queries.q_BHTD.shape[0], jnp.maximum(start, 1), jnp.int32)


def _own(keys: Keys, queries: Queries, start: Array) -> Keys:
    k, v = (jax.lax.dynamic_slice_in_dim(x, start, queries.q_BHTD.shape[2], axis=2) for x in keys[:2])
    return Keys(k, v, None)


def _forward(queries: Queries, keys: Keys, num_keys_B: Array | None, *, is_causal: bool) -> Attended:
    """Runs the forward kernel on scaled queries. num_keys_B: how many of the first keys of each sequence are seen;
    None: all, or with is_causal those up to each query's own place."""
    return Attended(*bind_forward(*_operands(queries, keys, num_keys_B, is_causal=is_causal)))


def _backward(
    queries: Queries, keys: Keys, num_keys_B: Array | None, gradient: Gradient, *, is_causal: bool
) -> Gradients:
    operands, mode = _operands(queries, keys, num_keys_B, is_causal=is_causal)
    out, d_out = (x.astype(operands.q.dtype) for x in (gradient.result_BHTD, gradient.out_BHTD))
    return Gradients(*bind_backward(operands, gradient.lse_BHT, out, d_out, mode))


def _operands(queries: Queries, keys: Keys, num_keys_B: Array | None, *, is_causal: bool) -> tuple[Operands, Mode]:
    q, k, v = queries.q_BHTD, keys.k_BKSD, keys.v_BKSD
    if num_keys_B is None:
        return Operands(q, k, v), Mode(1.0, CAUSAL if is_causal else ALL_KEYS, BHTD)
    all_queries = jnp.full(q.shape[0], q.shape[2], jnp.int32)
    return Operands(q, k, v, lengths=(all_queries, num_keys_B)), Mode(1.0, SOME_KEYS, BHTD)
