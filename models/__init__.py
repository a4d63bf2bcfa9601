"""Models: pure pieces over parameters with logical axes. A `ModelConfig` is the only door: `config.build()`."""

from typing import Annotated

from pydantic import Field

from .config import ModelConfig
from .contract import (
    IGNORED_TARGET,
    Aux,
    Context,
    LogicalAxes,
    Model,
    Params,
    Piece,
    Stack,
    UpdateRule,
    build_piece,
    is_logical_axes,
    split_aux,
)
from .decoder import DecoderBase, DecoderConfig
from .linear_stack import LinearStackConfig
from .moe import MoeConfig

AnyModelConfig = Annotated[DecoderConfig | LinearStackConfig | MoeConfig, Field(discriminator="family")]

# The axes that rules may name for any model, whether or not the model at hand has them (docs/sharding.md).
LOGICAL_AXES = (
    "batch", "length", "sequence_parallel_length", "embed", "mlp", "heads", "kv_heads", "head_dim", "vocab",
    "layers", "experts",
)  # fmt: skip


__all__ = [
    "IGNORED_TARGET", "LOGICAL_AXES", "AnyModelConfig", "Aux", "Context", "DecoderBase", "DecoderConfig",
    "LinearStackConfig", "LogicalAxes", "Model", "ModelConfig", "MoeConfig", "Params", "Piece", "Stack", "UpdateRule",
    "build_piece", "is_logical_axes", "split_aux",
]  # fmt: skip
