"""The tensors of published checkpoints, and where each lies among our parameters. Pure: it opens no file.

A checkpoint as `transformers` writes it has one tensor for each matrix of each layer, named after the module that holds
it; ours stacks the layers. Each family has its table in a file of its own, used to read and to write.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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
