"""cuDNN's fused attention for NVIDIA GPUs, and its shapes where there is no cuDNN.

JAX asks for cuDNN's version while it traces a call of the kernel, which only its CUDA plugin knows. An estimate needs
no plugin: it reads the kernel's operands, results and residuals, and `shapes_of_cudnn` has the same ones.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import ShapedArray
from jax.extend.core import Primitive

from ..target.gpu_config import PROCESSORS
from ..target.target import TargetPlan


def most_cudnn_head_dim(target: TargetPlan) -> int:
    """The largest head that JAX calls the kernel with. It looks at the attached GPU: 256 from Hopper on, else 128."""
    processor = PROCESSORS.get(target.chip.name) if target.is_attached and target.chip else None
    return 256 if processor and processor.compute_capability >= (9, 0) else 128


def attend_cudnn(
    q_BTHD: Array, k_BSKD: Array, v_BSKD: Array, segment_ids_BT: Array | None, *, scale: float, window: int | None,
    soft_cap: float | None,
) -> Array:  # fmt: skip
    """By `jax.nn.dot_product_attention`. Segments are a mask: a byte for each pair of tokens of a sequence."""
    assert soft_cap is None  # `plan_attention` refuses it
    is_same = None if segment_ids_BT is None else _is_same(segment_ids_BT)
    return jax.nn.dot_product_attention(
        q_BTHD, k_BSKD, v_BSKD, mask=is_same, scale=scale, is_causal=True, implementation="cudnn",
        local_window_size=None if window is None else (window - 1, 0),
    )  # fmt: skip


def shapes_of_cudnn(
    q_BTHD: Array, k_BSKD: Array, v_BSKD: Array, segment_ids_BT: Array | None, **_: Any
) -> Array:  # fmt: skip
    """`attend_cudnn` to be traced and never compiled; needs no cuDNN."""
    bias = ()
    if segment_ids_BT is not None:  # JAX adds it to the scores
        lowest = jnp.asarray(jnp.finfo(q_BTHD.dtype).min, q_BTHD.dtype)
        bias = (jnp.where(_is_same(segment_ids_BT), jnp.zeros((), q_BTHD.dtype), lowest),)
    return _attend(q_BTHD, k_BSKD, v_BSKD, bias)


def _is_same(segment_ids_BT: Array) -> Array:
    return (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])[:, None]


@jax.custom_vjp
def _attend(q: Array, k: Array, v: Array, bias: tuple[Array, ...]) -> Array:
    return bind_shapes_forward(q, k, v, *bias)[0]


def _attend_forward(q: Array, k: Array, v: Array, bias: tuple[Array, ...]) -> tuple[Array, Any]:
    out, statistics = bind_shapes_forward(q, k, v, *bias)
    return out, (q, k, v, bias, statistics, out)


def _attend_backward(residuals: Any, gradient: Array) -> tuple[Array, Array, Array, tuple[None, ...]]:
    q, k, v, bias, statistics, out = residuals
    operands = (q, k, v, *bias, statistics, out, gradient)
    dq, dk, dv, *dbias = bind_shapes_backward(*operands, num_biases=len(bias))
    return dq, dk, dv, (None,) * len(dbias)


_attend.defvjp(_attend_forward, _attend_backward)

# Named as JAX's own, which begin so too: operation_kinds.py knows both by that.
_forward = Primitive("dot_product_attention_fwd_shapes")
_backward = Primitive("dot_product_attention_bwd_shapes")
_forward.multiple_results = _backward.multiple_results = True


BTNH, BNTH = 0, 1  # layouts, as JAX numbers them: heads after the length, or before it


def bind_shapes_forward(*operands: Array, layout: int = BTNH) -> list[Array]:
    """[output, the log of the softmax's denominator], of queries, keys, values, and what else the kernel takes."""
    return _forward.bind(*operands, layout=layout)


def bind_shapes_backward(*operands: Array, num_biases: int = 0, layout: int = BTNH) -> list[Array]:
    """Gradients of the queries, keys, values, and biases, which are the first operands."""
    return _backward.bind(*operands, num_biases=num_biases, layout=layout)


@_forward.def_abstract_eval
def _(q: Any, *_others: Any, layout: int) -> list[ShapedArray]:
    (B, T, H) = q.shape[:3] if layout == BTNH else (q.shape[0], q.shape[2], q.shape[1])
    return [ShapedArray(q.shape, q.dtype), ShapedArray((B, H, T), jnp.float32)]


@_backward.def_abstract_eval
def _(*operands: Any, num_biases: int, layout: int) -> list[ShapedArray]:
    del layout
    return [ShapedArray(x.shape, x.dtype) for x in operands[: 3 + num_biases]]
