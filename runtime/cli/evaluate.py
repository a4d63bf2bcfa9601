"""Runs `meshloom evaluate RUN|DIR`: the loss of weights on any data, on any mesh."""

import argparse
import json

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.visible import write_out
from meshloom.compiler.declare.compose import Request, read_spec

from ..inference.evaluate import evaluate_weights, prepare_evaluation
from ..processes import distributed
from .in_directory import run_together


def evaluate_command(request: Request, flags: argparse.Namespace) -> int:
    """Evaluates, and returns the exit code."""

    def run() -> int:
        job = distributed.together("declaration", lambda: read_spec(request, then=prepare_evaluation))
        console = Console(is_quiet=flags.json or not job.session.processes.is_first)
        evaluation = evaluate_weights(job, console)
        if job.session.processes.is_first and flags.json:
            write_out(json.dumps(evaluation.json, indent=1))
        for line in evaluation.lines:
            console.wrapped(line)
        return 0

    return run_together(run)
