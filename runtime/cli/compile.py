"""`meshloom compile`: the declaration checked, then compiled in a run directory that Hydra makes."""

import argparse
import logging
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import MISTAKE
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.model_choice import chosen_model
from meshloom.compiler.declare.problems import MISTAKES, as_config_error

from ..compile.compile_command import compile_step, prepare_compile
from ..processes.distributed import Processes
from ..processes.process_log import process_log
from ..rundir.run_dir import as_typed, check_run_dir
from .hydra_app import run_hydra_app, show_mistake

LOG = logging.getLogger("meshloom")


def compile_command(request: Request, flags: argparse.Namespace) -> int:
    """Compiles into the run directory. Raises ConfigError for mistakes that are found before it is there."""
    job, exit_codes = read_spec(request, then=prepare_compile), [MISTAKE]
    check_run_dir(request)

    def run(run_dir: Path, model: str | None) -> int:
        try:
            return compile_step(job, run_dir, request=request, model=model, console=Console()).refusal
        except MISTAKES as error:  # Hydra would print a line of its own about it
            LOG.error(error, exc_info=isinstance(error, OSError))
            return show_mistake(as_config_error(error))

    def task(composed: DictConfig) -> None:
        run_dir = as_typed(Path(HydraConfig.get().runtime.output_dir))
        model = chosen_model(composed, HydraConfig.get())
        try:
            with process_log(run_dir, Processes()):
                exit_codes[0] = run(run_dir, model)
        except OSError as error:  # of the log itself
            exit_codes[0] = show_mistake(as_config_error(error))

    run_hydra_app(request, flags, task)
    return exit_codes[0]
