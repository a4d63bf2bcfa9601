"""cuDNN's fused attention for NVIDIA GPUs.

JAX's primitives are bound here, and not called by `jax.nn.dot_product_attention`: it asks the attached GPU and its
cuDNN what they can do, which need not be there when a step is compiled ahead of time or estimated; it takes no values
of another width than keys; and it computes a gradient of the mask. What a GPU can do is in `most_head_dim` and
`takes_other_values`. The primitives are private.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..jax_private import cudnn, cudnn_backward_p, cudnn_forward_p
from ..target.target import TargetPlan
from ..target.topology import PROCESSORS
from .remat import ATTENTION_LSE, ATTENTION_RESULT, marked

CAUSAL, ALL_KEYS, SOME_KEYS = cudnn.MaskType.CAUSAL, cudnn.MaskType.NO_MASK, cudnn.MaskType.PADDING
BTHD, BHTD = cudnn.AttentionLayout.BTNH.value, cudnn.AttentionLayout.BNTH.value
_HOPPER = 9, 0


def most_head_dim(target: TargetPlan) -> int:
    """The largest head that the kernel takes, as JAX has it: 256 from Hopper on, else 128."""
    return 256 if _is_hopper_or_later(target) else 128


def takes_other_values(target: TargetPlan) -> bool:
    """True if values may have another width than keys, as JAX has it: from Hopper on, with cuDNN 9.10, which the CUDA
    plugin requires."""
    return _is_hopper_or_later(target)


def _is_hopper_or_later(target: TargetPlan) -> bool:
    processor = PROCESSORS.get(target.chip.name) if target.chip else None
    return processor is not None and processor.compute_capability >= _HOPPER


class Operands(NamedTuple):
    """Queries, keys, values. bias: added to the scores. lengths: int32, for SOME_KEYS the number of queries and of keys
    of each sequence that count."""

    q: Array
    k: Array
    v: Array
    bias: Array | None = None
    lengths: tuple[Array, Array] | None = None


@dataclass(frozen=True)
class Mode:
    """layout: of queries, keys and values. window: the number of keys that a query sees, its own the last."""

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
    q_BTHD: Array, k_BSKD: Array, v_BSKD: Array, segment_ids_BT: Array | None, *, scale: float, window: int | None,
    soft_cap: float | None,
) -> Array:  # fmt: skip
    """Causal attention. Segments are a mask: two bytes for each pair of tokens of a sequence."""
    assert soft_cap is None  # `cudnn_refusal`
    bias = None
    if segment_ids_BT is not None:
        is_same_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
        bias = cudnn.combine_bias_and_mask(None, is_same_BTS[:, None], q_BTHD.dtype)
    return _attend(Operands(q_BTHD, k_BSKD, v_BSKD, bias), Mode(scale, CAUSAL, BTHD, window))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(operands: Operands, mode: Mode) -> Array:
    return bind_forward(operands, mode)[0]


def _attend_forward(operands: Operands, mode: Mode) -> tuple[Array, tuple[Operands, Array, Array]]:
    out, lse = bind_forward(operands, mode)
    out, lse = marked(ATTENTION_RESULT, out), marked(ATTENTION_LSE, lse)
    return out, (operands, lse, out)


def _attend_backward(mode: Mode, saved: tuple[Operands, Array, Array], gradient: Array) -> tuple[Operands]:
    operands, lse, out = saved
    dq, dk, dv = bind_backward(operands, lse, out, gradient, mode)
    return (Operands(dq, dk, dv),)


_attend.defvjp(_attend_forward, _attend_backward)
