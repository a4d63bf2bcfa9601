"""Wrappers of optax transformations: state in another type, or one layer at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core.config_types import FloatType


def stored_in(moments: optax.GradientTransformation, dtype: FloatType) -> optax.GradientTransformation:
    """Returns the transformation with its state stored in `dtype` between steps and computed in float32."""

    def cast(state: Any, dtype: Any) -> Any:
        is_moment = lambda x: jnp.ndim(x) > 0 and jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
        return jax.tree.map(lambda x: x.astype(dtype) if is_moment(x) else x, state)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = moments.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(moments.init(params), dtype), update)


def each_layer(whole: optax.GradientTransformation, kinds: Any) -> optax.GradientTransformation:
    """Returns the transformation applied to each layer of a stack separately, so that its maxima and means are per
    layer. Its state is split by component of the model."""
    stacked = {piece: jax.tree.leaves(tree)[0].is_in_stack for piece, tree in kinds.items()}

    def run(piece: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.vmap(function) if stacked[piece] else function

    def init(params: Any) -> Any:
        return {piece: run(piece, whole.init)(part) for piece, part in params.items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        assert params is not None
        done = {p: run(p, whole.update)(part, state[p], params[p]) for p, part in updates.items()}
        return {p: updates for p, (updates, _) in done.items()}, {p: state for p, (_, state) in done.items()}

    return optax.GradientTransformation(init, update)
