"""Layouts of tensors in published files: the same functions for all tensors of one kind and shape."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from .contract import Layout, Shapes


@cache
def same(shapes: Shapes) -> Layout:
    """Returns the layout of a tensor that lies in the file as it does here."""
    (shape,) = shapes
    return Layout(shape, lambda x: (x,), lambda ours: ours[0])


@cache
def flat(shapes: Shapes) -> Layout:
    """Returns the layout of a vector that has several dimensions here: a bias by heads."""
    (shape,) = shapes
    return Layout((math.prod(shape),), lambda x: (x.reshape(shape),), lambda ours: ours[0].reshape(-1))


@cache
def linear(num_inputs: int = 1) -> Callable[[Shapes], Layout]:
    """Returns the layouts of torch's Linear, (outputs, inputs). num_inputs: how many of our first dimensions are
    inputs: 2 for (heads, head_dim, embed)."""

    @cache
    def layout(shapes: Shapes) -> Layout:
        (shape,) = shapes
        inputs, outputs = math.prod(shape[:num_inputs]), math.prod(shape[num_inputs:])
        return Layout(
            (outputs, inputs),
            lambda x: (x.T.reshape(shape),),
            lambda ours: ours[0].reshape(inputs, outputs).T,
        )

    return layout


@cache
def columns(num_inputs: int = 1) -> Callable[[Shapes], Layout]:
    """Returns the layouts of GPT-2's Conv1D, (inputs, outputs), with the outputs of several parameters side by side.
    num_inputs: 0 for their biases."""

    @cache
    def layout(shapes: Shapes) -> Layout:
        outer = (math.prod(shapes[0][:num_inputs]),) if num_inputs else ()
        widths = [math.prod(shape[num_inputs:]) for shape in shapes]
        ends = [sum(widths[: i + 1]) for i in range(len(widths))]

        def to_ours(x: Array) -> tuple[Array, ...]:
            parts = (x[..., end - width : end] for width, end in zip(widths, ends, strict=True))
            return tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))

        def to_published(ours: tuple[Array, ...]) -> Array:
            return _joined([part.reshape(*outer, -1) for part in ours])

        return Layout((*outer, ends[-1]), to_ours, to_published)

    return layout


@cache
def interleaved(shapes: Shapes) -> Layout:
    """Returns the layout of two parameters whose last dimensions take turns in the file: one of each, and so on."""
    (*outer, width), _ = shapes

    def to_published(ours: tuple[Array, ...]) -> Array:
        apart = [x[..., None] for x in ours]
        return _joined(apart).reshape(*outer, 2 * width)

    return Layout((*outer, 2 * width), lambda x: (x[..., ::2], x[..., 1::2]), to_published)


@cache
def neighbours_turned(num_turned: int) -> Callable[[Shapes], Layout]:
    """Returns the layouts of a Linear whose last outputs, of each head, are turned by rotary positions in pairs of
    neighbours (2i, 2i + 1); we turn i with i + half. num_turned: how many of our last dimension are turned."""

    @cache
    def layout(shapes: Shapes) -> Layout:
        (shape,) = shapes
        plain = linear()(shapes)
        kept = shape[-1] - num_turned

        def to_ours(x: Array) -> tuple[Array, ...]:
            (ours,) = plain.to_ours(x)
            pairs = ours[..., kept:].reshape(*shape[:-1], num_turned // 2, 2)
            return (_joined([ours[..., :kept], pairs[..., 0], pairs[..., 1]]),)

        def to_published(ours: tuple[Array, ...]) -> Array:
            halves = ours[0][..., kept:].reshape(*shape[:-1], 2, num_turned // 2)
            turned = halves.swapaxes(-1, -2).reshape(*shape[:-1], num_turned)
            return plain.to_published((_joined([ours[0][..., :kept], turned]),))

        return Layout(plain.shape, to_ours, to_published)

    return layout


def _joined(parts: list[Any]) -> Any:
    library = np if all(isinstance(part, np.ndarray) for part in parts) else jnp
    return parts[0] if len(parts) == 1 else library.concatenate(parts, axis=-1)
