"""The calls of JAX's splash attention kernel, forward with the log of the softmax's denominator, and backward.

JAX's kernel returns that logarithm from a forward pass that has no gradient (`save_residuals`), and its public gradient
knows only the denominator of its own keys. A ring merges several of them, and a remat policy saves it by name, so both
halves of the gradient are called here: `_splash_attention_bwd_dq` and `_splash_attention_bwd_dkv`. They are private;
this file alone imports them, and tests/compiler/parallel/test_exchange.py fails where another JAX has changed them.
"""

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from ..core.scopes import blocks_scope
from ..jax_private import splash_dkv, splash_dq
from ..jaxpr.operation_kinds import LANES
from .blocks import Attended, Gradient, Gradients, Keys, Queries, both_ids
from .splash_fused import AttentionShape, Budget, Seen, choose_backward, fused_tables

BLOCKS = (512, 1024)  # tokens, the one that is wanted first; 1,024 fits the vector memory of every TPU, 2,048 does not

PARTLY, WHOLE = 1, 2  # how much of a block the mask leaves; 0 where nothing is


@dataclass(frozen=True)
class CausalMask:
    """True where a query sees a key: up to its own token, of these many tokens where there is a window."""

    window: int | None

    def __call__(self, query_ids: Any, key_ids: Any) -> Any:
        sees = query_ids >= key_ids
        return sees if self.window is None else (query_ids - (self.window - 1) <= key_ids) & sees


@dataclass(frozen=True)
class Tables:
    """Which blocks of the keys each block of queries sees. block: tokens of one. queries_first, keys_first: as the
    kernels read them. mask: which keys a query sees within a block; None: all. num_used: blocks that are computed, of
    `num_blocks` of the whole square. seen: the same for blocks of keys of another size; shard: which of its shards this
    device is."""

    block: int
    queries_first: MaskInfo
    keys_first: MaskInfo
    mask: CausalMask | None
    num_used: int
    num_blocks: int
    seen: Seen
    shard: Array | int = 0

    def in_blocks_of_keys(self, size: int) -> MaskInfo:
        """Returns the tables of the one backward kernel; where the others have none, it needs none."""
        if self.keys_first.data_next is None:
            return self.keys_first
        data, used = (jnp.asarray(x)[self.shard] for x in fused_tables(self.seen(size)))
        return self.keys_first._replace(data_next=data, block_mask=used)


def block_size(*lengths: int, most: int) -> int:
    """Tokens of a block: the most that divide all lengths, in whole rows of registers."""
    return next(size for size in range(min(*lengths, most), 0, -LANES) if not any(n % size for n in lengths))


@dataclass(frozen=True)
class SplashOptions:
    """budget: of one backward kernel. interpret: run the kernel's operations one by one, on any platform."""

    soft_cap: float | None
    budget: Budget
    interpret: bool


def attend(tables: Tables, queries: Queries, keys: Keys, options: SplashOptions) -> Attended:
    """Returns attention of every sequence to the keys that the tables name. It has no gradient."""
    call = partial(_forward_of_one, tables, soft_cap=options.soft_cap, interpret=options.interpret)
    with jax.named_scope(blocks_scope(tables.num_used, tables.num_blocks)):
        return Attended(*jax.vmap(call)(queries.q_BHTD, keys.k_BKSD, keys.v_BKSD, *both_ids(queries, keys)))


def gradients(tables: Tables, queries: Queries, keys: Keys, gradient: Gradient, options: SplashOptions) -> Gradients:
    """Returns the part of the gradients that these keys bring."""
    lse, d_out, dot, _ = gradient
    of_all = (lse, d_out.astype(queries.q_BHTD.dtype), dot)
    operands = (queries.q_BHTD, keys.k_BKSD, keys.v_BKSD, of_all, *both_ids(queries, keys))
    how = {"soft_cap": options.soft_cap, "interpret": options.interpret}
    backward = choose_backward(_shape(tables, queries, keys), tables.seen, options.budget)
    if backward.keys_block is None:
        with jax.named_scope(blocks_scope(tables.num_used, tables.num_blocks)):
            dq = jax.vmap(partial(_dq_of_one, tables, **how))(*operands)
            return Gradients(dq, *jax.vmap(partial(_dkv_of_one, tables, **how))(*operands))
    call = partial(_fused_of_one, tables, backward.keys_block, **how)
    with jax.named_scope(blocks_scope(backward.num_used, backward.num_blocks)):
        by_sequence = backward.is_by_sequence
        return Gradients(*(jax.lax.map(lambda one: call(*one), operands) if by_sequence else jax.vmap(call)(*operands)))


def _shape(tables: Tables, queries: Queries, keys: Keys) -> AttentionShape:
    sequences, heads, num_queries, head_dim = queries.q_BHTD.shape
    num_keys, itemsize = keys.k_BKSD.shape[2], queries.q_BHTD.dtype.itemsize
    return AttentionShape(sequences, heads, num_queries, num_keys, head_dim, itemsize, tables.block)


def _forward_of_one(
    tables: Tables, q_HTD: Array, k_KSD: Array, v_KSD: Array, *ids: Array, soft_cap: float | None, interpret: bool
) -> tuple[Array, Array]:
    """(attention, lse_HT). It has no gradient."""
    kernel = splash.SplashAttentionKernel(
        tables.queries_first, None, None, block_sizes=splash.BlockSizes(tables.block, tables.block, tables.block),
        is_mqa=False, save_residuals=True, mask_value=splash.DEFAULT_MASK_VALUE, attn_logits_soft_cap=soft_cap,
        residual_checkpoint_name=None, mask_function=tables.mask, interpret=interpret,
    )  # fmt: skip
    result: Any = kernel(q_HTD, k_KSD, v_KSD, *_segment_ids(ids))
    out, (lse,) = result
    return out, lse


def _dq_of_one(
    tables: Tables, q_HTD: Array, k_KSD: Array, v_KSD: Array, gradient: Any, *ids: Array,
    soft_cap: float | None, interpret: bool,
) -> Array:  # fmt: skip
    """The part of the queries' gradient that these keys bring. gradient: (lse over all keys, gradient of the output,
    sum of the output times that)."""
    (segments,), no_sinks = _segment_ids(ids) or (None,), None
    lse, d_out, dot = gradient
    return splash_dq(
        q_HTD, k_KSD, v_KSD, segments, no_sinks, lse, d_out, dot, bq=tables.block, bkv=tables.block,
        mask_info=tables.queries_first, **_options(tables, soft_cap, interpret=interpret),
    )  # fmt: skip


def _dkv_of_one(
    tables: Tables, q_HTD: Array, k_KSD: Array, v_KSD: Array, gradient: Any, *ids: Array,
    soft_cap: float | None, interpret: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """The part of the gradients of these keys and values that these queries bring."""
    _, dk, dv = _by_keys(
        q_HTD, k_KSD, v_KSD, gradient, ids, bq=tables.block, bkv=tables.block, bkv_compute=tables.block,
        mask_info=tables.keys_first, use_fused_bwd_kernel=False, **_options(tables, soft_cap, interpret=interpret),
    )  # fmt: skip
    return dk, dv


def _fused_of_one(
    tables: Tables, keys_block: int, q_HTD: Array, k_KSD: Array, v_KSD: Array, gradient: Any, *ids: Array,
    soft_cap: float | None, interpret: bool,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Both parts, by one kernel. The parts of the queries' gradient are added here, in float32: the kernel's own sum of
    them is one reduction, for which XLA estimates 3.96 ms for 1.07 GB on v5p; as additions it is 0.8 ms."""
    call = partial(
        _by_keys, bq=tables.block, bkv=keys_block, bkv_compute=tables.block,
        mask_info=tables.in_blocks_of_keys(keys_block), use_fused_bwd_kernel=True,
        **_options(tables, soft_cap, interpret=interpret),
    )  # fmt: skip
    parts, dk, dv = _kernel_results(call, q_HTD, k_KSD, v_KSD, gradient, ids)
    return reduce(jnp.add, (part.astype(jnp.float32) for part in parts)), dk, dv


def _kernel_results(call: Any, *operands: Any) -> Any:
    """Returns the last three results of the kernel that `call` runs, before what `call` does to them."""
    closed = jax.make_jaxpr(call)(*operands)
    (kernel,) = (each for each in closed.eqns if each.primitive.name == "pallas_call")
    until_kernel = closed.jaxpr.replace(outvars=kernel.outvars[-3:])
    return jaxpr_as_fun(ClosedJaxpr(until_kernel, closed.consts))(*jax.tree.leaves(operands))


def _by_keys(q_HTD: Array, k_KSD: Array, v_KSD: Array, gradient: Any, ids: tuple[Array, ...], **options: Any) -> Any:
    (segments,), no_sinks = _segment_ids(ids) or (None,), None
    return splash_dkv(q_HTD, k_KSD, v_KSD, segments, no_sinks, *gradient, **options)


def _options(tables: Tables, soft_cap: float | None, *, interpret: bool) -> dict[str, Any]:
    layout = splash.QKVLayout.HEAD_DIM_MINOR
    return {
        "is_mqa": False, "mask_value": splash.DEFAULT_MASK_VALUE, "attn_logits_soft_cap": soft_cap,
        "q_layout": layout, "k_layout": layout, "v_layout": layout, "mask_function": tables.mask,
        "interpret": interpret,
    }  # fmt: skip


def _segment_ids(ids: tuple[Array, ...]) -> tuple[Any, ...]:
    return (splash.SegmentIds(*ids),) if ids else ()
