"""Published models: the names of their tensors and their config.json, both ways; a family is a file (docs/weights.md).
Pure: nothing here opens a file."""

from .contract import Mistake, NamedTensors, NotUnderstood, PublishedTensor, Slot
from .registry import FAMILIES, family_of, model_type_of, read_config, tensors, tensors_in, write_config

__all__ = [
    "FAMILIES", "Mistake", "NamedTensors", "NotUnderstood", "PublishedTensor", "Slot", "family_of", "model_type_of",
    "read_config", "tensors", "tensors_in", "write_config",
]  # fmt: skip
