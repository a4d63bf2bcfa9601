"""Runs `meshloom evaluate RUN|DIR`: the loss of weights on any data, on any mesh."""

import argparse
import json

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.visible import write_out
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.problems import MISTAKES, as_config_error

from ..core.failures import is_of_one_process
from ..inference.evaluate import evaluate_weights, prepare_evaluation
from ..processes import distributed
from .app import show_mistake


def evaluate_command(request: Request, flags: argparse.Namespace) -> int:
    """Evaluates, and returns the exit code, the same in every process: a mistake that one process finds ends all."""
    try:
        exit_code = _evaluate_together(request, flags)
    except MISTAKES as error:
        mistake = as_config_error(error)
        if is_of_one_process(error):
            distributed.crash(mistake)
        exit_code = show_mistake(mistake) if distributed.current().is_first else mistake.exit_code
    except BaseException as error:
        distributed.crash(error)
        raise
    distributed.leave()
    return exit_code


def _evaluate_together(request: Request, flags: argparse.Namespace) -> int:
    job = distributed.together("declaration", lambda: read_spec(request, then=prepare_evaluation))
    console = Console(is_quiet=flags.json or not job.session.processes.is_first)
    evaluation = evaluate_weights(job, console)
    if job.session.processes.is_first and flags.json:
        write_out(json.dumps(evaluation.json, indent=1))
    for line in evaluation.lines:
        console.wrapped(line)
    return 0
