"""Which implementation of attention the step calls, and how it is called.

    xla     plain operations (models/attention.py), anywhere; all scores are in memory
    cudnn   cuDNN's fused kernel, NVIDIA GPUs; no soft cap
    splash  JAX's Pallas kernel, TPUs: a kernel is not an operation that the partitioner can split, so it runs under a
            shard_map over the mesh axes of the heads

Neither kernel keeps the length x length scores. `auto` is the kernel of the platform; a choice that cannot run is an
error, never another implementation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
from jax import Array
from jax.sharding import PartitionSpec

from meshloom.models.attention import attend

from ..core.partition_spec import axes_of
from ..core.scopes import ATTENTION
from ..sharding.arrays import OpSite
from .cudnn import attend_cudnn, most_cudnn_head_dim, shapes_of_cudnn
from .operation import Lowered, OpInputs, OpPlan, ParallelOp, Strategy
from .splash import LANES, attend_splash

Implementation = Literal["xla", "cudnn", "splash", "cudnn_shapes"]
XLA, CUDNN, SPLASH = "xla", "cudnn", "splash"
PLATFORM_OF = {CUDNN: "gpu", SPLASH: "tpu"}


@dataclass(frozen=True)
class Kernel:
    """implementation: of attention. heads: how queries (batch, length, heads, head_dim) lie over the auto axes."""

    implementation: Implementation
    heads: PartitionSpec


class AttentionOp(ParallelOp):
    kind = "attention"
    title = "attention"
    names = (XLA, CUDNN, SPLASH)
    fallback = XLA

    def strategies(self, site: OpSite, inputs: OpInputs) -> Sequence[Strategy]:
        heads, platform = inputs.auto_spec(None, None, "heads", None), inputs.target.platform
        merit = f"the kernel for {platform}"
        kernels = [
            Strategy(
                name,
                f"by {name}",
                Kernel(name, heads),
                merit=merit,
                refusal=_refusal(name, site, inputs),
                loss="attention keeps all scores in memory" if PLATFORM_OF[name] == platform else "",
            )
            for name in (CUDNN, SPLASH)
        ]
        plain = Strategy(XLA, f"by {XLA}", Kernel(XLA, heads), merit=merit)
        own, others = ([k for k in kernels if (PLATFORM_OF[k.name] == platform) is is_own] for is_own in (True, False))
        return (*own, plain, *others)

    def lower(self, plan: OpPlan) -> Lowered:
        return build_attend(plan.chosen.parameters)

    def to_estimate(self, plan: OpPlan) -> OpPlan:
        """Nothing of it asks for cuDNN, which need not be there."""
        kernel: Kernel = plan.chosen.parameters
        if kernel.implementation != CUDNN:
            return plan
        shapes = replace(kernel, implementation="cudnn_shapes")
        return replace(plan, chosen=replace(plan.chosen, parameters=shapes))


def _refusal(name: str, site: OpSite, inputs: OpInputs) -> str | None:
    """What of this run the kernel cannot do; None where it can run."""
    spec, target = inputs.spec, inputs.target
    if PLATFORM_OF[name] != target.platform:
        return f"it does not run on {target.platform} (target {target.name})"
    if name == SPLASH:
        length = spec.sequence_length
        return f"sequence_length={length} is not a multiple of {LANES}" if length % LANES else None
    if spec.precision.compute == "float32":
        return "it computes in 16 bits, and precision.compute=float32"
    if spec.sequence_length % 2:
        return f"sequence_length={spec.sequence_length} is odd"
    if (soft_cap := site.option("soft_cap")) is not None:
        return f"it has no soft cap, and the model's is {soft_cap}"
    head_dim, most = site.operands[0].shape[-1], most_cudnn_head_dim(target)
    if head_dim % 8 or head_dim > most:
        return f"it takes a head_dim of a multiple of 8 up to {most}, and the model's is {head_dim}"
    return None


def build_attend(kernel: Kernel) -> Callable[..., Array]:
    """Returns a function with the signature of `models.attention.attend`."""
    chosen: Callable[..., Array] = {
        "cudnn": attend_cudnn,
        "cudnn_shapes": shapes_of_cudnn,
        "splash": partial(_on_shards, partial(attend_splash, interpret=False), kernel.heads),
        "xla": attend,
    }[kernel.implementation]

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
