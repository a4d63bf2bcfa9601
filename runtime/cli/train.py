"""Runs `meshloom train` here, and `meshloom launch` on every host of a target.

Training checks the declaration in all processes, then runs in a directory that Hydra makes. A launch checks it here,
then an engine starts the same run on the hosts.
"""

import argparse
import logging
from dataclasses import replace
from pathlib import Path

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import MISTAKE, all_of
from meshloom.compiler.core.user_code import allowed_modules
from meshloom.compiler.core.visible import write_problems
from meshloom.compiler.declare.application import HydraJob, run_application
from meshloom.compiler.declare.choices import model_of
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.problems import MISTAKES
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.spec.target_spec import LocalTarget

from ..core.failures import is_of_one_process
from ..core.garbage import collect_often
from ..launch.local import run_launch
from ..launch.plan import plan_launch
from ..processes import distributed
from ..processes.agreement import check_same_data
from ..processes.devices import plan_without_devices
from ..processes.process_log import process_log
from ..rundir.folders import read_run
from ..rundir.run_dir import as_typed, check_run_dir, in_shared_run_dir
from ..train.display import warnings_of_demo_data
from ..train.metrics import process_began
from ..train.train import Job, prepare, run_training
from .in_directory import run_together, show_once
from .results import LaunchResult

LOG = logging.getLogger("meshloom")


def train_command(request: Request, flags: argparse.Namespace) -> int:
    """Trains, and returns the exit code."""
    return run_together(lambda: _train_together(request, flags))


def _train_together(request: Request, flags: argparse.Namespace) -> int:
    declared: Job | distributed.Disagreement
    try:
        declared = distributed.together("declaration", lambda: read_spec(request, then=prepare))
        check_same_data(declared.data.identity, distributed.current())
    except distributed.Disagreement as error:  # it is written to the log of each process
        declared = error
    processes, exit_codes = distributed.current(), [MISTAKE]
    if processes.count == 1:
        check_run_dir(request)

    def run(shown: Path, hydra_job: HydraJob) -> int:
        try:
            if isinstance(declared, distributed.Disagreement):
                raise declared
            console = Console(is_quiet=not processes.is_first)
            job, words, began = replace(declared, request=request), request.overrides, process_began()
            if job.plan.spec.profile.steps:  # the profile shows the prediction by this name
                job = replace(job, model=hydra_job.model())
            collect_often()
            return run_training(job, shown, overrides=words, console=console, processes=processes, began=began)
        except MISTAKES as error:  # Hydra would print a line of its own about it
            LOG.error(error, exc_info=isinstance(error, OSError))
            if is_of_one_process(error) and processes.count > 1:
                distributed.crash(error, shown)
            return show_once(error)
        except BaseException as error:
            LOG.error("crashed", exc_info=True)
            distributed.crash(error, shown)
            raise

    def task(hydra_job: HydraJob) -> None:
        run_dir, shown = hydra_job.directory, as_typed(hydra_job.directory)
        try:
            with process_log(run_dir, processes):
                exit_codes[0] = run(shown, hydra_job)
            if flags.json and processes.is_first:
                flags.result = read_run(run_dir).as_json(shown)
        except OSError as error:  # of the log itself
            distributed.crash(error, shown)
            exit_codes[0] = show_once(error)

    run_application(in_shared_run_dir(request, processes), flags, task)
    return exit_codes[0]


def launch_command(request: Request, flags: argparse.Namespace) -> int:
    """Starts the run, or prints the commands that would. Raises ConfigError if the hosts would refuse the
    declaration."""

    def checked(spec: RunSpec) -> RunSpec:
        all_of(lambda: plan_launch(spec, request, label="run", allowed=allowed_modules()), lambda: _check_plan(spec))
        return spec

    spec = read_spec(request, then=checked)
    model, _, _ = (model_of(request) or spec.model.family).partition(" (")
    label = spec.run.name or f"{model}-{spec.target.name}"
    plan = plan_launch(spec, request, label=label, allowed=allowed_modules())
    exit_code = run_launch(spec.launch, spec.distributed, plan)
    result = LaunchResult(
        name=plan.name, engine=spec.launch.engine, hosts=str(plan.hosts), run_dir=plan.run_dir, command=plan.command()
    )
    flags.result = result.model_dump(mode="json")
    return exit_code


def _check_plan(spec: RunSpec) -> None:
    """Plans the run, unless only its hosts have its devices. Prints warnings about its data; the hosts print others."""
    if not isinstance(spec.target, LocalTarget):
        plan_without_devices(spec.target)
        for warning in warnings_of_demo_data(plan_run(spec)):
            write_problems(warning.as_warning())
