"""Which implementation of attention the step calls, and how it is called.

    xla     plain operations (models/attention.py), anywhere; all scores are in memory
    cudnn   cuDNN's fused kernel, NVIDIA GPUs; no soft cap
    splash  JAX's Pallas kernel, TPUs: a kernel is no operation that the partitioner can split, so it runs under a
            shard_map over the mesh axes of the heads

Neither kernel keeps the length x length scores. `auto` is the kernel of the platform, with a reason; a choice that
cannot run is an error, never another implementation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import PartitionSpec

from meshloom.models import DecoderConfig
from meshloom.models.attention import attend

from .gather import axes_of
from .problems import ConfigError, Problem
from .spec import RunSpec
from .target import TargetPlan

Implementation = Literal["xla", "cudnn", "splash"]
KERNEL_OF: dict[str, Implementation] = {"cpu": "xla", "gpu": "cudnn", "tpu": "splash"}
PLATFORM_OF = {kernel: platform for platform, kernel in KERNEL_OF.items()}
LANES = 128  # of a TPU's vector registers: splash works in blocks of that many tokens
MOST_BLOCK = 512  # tokens; larger blocks read keys and values less often, this one fits the VMEM of every TPU


@dataclass(frozen=True)
class AttentionPlan:
    implementation: Implementation
    reason: str


def plan_attention(spec: RunSpec, target: TargetPlan) -> AttentionPlan:
    """Settle `kernels.attention` for the target. Raises ConfigError where it cannot run there."""
    wanted, platform = spec.kernels.attention, target.platform
    if wanted == "auto":
        kernel = KERNEL_OF.get(platform, "xla")
        why_not = _obstacle(kernel, spec)
        if why_not is None:
            return AttentionPlan(kernel, f"the one for {platform}")
        return AttentionPlan("xla", f"{kernel} is not used: {why_not}")
    if wanted != "xla" and PLATFORM_OF[wanted] != platform:
        what = f"{wanted} does not run on {platform} (target {target.name})"
        raise ConfigError([Problem("kernels.attention", what, "use auto, or xla")])
    if why_not := _obstacle(wanted, spec):
        raise ConfigError([Problem("kernels.attention", f"{wanted} cannot be used: {why_not}", "use auto or xla")])
    return AttentionPlan(wanted, "by kernels.attention")


def _obstacle(kernel: Implementation, spec: RunSpec) -> str | None:
    """What of this run the kernel cannot do."""
    model = spec.model
    if kernel == "splash" and spec.sequence_length % LANES:
        return f"sequence_length={spec.sequence_length} is no multiple of {LANES}"
    if kernel == "cudnn":
        if spec.precision.compute == "float32":
            return "it computes in 16 bits, and precision.compute=float32"
        if isinstance(model, DecoderConfig) and model.attention_soft_cap is not None:
            return f"it has no soft cap, and model.attention_soft_cap={model.attention_soft_cap}"
    return None


def build_attend(implementation: Implementation, heads: PartitionSpec) -> Callable[..., Array]:
    """A function with the signature of `models.attention.attend`.

    heads: how queries (batch, length, heads, head_dim) lie over the mesh axes that the step leaves automatic.
    """
    chosen: Callable[..., Array] = {
        "cudnn": attend_cudnn,
        "splash": partial(_on_shards, partial(attend_splash, interpret=False), heads),
        "xla": attend,
    }[implementation]

    def named(*args: Any, **options: Any) -> Array:
        with jax.named_scope("attend"):  # by which the schedule's report knows it
            return chosen(*args, **options)

    return named


def attend_cudnn(
    q_BTHD: Array, k_BSKD: Array, v_BSKD: Array, segment_ids_BT: Array | None, *, scale: float, window: int | None,
    soft_cap: float | None,
) -> Array:  # fmt: skip
    """By `jax.nn.dot_product_attention`. Segments are a mask: a byte for each pair of tokens of a sequence."""
    assert soft_cap is None  # `plan_attention` refuses it
    is_same = None
    if segment_ids_BT is not None:
        is_same = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q_BTHD, k_BSKD, v_BSKD, mask=is_same, scale=scale, is_causal=True, implementation="cudnn",
        local_window_size=None if window is None else (window - 1, 0),
    )  # fmt: skip


def attend_splash(
    q_BTHD: Array, k_BSKD: Array, v_BSKD: Array, segment_ids_BT: Array | None, *, scale: float, window: int | None,
    soft_cap: float | None, interpret: bool,
) -> Array:  # fmt: skip
    """By splash attention; interpret: run the kernel's operations one by one, on any platform."""
    _, T, H, _ = q_BTHD.shape
    shape = (T, T)
    mask = splash_mask.CausalMask(shape) if window is None else splash_mask.LocalMask(shape, (window - 1, 0), 0)
    block = next(size for size in range(min(T, MOST_BLOCK), 0, -LANES) if T % size == 0)
    kernel = splash.make_splash_mha(
        splash_mask.MultiHeadMask([mask] * H),
        block_sizes=splash.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
            block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
        ),
        head_shards=1, q_seq_shards=1, attn_logits_soft_cap=soft_cap, interpret=interpret,
    )  # fmt: skip
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q_BTHD * jnp.asarray(scale, q_BTHD.dtype), k_BSKD, v_BSKD))
    attended: Any
    if segment_ids_BT is None:
        attended = jax.vmap(kernel)(q, k, v)
    else:
        attended = jax.vmap(kernel)(q, k, v, splash.SegmentIds(segment_ids_BT, segment_ids_BT))
    return jnp.swapaxes(attended, 1, 2)


def _on_shards(
    kernel: Callable[..., Array], heads: PartitionSpec, q: Array, k: Array, v: Array, segment_ids: Array | None,
    **options: float | int | None,
) -> Array:  # fmt: skip
    """The kernel on each shard of the heads."""
    axes = {axis for entry in heads for axis in axes_of(entry)}
    if not axes:
        return kernel(q, k, v, segment_ids, **options)
    run = jax.shard_map(
        partial(kernel, **options),
        in_specs=(heads, heads, heads, PartitionSpec()),
        out_specs=heads,
        axis_names=axes,
        check_vma=False,
    )
    return run(q, k, v, segment_ids)
