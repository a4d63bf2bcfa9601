"""Models: pure pieces over parameters with logical axes. A `ModelConfig` is the only door: `config.build()`. The
families are in registry.py."""

from .contract import (
    IGNORED_TARGET,
    PADDING_TARGET,
    Aux,
    AuxOfTotals,
    Context,
    LogicalAxes,
    Measure,
    Model,
    ModelConfig,
    Params,
    Piece,
    Stack,
    UpdateRule,
    build_piece,
    is_logical_axes,
    split_aux,
    split_output,
)

# The axes that rules may name for any model, whether or not the model at hand has them (docs/sharding.md).
LOGICAL_AXES = (
    "batch", "length", "sequence_parallel_length", "embed", "mlp", "heads", "kv_heads", "head_dim", "vocab",
    "layers", "experts",
)  # fmt: skip


__all__ = [
    "IGNORED_TARGET", "LOGICAL_AXES", "PADDING_TARGET", "Aux", "AuxOfTotals", "Context", "LogicalAxes", "Measure",
    "Model", "ModelConfig", "Params", "Piece", "Stack", "UpdateRule", "build_piece", "is_logical_axes", "split_aux",
    "split_output",
]  # fmt: skip
