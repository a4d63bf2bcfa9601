"""Runs `meshloom export`: writes the weights of a run as others read them."""

import argparse

from meshloom.compiler.core.console import Console
from meshloom.compiler.declare.compose import Request, read_spec

from ..weights.export import prepare_export, run_export


def export_command(request: Request, flags: argparse.Namespace) -> int:  # noqa: ARG001 (as all commands)
    """Writes the folder. Raises ConfigError for a mistake, before anything is written."""
    run_export(read_spec(request, then=prepare_export), Console())
    return 0
