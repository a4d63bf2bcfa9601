"""The families of models that a declaration names; a user's own is named by its import path."""

from .contract import ModelConfig
from .decoder import DecoderConfig
from .linear_stack import LinearStackConfig
from .moe import MoeConfig

MODELS: tuple[type[ModelConfig], ...] = (DecoderConfig, LinearStackConfig, MoeConfig)
