"""Runs `meshloom tune`: checks the space, then searches it in a run directory that Hydra makes."""

import argparse
from pathlib import Path

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.format import counted
from meshloom.compiler.declare.compose import Request

from ..core.exclusive import only_run_in
from ..processes.devices import plan_without_devices
from ..processes.process_log import say
from ..rundir.run_record import link_latest
from ..tune.search import compare_targets, search_into
from ..tune.variants import find_space
from .hydra_app import run_in_directory


def tune_command(request: Request, flags: argparse.Namespace) -> int:
    """Searches into the run directory. Raises ConfigError for mistakes that are found before it is made."""
    space = find_space(request)
    plan_without_devices(space.spec.target)
    console = Console(off_terminal_width=200)

    def run(run_dir: Path, chosen: str | None) -> int:
        spec, model = space.spec, chosen or space.spec.model.family
        where = ", ".join(spec.tune.targets) or spec.target.name
        with only_run_in(run_dir):
            link_latest(run_dir)
            say(console, f"meshloom tune: {model} on {where}, {counted(spec.global_batch_size, 'sequence')} of "
                f"{counted(spec.sequence_length, 'token')}")  # fmt: skip
            if spec.tune.targets:
                compare_targets(space, request, run_dir, model, console)
            else:
                search_into(space, run_dir, model, console)
        return 0

    return run_in_directory(request, flags, run)
