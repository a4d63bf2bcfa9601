"""One layer forward and one layer backward, as two functions that a loop calls where it wants.

`jax.vjp` returns what the backward pass needs as a pytree. Its residuals that are arguments (weights, what all layers
share, the number of the layer) are left out, and restored from the arguments of the backward pass: so gathered weights
are never saved.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from ..jax_private import residuals_of
from ..parallel.weights import Weights
from .schedule import StackFunctions


@dataclass(frozen=True)
class LayerPass:
    """A layer as its forward and its backward pass. layer: a function of (whole weights, shared values, number of the
    layer, x), the first two as lists."""

    layer: Callable[[list[Array], list[Array], Array, Any], tuple[Any, Any]]

    def forward(self, whole: list[Array], shared: list[Array], index: Array, x: Any) -> tuple[tuple[Any, Any], Any]:
        """Returns (x, auxiliary outputs), and a pytree whose leaves are what the backward pass needs."""
        pull_back: Any
        made, pull_back = jax.vjp(self.layer, whole, shared, index, x)
        residuals = residuals_of(pull_back)
        residuals[:3] = map(_left_out, residuals[:3])
        return made, pull_back

    def backward(
        self, whole: list[Array], shared: list[Array], index: Array, pull_back: Any, cotangents: tuple[Any, Any]
    ) -> tuple[list[Array], Any]:
        """Returns the gradients of the weights, and of x. pull_back: what `forward` returned. cotangents: of x and of
        the auxiliary outputs."""
        residuals = residuals_of(pull_back)
        residuals[:3] = map(_put_back, residuals[:3], (whole, shared, index))
        dw, _, _, dx = pull_back(cotangents)
        return dw, dx


def layer_pass(stack: StackFunctions, weights: Weights, shared: Any) -> LayerPass:
    """Returns the passes of a stack's layers. Under `jax.checkpoint` they save what the stack's policy selects."""
    tree, tree_of_shared = jax.tree.structure(weights.working), jax.tree.structure(shared)
    layouts = jax.tree.leaves(weights.layouts)

    def flat(whole: list[Array], shared: list[Array], index: Array, x: Any) -> tuple[Any, Any]:
        """Runs a layer with lists instead of trees: then the residuals of its derivative are tuples, in the same
        order."""
        trained = [w if one.is_trained else jax.lax.stop_gradient(w) for w, one in zip(whole, layouts, strict=True)]
        params, common = jax.tree.unflatten(tree, trained), jax.tree.unflatten(tree_of_shared, shared)
        return stack.layer(params, common, index, x)

    return LayerPass(jax.checkpoint(flat, policy=stack.policy, prevent_cse=False))


def _left_out(residuals: Any) -> Any:
    """Returns residuals with None for those that are arguments; residuals that the derivative does not need stay as
    they are."""
    return jax.tree.map(lambda _: None, residuals)


def _put_back(residuals: Any, values: Any) -> Any:
    """Undoes `_left_out`. values: an argument, an array or a list of them; the residuals of a list are a tuple."""
    if isinstance(values, list):
        return tuple(_put_back(r, value) for r, value in zip(residuals, values, strict=True))
    return values if residuals is None else residuals
