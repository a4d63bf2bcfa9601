"""`meshloom tune`: the space checked, then searched in a run directory that Hydra makes."""

import argparse
import logging
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import MISTAKE
from meshloom.compiler.core.format import counted
from meshloom.compiler.declare.compose import Request
from meshloom.compiler.declare.model_choice import chosen_model
from meshloom.compiler.declare.problems import MISTAKES, as_config_error

from ..core.exclusive import only_run_in
from ..processes.devices import plan_without_devices
from ..processes.distributed import Processes
from ..processes.process_log import process_log, say
from ..rundir.run_dir import as_typed, check_run_dir
from ..rundir.run_record import link_latest
from ..tune.search import compare_targets, search_into
from ..tune.variants import find_space
from .hydra_app import run_hydra_app, show_mistake

LOG = logging.getLogger("meshloom")


def tune_command(request: Request, flags: argparse.Namespace) -> int:
    """Searches into the run directory. Raises ConfigError for mistakes that are found before it is there."""
    space, exit_codes = find_space(request), [MISTAKE]
    plan_without_devices(space.spec.target)
    check_run_dir(request)
    console = Console(off_terminal_width=200)

    def run(run_dir: Path, model: str) -> int:
        spec = space.spec
        where = ", ".join(spec.tune.targets) or spec.target.name
        say(console, f"meshloom tune: {model} on {where}, {counted(spec.global_batch_size, 'sequence')} of "
            f"{counted(spec.sequence_length, 'token')}")  # fmt: skip
        try:
            if spec.tune.targets:
                compare_targets(space, request, run_dir, model, console)
            else:
                search_into(space, run_dir, model, console)
        except MISTAKES as error:
            LOG.error(error)
            return show_mistake(as_config_error(error))
        return 0

    def task(composed: DictConfig) -> None:
        run_dir = as_typed(Path(HydraConfig.get().runtime.output_dir))
        model = chosen_model(composed, HydraConfig.get()) or space.spec.model.family
        with only_run_in(run_dir), process_log(run_dir, Processes()):
            link_latest(run_dir)
            exit_codes[0] = run(run_dir, model)

    run_hydra_app(request, flags, task)
    return exit_codes[0]
