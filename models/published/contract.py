"""The tensors of published checkpoints, and where each lies among our parameters. Pure: it opens no file.

A checkpoint as `transformers` writes it has one tensor for each matrix of each layer, named after the module that holds
it; ours stacks the layers. Each family has its table in a file of its own, used to read and to write. Tensors of one
kind and shape have one layout: the same functions.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclass(frozen=True)
class Slot:
    """The place of a tensor, or of a part of it, among our parameters.

    path: of the parameter, "layers/attention/query_EHD". index: of its leading dimensions: (layer,) or (layer, expert);
    () for the parameters of the embedding and of the head.
    """

    path: str
    index: tuple[int, ...]


@dataclass(frozen=True)
class PublishedTensor:
    """One tensor of published files.

    name, shape: as in the file. slots: one, or several where the file joins parameters (GPT-2's c_attn). to_ours: takes
    the array of the file, returns one array for each slot; to_published: its inverse, of a tuple of arrays. Both can be
    jitted and also take NumPy arrays; tensors of the same kind and shape share the same two functions.
    """

    name: str
    shape: tuple[int, ...]
    slots: tuple[Slot, ...]
    to_ours: Callable[[Array], tuple[Array, ...]]
    to_published: Callable[[tuple[Array, ...]], Array]


@dataclass(frozen=True)
class NamedTensors:
    """The tensors of a model under the names of a folder, and its other ones. harmless: buffers that are computed from
    config.json. left_out: of parts that the model here does not have. copies: what has to be the same as another
    tensor, which is read; may_differ: whether a family has a head apart from its table. What none of these names is
    foreign to the model."""

    tensors: tuple[PublishedTensor, ...]
    harmless: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    copies: Mapping[str, str] = field(default_factory=dict)
    may_differ: bool = False

    @property
    def unread(self) -> frozenset[str]:
        """Returns the names of the folder's tensors that are not needed, whatever they hold."""
        return self.harmless | self.left_out


@dataclass(frozen=True, order=True)
class Mistake:
    """One thing that cannot be read or written. key: of config.json, or of our config. fix: what to do."""

    key: str
    what: str
    fix: str


class NotUnderstood(ValueError):
    """Raised for a published config that does not describe one of our models, or the reverse; lists every mistake."""

    def __init__(self, mistakes: Iterable[Mistake]):
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(f"{m.key}: {m.what}; {m.fix}" for m in self.mistakes))


class UnknownFamily(NotUnderstood):
    """Raised for a model of a family that is not registered."""


@dataclass(frozen=True)
class Layout:
    """How a tensor of a file becomes arrays of ours, and back. shape: in the file."""

    shape: tuple[int, ...]
    to_ours: Callable[[Array], tuple[Array, ...]]
    to_published: Callable[[tuple[Array, ...]], Array]


SOME = "any value but null"
Values = Mapping[str, Any]  # of a config.json, or of our config
Fits = Mapping[str, tuple[Any, ...]]  # values of our keys with which a config can be written
Shapes = tuple[tuple[int, ...], ...]  # of our parameters, without the dimensions that a slot's index picks


@dataclass(frozen=True)
class Row:
    """One row of a family's table.

    name: of the tensors in files, with {layer} and {expert}. paths: of our parameters, below their layer if the name
    has {layer}. layout: takes their shapes. A row of a parameter that a model does not have makes no tensor.
    """

    name: str
    paths: tuple[str, ...]
    layout: Callable[[Shapes], Layout]


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
            (outputs, inputs), lambda x: (x.T.reshape(shape),), lambda ours: ours[0].reshape(inputs, outputs).T
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
def joined(shapes: Shapes) -> Layout:
    """Returns the layout of torch's Linear, (outputs, inputs), with the outputs of several parameters one after the
    other."""
    plain = columns()(shapes)
    return Layout(plain.shape[::-1], lambda x: plain.to_ours(x.T), lambda ours: plain.to_published(ours).T)


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
