"""Runs a command in a run directory that Hydra makes, or in all processes of a run."""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path

from meshloom.compiler.core.errors import MISTAKE
from meshloom.compiler.declare.application import HydraJob, run_application
from meshloom.compiler.declare.compose import Request
from meshloom.compiler.declare.problems import MISTAKES, as_config_error

from ..core.failures import is_of_one_process
from ..processes import distributed
from ..processes.distributed import Processes
from ..processes.process_log import process_log
from ..rundir.run_dir import as_typed, check_run_dir
from .app import show_mistake

LOG = logging.getLogger("meshloom")


def run_in_directory(request: Request, flags: argparse.Namespace, run: Callable[[Path, str | None], int]) -> int:
    """Runs a task in the run directory that Hydra makes, with the log of a process. Returns the exit code.

    run: takes the directory and the name of the chosen model, and returns the exit code. Its mistakes are printed and
    logged here: Hydra would print a line of its own about them.
    """
    exit_codes = [MISTAKE]

    def task(job: HydraJob) -> None:
        run_dir, model = as_typed(job.directory), job.model()
        try:
            with process_log(run_dir, Processes()):
                try:
                    exit_codes[0] = run(run_dir, model)
                except MISTAKES as error:
                    LOG.error(error, exc_info=isinstance(error, OSError))
                    exit_codes[0] = show_mistake(as_config_error(error))
        except OSError as error:  # of the log itself
            exit_codes[0] = show_mistake(as_config_error(error))

    check_run_dir(request)
    run_application(request, flags, task)
    return exit_codes[0]


def run_together(run: Callable[[], int]) -> int:
    """Runs a task in every process. Returns the exit code, the same in each: a mistake that one process finds ends
    all."""
    try:
        exit_code = run()
    except MISTAKES as error:
        if is_of_one_process(error):
            distributed.crash(as_config_error(error))
        exit_code = show_once(error)
    except BaseException as error:
        distributed.crash(error)
        raise
    distributed.leave()
    return exit_code


def show_once(error: Exception) -> int:
    """Prints the mistake in process 0 alone. Returns the exit code, in each process."""
    mistake = as_config_error(error)
    return show_mistake(mistake) if distributed.current().is_first else mistake.exit_code
