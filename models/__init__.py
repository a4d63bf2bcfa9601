"""Models: pure pieces over parameters with logical axes. A `ModelConfig` is the only door: `config.build()`."""

from typing import Annotated

from pydantic import Field

from .config import ModelConfig
from .contract import (
    IGNORED_TARGET,
    PADDING_TARGET,
    Aux,
    AuxOfTotals,
    Context,
    LogicalAxes,
    Measure,
    Model,
    Params,
    Piece,
    Stack,
    UpdateRule,
    build_piece,
    is_logical_axes,
    split_aux,
    split_output,
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
    "IGNORED_TARGET", "LOGICAL_AXES", "PADDING_TARGET", "AnyModelConfig", "Aux", "AuxOfTotals", "Context",
    "DecoderBase", "DecoderConfig", "LinearStackConfig", "LogicalAxes", "Measure", "Model", "ModelConfig", "MoeConfig",
    "Params", "Piece", "Stack", "UpdateRule", "build_piece", "is_logical_axes", "split_aux", "split_output",
]  # fmt: skip
