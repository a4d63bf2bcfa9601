"""Arithmetic of a traced program, counted from its matmuls."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from meshloom.models import Context, Model

from ..config.spec import RunSpec
from .subprograms import subprograms


def model_flops_per_step(model: Model, spec: RunSpec) -> int:
    """FLOPs of forward and backward over a global batch, matmuls only, nothing computed twice counted twice.

    Backward is twice forward: a gradient for each of the two factors of a matmul. Attention counts the whole square of
    scores, as in PaLM's MFU (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), also where a mask hides half of it.
    """
    tokens_BT = jax.ShapeDtypeStruct((1, spec.sequence_length), jnp.int32)

    def forward_flops(apply: Any, params: Any, x: Any) -> tuple[int, Any]:
        def forward(params: Any, x: Any) -> Any:  # positions are traced too, so that no array of their length is made
            return apply(params, x, Context(jnp.arange(spec.sequence_length)[None], lambda _, x, *axes, **__: x))

        traced = jax.jit(forward).trace(params, x)
        return matmul_flops(traced.jaxpr.jaxpr), traced.out_info

    total, x_BTE = forward_flops(model.embed.apply, model.embed.abstract, tokens_BT)
    for stack in model.stacks:
        one_layer, x_BTE = forward_flops(stack.layer.apply, stack.layer.abstract, x_BTE)
        total += stack.num_layers * one_layer
    total += forward_flops(model.head.apply, model.head.abstract, x_BTE)[0]
    return 3 * total * spec.global_batch_size


def matmul_flops(jaxpr: Jaxpr) -> int:
    """FLOPs of the matmuls in a jaxpr: 2 per multiply and add; the body of a scan once per trip."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape  # type: ignore[attr-defined]
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[d] for d in contracted)  # type: ignore[attr-defined]
        inner = [matmul_flops(sub) for sub in subprograms(equation.params)]
        if equation.primitive.name == "cond":
            total += max(inner)
        else:
            total += equation.params.get("length", 1) * sum(inner) if equation.primitive.name == "scan" else sum(inner)
    return total
