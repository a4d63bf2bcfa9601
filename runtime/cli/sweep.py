"""Runs many declarations: sweeps by `-m`, and the search of `meshloom tune`.

A sweep is checked, then Hydra's sweeper and launcher run its points, and a table shows them.
"""

import argparse
import os
import traceback
from dataclasses import replace
from pathlib import Path

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import counted
from meshloom.compiler.core.user_code import allowed_modules
from meshloom.compiler.declare.application import run_application
from meshloom.compiler.declare.compose import Request
from meshloom.compiler.declare.hydra_settings import SUBDIRECTORY, SWEEP_DIR
from meshloom.compiler.declare.overrides import in_quotes, overridden_key, override
from meshloom.compiler.declare.problems import MISTAKES
from meshloom.compiler.declare.sweep_request import read_sweep_request

from ..core.failures import RunFailed
from ..processes.devices import plan_without_devices
from ..processes.initialize import plan_start, process_index
from ..processes.process_log import announce
from ..rundir.folders import link_latest
from ..rundir.run_dir import only_run_in
from ..sweep.engine import Engine, launching, open_sweep
from ..sweep.pool import pool_settings
from ..sweep.read import read_sweep, sweep_as_json
from ..sweep.rows import POINT_NAME, SWEEP_COMMANDS, SweepCommand
from ..sweep.submitted import cluster_settings
from ..tune.search import compare_targets, search_into
from ..tune.variants import find_space
from .in_directory import run_in_directory

LAUNCHER_LOG = "launcher.log"


def run_sweep(name: str, request: Request, flags: argparse.Namespace) -> int:
    """Checks all values, then runs every point. Returns the exit code of the worst point."""
    command: SweepCommand | None = next((command for command in SWEEP_COMMANDS if command == name), None)
    if command is None:
        what = f"`meshloom {name}` has no sweeps; {', '.join(SWEEP_COMMANDS)} have"
        fix = f"type `meshloom {name}` once for each value"
        if name == "launch":
            fix = "type `meshloom train -m hydra/launcher=meshloom_slurm launch=slurm ...`, or jobset in both"
        raise ConfigError([Problem("-m", what, fix)])
    asked = read_sweep_request(request)
    start = plan_start(asked.spec.distributed, asked.spec.target, os.environ) if command == "train" else None
    process = process_index(start, os.environ) if start else 0
    cluster = cluster_settings(asked.launcher, command, asked.spec.launch)
    settings = cluster or pool_settings(asked.launcher, command, is_joined=start is not None)
    console = Console(is_quiet=process > 0)
    with open_sweep(command, asked, settings, process=process, allowed=allowed_modules(), console=console) as engine:
        try:
            _run(engine, flags)
        except KeyboardInterrupt:
            return engine.end(is_interrupted=True)
        except MISTAKES:
            raise
        except Exception as error:
            if engine.settings is not None:
                raise
            engine.end(is_interrupted=False)
            raise RunFailed(_launcher_failed(engine, error), exit_code=1) from error
        exit_code = engine.end(is_interrupted=False)
    if flags.json and process == 0:
        flags.result = sweep_as_json(read_sweep(engine.directory))
    return exit_code


def _launcher_failed(engine: Engine, error: Exception) -> Problem:
    """Returns the error of another package's launcher or sweeper as a problem; its traceback goes to a file."""
    log = engine.directory / LAUNCHER_LOG
    log.write_text("".join(traceback.format_exception(error)), errors="backslashreplace")
    first = str(error).splitlines()[0] if str(error) else ""
    what = f"failed, in code that is not Meshloom's: {type(error).__name__}: {first}".rstrip(": ")
    fix = f"see {log}; the same command goes on with the points that have no row"
    return Problem("hydra.launcher", what, fix)


def _run(engine: Engine, flags: argparse.Namespace) -> None:
    if engine.is_complete:
        return
    asked = engine.asked
    named = [override(SWEEP_DIR, str(engine.directory.absolute()))]
    if not engine.is_named_by_user:
        by_overrides = f'${{{POINT_NAME}:${{hydra.overrides.task}},"{" ".join(asked.axes)}"}}'
        named.append(f"{SUBDIRECTORY}={in_quotes(by_overrides)}")
    kept = [text for text in asked.request.overrides if overridden_key(text) != SWEEP_DIR]
    request = replace(asked.request, overrides=(*kept, *named))
    with launching(engine) as task:
        run_application(request, flags, task)


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
            announce(console, f"meshloom tune: {model} on {where}, {counted(spec.global_batch_size, 'sequence')} of "
                f"{counted(spec.sequence_length, 'token')}")  # fmt: skip
            if spec.tune.targets:
                compare_targets(space, request, run_dir, model, console)
            else:
                search_into(space, run_dir, model, console)
        if flags.json:
            flags.result = sweep_as_json(read_sweep(run_dir))
        return 0

    return run_in_directory(request, flags, run)
