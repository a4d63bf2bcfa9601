"""Published models: the names of their tensors and their config.json, both ways; a family is a file (docs/weights.md),
or is registered by another package (docs/extend.md). Pure: nothing here opens a file."""

from .contract import Mistake, NamedTensors, NotUnderstood, PublishedTensor, Row, Slot, UnknownFamily, linear, same
from .family import Family, choice, flag, key, only, ours
from .registry import FAMILIES, family_of, model_type_of, read_config, register, tensors, tensors_in, write_config

__all__ = [
    "FAMILIES", "Family", "Mistake", "NamedTensors", "NotUnderstood", "PublishedTensor", "Row", "Slot", "UnknownFamily",
    "choice", "family_of", "flag", "key", "linear", "model_type_of", "only", "ours", "read_config", "register", "same",
    "tensors", "tensors_in", "write_config",
]  # fmt: skip
