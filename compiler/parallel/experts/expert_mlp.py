"""The MLP of each expert, on rows that are sorted by expert, with the weight of each row's choice."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.models.parts import added, gated

from ...sharding.arrays import EXPERT_GATE, EXPERT_INPUT, EXPERT_UP
from ..remat import marked
from .dispatch import RunExperts
from .grouped_matmul import of_group

# Multiplies rows with several matrices. A matrix may be a GatheredWeight.
Multiply = Callable[[Array, tuple[Any, ...]], tuple[Array, ...]]


def experts_mlp(
    matrices: tuple[Any, Any, Any],
    biases: Sequence[Array],
    activation: str,
    multipliers: Callable[[Array | None], tuple[Multiply, Multiply]],
) -> RunExperts:
    """Returns the function that runs the experts of a device on rows. matrices: gate, up and down of each. multipliers:
    gives, for the sizes of the groups of rows, what `weighted_mlp` multiplies with."""

    def run(x: Array, sizes: Array | None, weights: Array) -> Array:
        if sizes is None:
            of_rows = [each[:, None] for each in biases] or [None] * 3
        else:
            of_rows = _biases_of_rows(biases, sizes, x.shape[0])
        return weighted_mlp(x, weights, matrices, of_rows, multipliers(sizes), activation)

    return run


def _biases_of_rows(biases: Sequence[Array], sizes_X: Array, num_rows: int) -> list[Array | None]:
    """Returns the biases (R, M) of rows that are sorted by expert, of biases (X, M); zeros for rows of no expert; three
    times None if there are no biases."""
    return [of_group(each, sizes_X, num_rows) for each in biases] or [None, None, None]


def weighted_mlp(
    x: Array,
    weights: Array,
    matrices: tuple[Any, Any, Any],
    biases: Sequence[Array | None],
    multiply: tuple[Multiply, Multiply],
    activation: str,
) -> Array:
    """Returns what experts make of rows, times the weights of the rows. biases: of the rows. multiply: rows with the
    first matrices of their expert, and with its last one.

    The product with the weight is one elementwise step with the activation, which is computed again in the backward
    pass: what would be saved of it is in float32.
    """
    x = marked(EXPERT_INPUT, x)
    products = zip((EXPERT_GATE, EXPERT_UP), multiply[0](x, matrices[:2]), biases[:2], strict=True)
    gate, up = (marked(name, added(product, bias)) for name, product, bias in products)

    @partial(jax.checkpoint, prevent_cse=False)
    def weighted(gate: Array, up: Array, weights: Array) -> Array:
        hidden: Array = gated(activation, gate, up)
        return (hidden.astype(jnp.float32) * weights[..., None]).astype(hidden.dtype)

    (y,) = multiply[1](weighted(gate, up, weights), matrices[2:])
    bias = biases[2]
    return y if bias is None else (y + weights[..., None] * bias).astype(y.dtype)
