"""The tensors of published checkpoints, and where each lies among our parameters. Pure: it opens no file.

A checkpoint as `transformers` writes it has one tensor for each matrix of each layer, named after the module that holds
it; ours stacks the layers. Each family has its table in a file of its own, used to read and to write.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax import Array

from ..config import ModelConfig

if TYPE_CHECKING:
    from .config_json import Reader


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
Values = Mapping[str, Any]  # of a config.json
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


@dataclass(frozen=True)
class Family:
    """A family of published models.

    architecture, model_type: as config.json names it. rows: the table for one of our configs. read: a config.json ->
    keys of conf `model`; write: the reverse. fits: the values of our keys with which a config can be written as this
    family, SOME for any but null; keys that it does not name are free. check: what else keeps a config from it.
    prefix: the beginning of names that some files leave out; before: what some files have before it. unused: patterns
    of names, after that, of tensors that some files hold and that no parameter needs; {num_layers} is ours.
    """

    architecture: str
    model_type: str
    rows: Callable[[Any], tuple[Row, ...]]
    read: Callable[["Reader"], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]
    fits: Mapping[str, tuple[Any, ...]]
    check: Callable[[Any], tuple[Mistake, ...]] = lambda config: ()
    prefix: str = "model."
    before: str = ""
    unused: tuple[str, ...] = ()

    def differs(self, config: ModelConfig) -> tuple[Mistake, ...]:
        """Returns the keys by which a config cannot be written as this family."""
        mistakes = []
        for key, allowed in self.fits.items():
            value = getattr(config, key, None)
            if value not in allowed and not (SOME in allowed and value is not None):
                expected = " or ".join("a value" if one is SOME else str(one) for one in allowed)
                mistakes.append(Mistake(f"model.{key}", f"is {value}", f"{self.architecture} has {expected}"))
        return tuple(mistakes) or self.check(config)
