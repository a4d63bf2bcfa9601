"""Models: pure pieces over parameters with logical axes. `build_model(config)` is the only door."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from .contract import IGNORED_TARGET, Context, LogicalAxes, Model, Params, Piece, Stack, build_piece, is_logical_axes
from .decoder import DecoderConfig, build_decoder
from .linear_stack import LinearStackConfig, build_linear_stack

ModelConfig = Annotated[DecoderConfig | LinearStackConfig, Field(discriminator="family")]
BUILDERS: dict[str, Callable[[Any], Model]] = {"decoder": build_decoder, "linear_stack": build_linear_stack}

# The axes that rules may name for any model, whether or not the model at hand has them (docs/sharding.md).
LOGICAL_AXES = (
    "batch", "length", "embed", "mlp", "heads", "kv_heads", "head_dim", "vocab", "layers", "experts",
)  # fmt: skip


def build_model(config: DecoderConfig | LinearStackConfig) -> Model:
    """The pieces of the model that `config` describes; allocates nothing."""
    return BUILDERS[config.family](config)


__all__ = [
    "IGNORED_TARGET", "LOGICAL_AXES", "Context", "DecoderConfig", "LinearStackConfig", "LogicalAxes", "Model",
    "ModelConfig", "Params", "Piece", "Stack", "build_model", "build_piece", "is_logical_axes",
]  # fmt: skip
