"""Packages that only some sources and tokenizers need."""

import importlib
from typing import Any

from meshloom.compiler.core.errors import ConfigError, Problem


def require(module: str, where: str, what_for: str) -> Any:
    """Returns an optional dependency. Raises ConfigError with the line that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise
        what = f"{what_for} needs the package {error.name}, which is not installed"
        raise ConfigError([Problem(where, what, "pip install 'meshloom[data]'")]) from error
