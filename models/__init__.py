"""Models: pure pieces over parameters with logical axes. A `ModelConfig` is the only door: `config.build()`. The
families are in family_configs.py."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import Mask
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
        is_counted,
        is_logical_axes,
        run_at_once,
        split_aux,
        split_output,
    )

# The axes that rules may name for any model, whether or not the model at hand has them (docs/sharding.md).
LOGICAL_AXES = (
    "batch", "length", "sequence_parallel_length", "embed", "mlp", "heads", "kv_heads", "head_dim", "vocab",
    "layers", "experts",
)  # fmt: skip


__all__ = [
    "IGNORED_TARGET", "LOGICAL_AXES", "PADDING_TARGET", "Aux", "AuxOfTotals", "Context", "LogicalAxes", "Mask",
    "Measure", "Model", "ModelConfig", "Params", "Piece", "Stack", "UpdateRule", "build_piece", "is_counted",
    "is_logical_axes", "run_at_once", "split_aux", "split_output",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports the module of a name when it is used: a declaration needs neither JAX nor Flax, which contract.py
    imports, and a program is read without NumPy, which config.py imports."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(".config" if name == "ModelConfig" else ".contract", __name__)
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
