"""Chooses the next token of each sequence from logits: greedily, or by chance with a temperature, top-k and top-p.

A choice is a function of the seed, the number of the sequence and the number of its token alone: not of the batch that
the sequence is in, nor of the mesh.

Shapes: B sequences, V vocabulary.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

_TYPES = (np.uint32, np.float32, np.int32, np.float32, np.int32)


@register_dataclass
@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, as values that one compiled program takes.

    seed: uint32. temperature: 0 takes the likeliest token. top_k: how many of the likeliest tokens are eligible; the
    size of the vocabulary for all. top_p: of these, the fewest whose probabilities reach it; 1 for all. num_tokens: the
    tokens that the tokenizer has: a model's vocabulary may be larger.
    """

    seed: Array
    temperature: Array
    top_k: Array
    top_p: Array
    num_tokens: Array

    @classmethod
    def of(
        cls, *, seed: int, temperature: float, top_k: int | None, top_p: float | None, num_tokens: int
    ) -> "Sampling":
        """Returns the values as NumPy scalars. None: nothing is cut."""
        top_k = num_tokens if top_k is None else min(top_k, num_tokens)
        values = (seed, temperature, top_k, 1.0 if top_p is None else top_p, num_tokens)
        return cls(*(dtype(value) for dtype, value in zip(_TYPES, values, strict=True)))  # type: ignore[arg-type]

    @classmethod
    def abstract(cls) -> "Sampling":
        """Returns the shapes and types of the values."""
        return cls(*(jax.ShapeDtypeStruct((), dtype) for dtype in _TYPES))  # type: ignore[arg-type]


def sample(logits_BV: Array, sampling: Sampling, sequences_B: Array, count: Array) -> Array:
    """Returns the next token of each sequence, int32 (B,). sequences_B: the number of each sequence. count: the tokens
    that were generated before."""
    logits_BV = jnp.where(
        jnp.arange(logits_BV.shape[-1]) < sampling.num_tokens, logits_BV.astype(jnp.float32), -jnp.inf
    )

    def by_chance(logits_BV: Array) -> Array:
        scaled_BV = logits_BV / jnp.maximum(sampling.temperature, jnp.finfo(jnp.float32).tiny)
        is_cut = (sampling.top_k < sampling.num_tokens) | (sampling.top_p < 1)
        eligible_BV = jax.lax.cond(is_cut, lambda x: cut(x, sampling.top_k, sampling.top_p), lambda x: x, scaled_BV)
        return jax.vmap(jax.random.categorical)(keys_of(sampling.seed, sequences_B, count), eligible_BV)

    def greedily(logits_BV: Array) -> Array:
        return jnp.argmax(logits_BV, axis=-1)

    return jax.lax.cond(sampling.temperature > 0, by_chance, greedily, logits_BV).astype(jnp.int32)


def keys_of(seed: Array, sequences_B: Array, count: Array) -> Array:
    """Returns the key of each sequence's token of this number."""
    key = jax.random.key(seed)
    return jax.vmap(lambda number: jax.random.fold_in(jax.random.fold_in(key, number), count))(sequences_B)


def cut(logits_BV: Array, top_k: Array, top_p: Array) -> Array:
    """Returns the logits with -infinity for tokens that are not eligible. The likeliest one always is; of tokens that
    are equally likely the first ones are."""
    order_BV = jnp.argsort(-logits_BV, axis=-1, stable=True)
    ordered_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    is_of_k = jnp.arange(logits_BV.shape[-1]) < top_k
    probabilities_BV = jax.nn.softmax(jnp.where(is_of_k, ordered_BV, -jnp.inf), axis=-1)
    before_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV
    is_eligible_BV = is_of_k & (before_BV < top_p)
    rows_B1 = jnp.arange(logits_BV.shape[0])[:, None]
    is_eligible_BV = jnp.zeros_like(is_eligible_BV).at[rows_B1, order_BV].set(is_eligible_BV)
    return jnp.where(is_eligible_BV, logits_BV, -jnp.inf)
