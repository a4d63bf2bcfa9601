"""Which implementation of attention the step calls, and how it is called.

    xla     plain operations (models/attention.py), anywhere; all scores are in memory
    cudnn   cuDNN's fused kernel, NVIDIA GPUs; no soft cap
    splash  JAX's Pallas kernel, TPUs: a kernel is no operation that the partitioner can split, so it runs under a
            shard_map over the mesh axes of the heads

Neither kernel keeps the length x length scores. `auto` is the kernel of the platform, with a reason; a choice that
cannot run is an error, never another implementation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
from jax import Array
from jax.sharding import PartitionSpec

from meshloom.models import DecoderConfig
from meshloom.models.attention import attend

from ..config.spec import RunSpec
from ..core.errors import ConfigError, Problem
from ..core.partition_spec import axes_of
from ..core.scopes import ATTENTION
from ..target.target import TargetPlan
from .cudnn import attend_cudnn, most_cudnn_head_dim, shapes_of_cudnn
from .splash import LANES, attend_splash

Implementation = Literal["xla", "cudnn", "splash", "cudnn_shapes"]
KERNEL_OF: dict[str, Implementation] = {"cpu": "xla", "gpu": "cudnn", "tpu": "splash"}
PLATFORM_OF = {kernel: platform for platform, kernel in KERNEL_OF.items()}


@dataclass(frozen=True)
class AttentionPlan:
    implementation: Implementation
    reason: str


def plan_attention(spec: RunSpec, target: TargetPlan) -> AttentionPlan:
    """Settle `kernels.attention` for the target. Raises ConfigError where it cannot run there."""
    wanted, platform = spec.kernels.attention, target.platform
    if wanted == "auto":
        kernel = KERNEL_OF.get(platform, "xla")
        why_not = _obstacle(kernel, spec, target)
        if why_not is None:
            return AttentionPlan(kernel, f"the one for {platform}")
        return AttentionPlan("xla", f"{kernel} is not used: {why_not}")
    if wanted != "xla" and PLATFORM_OF[wanted] != platform:
        what = f"{wanted} does not run on {platform} (target {target.name})"
        raise ConfigError([Problem("kernels.attention", what, "use auto, or xla")])
    if why_not := _obstacle(wanted, spec, target):
        raise ConfigError([Problem("kernels.attention", f"{wanted} cannot be used: {why_not}", "use auto or xla")])
    return AttentionPlan(wanted, "by kernels.attention")


def _obstacle(kernel: Implementation, spec: RunSpec, target: TargetPlan) -> str | None:
    """What of this run the kernel cannot do."""
    model = spec.model
    if kernel == "splash" and spec.sequence_length % LANES:
        return f"sequence_length={spec.sequence_length} is no multiple of {LANES}"
    if kernel == "cudnn":
        if spec.precision.compute == "float32":
            return "it computes in 16 bits, and precision.compute=float32"
        if spec.sequence_length % 2:
            return f"sequence_length={spec.sequence_length} is odd"
        if isinstance(model, DecoderConfig):
            return _obstacle_to_cudnn(model, most_cudnn_head_dim(target))
    return None


def _obstacle_to_cudnn(model: DecoderConfig, most: int) -> str | None:
    if model.attention_soft_cap is not None:
        return f"it has no soft cap, and model.attention_soft_cap={model.attention_soft_cap}"
    if model.head_dim % 8 or model.head_dim > most:
        return f"it takes a head_dim of a multiple of 8 up to {most}, and model.head_dim={model.head_dim}"
    return None


def to_estimate(plan: AttentionPlan) -> AttentionPlan:
    """The plan for a step that is traced and not compiled: nothing of it asks for a library of the target's."""
    return replace(plan, implementation="cudnn_shapes") if plan.implementation == "cudnn" else plan


def build_attend(implementation: Implementation, heads: PartitionSpec) -> Callable[..., Array]:
    """A function with the signature of `models.attention.attend`.

    heads: how queries (batch, length, heads, head_dim) lie over the mesh axes that the step leaves automatic.
    """
    chosen: Callable[..., Array] = {
        "cudnn": attend_cudnn,
        "cudnn_shapes": shapes_of_cudnn,
        "splash": partial(_on_shards, partial(attend_splash, interpret=False), heads),
        "xla": attend,
    }[implementation]

    def named(*args: Any, **options: Any) -> Array:
        with jax.named_scope(ATTENTION):
            return chosen(*args, **options)

    return named


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
