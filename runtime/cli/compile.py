"""Runs `meshloom compile`: compiles ahead of time, without the declared devices."""

import argparse
from pathlib import Path

from meshloom.compiler.core.console import Console
from meshloom.compiler.declare.compose import Request, read_spec

from ..compile.compile_command import compile_step, prepare_compile
from .in_directory import run_in_directory


def compile_command(request: Request, flags: argparse.Namespace) -> int:
    """Compiles into a run directory that Hydra makes. Raises ConfigError for mistakes that are found before."""
    job = read_spec(request, then=prepare_compile)

    def run(run_dir: Path, model: str | None) -> int:
        compiled = compile_step(job, run_dir, request=request, model=model, console=Console())
        flags.result = compiled.report.model_dump(mode="json")
        return compiled.refusal

    return run_in_directory(request, flags, run)
