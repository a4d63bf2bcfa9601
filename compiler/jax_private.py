"""The private parts of JAX that the compiler uses, read in JAX 0.10.2; no other file of the compiler uses one.

If a release drops a name:

    fused_attention_stablehlo,                     `jax.nn.dot_product_attention(implementation="cudnn")`, which asks
      _dot_product_attention_fwd_p_wrapper,          the attached GPU, takes no values wider than keys, and gives no
      _dot_product_attention_bwd_p_wrapper           gradient of a part of the keys: no steps for absent GPUs
    _splash_attention_bwd_dq,                      the gradient of `splash_attention_kernel.SplashAttentionKernel`, of
      _splash_attention_bwd_dkv                      all keys at once: no ring, and no gathered keys, on TPUs
    jaxlib._hlo: HloModule.from_serialized_...     the text beside a profile or a dump: neither has a
      hlo_module_proto, to_string                    program that is read out of its protocol buffer
    args_res                                       `jax.vjp` of a function that takes the weights as arguments, and
                                                     `jax.checkpoint` around it: a layer's forward pass runs again
    _executable._xla_in_layouts                    a compiled program takes no array of 4-bit numbers: on CPUs arrays
                                                     do not say that they are packed, as its arguments do
"""

from typing import Any

from jax._src.cudnn import fused_attention_stablehlo

from .core.kernels import Deferred

cudnn: Any = fused_attention_stablehlo  # without types
cudnn_forward_p: Any = cudnn._dot_product_attention_fwd_p_wrapper
cudnn_backward_p: Any = cudnn._dot_product_attention_bwd_p_wrapper
hlo_library: Any = Deferred("jaxlib._hlo")
splash: Any = Deferred("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel")


def splash_dq(*operands: Any, **options: Any) -> Any:
    """Returns the gradient of the queries."""
    return splash._splash_attention_bwd_dq(*operands, **options)


def splash_dkv(*operands: Any, **options: Any) -> Any:
    """Returns the gradients of the queries in parts, if one kernel makes both, of the keys and of the values."""
    return splash._splash_attention_bwd_dkv(*operands, **options)


def residuals_of(pull_back: Any) -> list[Any]:
    """Returns what a function of `jax.vjp` holds for the derivative by each argument: a list, to change in place."""
    return pull_back.args_res


def taking_packed(compiled: Any) -> Any:
    """Returns a compiled program that takes arrays of less than a byte a number. `jax.jit` compares no layouts, and
    calls the same executable."""
    executable = compiled._executable
    executable._xla_in_layouts = [
        None if getattr(layout, "sub_byte_element_size_in_bits", 0) else layout for layout in executable._xla_in_layouts
    ]
    return compiled
