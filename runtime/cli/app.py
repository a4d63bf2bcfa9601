"""From a command line to a run: Hydra's own grammar, checked before anything is written.

A single run is composed and checked first, then handed to Hydra, which makes the run directory. A sweep is checked
value by value, then runs each point in a process of its own: devices, compiler and signals belong to one run alone.
"""

import argparse
import logging
import logging.config
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from meshloom.compiler.config.allowed_code import FLAG, VARIABLE, code_allowed_from, parse_allowed
from meshloom.compiler.config.compose import (
    Request,
    check_config_files,
    check_sweep,
    hydra_arguments,
    read_spec,
)
from meshloom.compiler.config.composition_errors import MISTAKES, as_config_error
from meshloom.compiler.config.config_files import register_sources
from meshloom.compiler.config.environment_values import masked
from meshloom.compiler.config.hydra_settings import RUN_DIR
from meshloom.compiler.config.override_parser import key_of
from meshloom.compiler.config.spec import RunSpec
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import MISTAKE, ConfigError, Problem
from meshloom.compiler.core.visible import write_error

from .completion import offer_whole_options
from .flags import parse_flags, request_of
from .help import show_help
from .sweep import Point, end_of_sweep, run_point

LOG = logging.getLogger("meshloom")
Task = Callable[[DictConfig], Any]


def run_command(command: str, args: list[str]) -> int:
    """Run `meshloom COMMAND ARGS`. Mistakes of the user's are printed, all of them, and give exit code 2."""
    try:
        flags, problems = parse_flags(command, args)
        with code_allowed_from(_allowed(flags)):
            if problems:
                raise ConfigError([*problems, *_problems_beside(flags)])
            return _run_command(command, flags)
    except BrokenPipeError:  # no mistake: main.py ends the command
        raise
    except MISTAKES as error:
        return _show(as_config_error(error))


def _allowed(flags: argparse.Namespace) -> tuple[str, ...]:
    """Modules that the user opted into; no config file has a say in it."""
    return (*parse_allowed(flags.allow_code_from, FLAG), *parse_allowed([os.environ.get(VARIABLE, "")], VARIABLE))


def _run_command(command: str, flags: argparse.Namespace) -> int:
    request = request_of(flags)
    if flags.help:
        show_help(command, request)
    elif flags.multirun or "hydra.mode=MULTIRUN" in request.overrides:
        return _sweep(command, request, flags)
    elif flags.cfg:
        read_spec(request, then=lambda spec: spec)
        try:
            with masked():  # --resolve is not a reason to show what came from the environment
                _hydra_app(request, flags, task=_nothing)
        except SystemExit:  # Hydra ends so where there is no such --package, and has said it
            return MISTAKE
    elif flags.info or flags.hydra_help:
        check_config_files(request)  # Hydra sets up logging as they say
        with suppress(SystemExit):  # Hydra ends so after its own help
            _hydra_app(request, flags, task=_nothing)
    elif flags.shell_completion:
        offer_whole_options(lambda: _hydra_app(request, flags, task=_nothing))
    else:
        return {"train": _train, "explain": _explain, "compile": _compile, "data": _data}[command](request, flags)
    return 0


def _train(request: Request, flags: argparse.Namespace) -> int:
    """The same in every process of a run: a mistake that one of them finds ends all of them."""
    from ..processes import distributed

    try:
        exit_code = _train_together(request, flags)
    except MISTAKES as error:
        exit_code = _show(as_config_error(error))
    except BaseException as error:
        distributed.crash(error)
        raise
    distributed.leave()
    return exit_code


def _train_together(request: Request, flags: argparse.Namespace) -> int:
    from ..core.failures import is_of_one_process
    from ..processes import distributed
    from ..processes.agreement import check_same_data
    from ..processes.process_log import process_log
    from ..rundir.run_dir import in_shared_run_dir
    from ..train.train import Job, prepare, train

    declared: Job | distributed.Disagreement
    try:
        declared = distributed.together("declaration", lambda: read_spec(request, then=prepare))
        check_same_data(declared.data.identity, distributed.current())
    except distributed.Disagreement as error:  # to be named in the log of each process
        declared = error
    processes, exit_codes = distributed.current(), [2]
    if processes.count == 1:
        _check_run_dir(request)

    def run(shown: Path) -> int:
        try:
            if isinstance(declared, distributed.Disagreement):
                raise declared
            console = Console(is_quiet=not processes.is_first)
            return train(declared, shown, overrides=request.overrides, console=console, processes=processes)
        except MISTAKES as error:  # Hydra would print a line of its own about it
            LOG.error(error, exc_info=isinstance(error, OSError))
            if is_of_one_process(error) and processes.count > 1:
                distributed.crash(error, shown)
            return _show(as_config_error(error))
        except BaseException as error:
            LOG.error("crashed", exc_info=True)
            distributed.crash(error, shown)
            raise

    def task(_: DictConfig) -> None:
        run_dir = Path(HydraConfig.get().runtime.output_dir)
        shown = _shown(run_dir)
        try:
            with process_log(run_dir, processes):
                exit_codes[0] = run(shown)
        except OSError as error:  # of the log itself
            distributed.crash(error, shown)
            exit_codes[0] = _show(as_config_error(error))

    _hydra_app(in_shared_run_dir(request, processes), flags, task)
    return exit_codes[0]


def _explain(request: Request, flags: argparse.Namespace) -> int:  # noqa: ARG001 (as _train)
    from meshloom.compiler.driver import plan_run
    from meshloom.compiler.report.explain import explain

    from ..processes.devices import plan_without_devices

    def plan(spec: RunSpec) -> Any:
        plan_without_devices(spec.target)
        return plan_run(spec)

    explain(read_spec(request, then=plan), Console(off_terminal_width=240))
    return 0


def _compile(request: Request, flags: argparse.Namespace) -> int:
    from meshloom.compiler.config.model_choice import chosen_model

    from ..compile.compile_command import compile_step, prepare_compile
    from ..processes.distributed import Processes
    from ..processes.process_log import process_log

    job, exit_codes = read_spec(request, then=prepare_compile), [2]
    _check_run_dir(request)

    def run(run_dir: Path, model: str | None) -> int:
        try:
            return compile_step(job, run_dir, request=request, model=model, console=Console())
        except MISTAKES as error:  # Hydra would print a line of its own about it
            LOG.error(error, exc_info=isinstance(error, OSError))
            return _show(as_config_error(error))

    def task(composed: DictConfig) -> None:
        run_dir = _shown(Path(HydraConfig.get().runtime.output_dir))
        model = chosen_model(composed, HydraConfig.get())
        try:
            with process_log(run_dir, Processes()):
                exit_codes[0] = run(run_dir, model)
        except OSError as error:  # of the log itself
            exit_codes[0] = _show(as_config_error(error))

    _hydra_app(request, flags, task)
    return exit_codes[0]


def _check_run_dir(request: Request) -> None:
    """Raise ConfigError where the named run directory is in use, before Hydra writes its record over the run's."""
    from meshloom.compiler.config.compose import hydra_run_dir

    from ..core.exclusive import check_is_free

    is_named = RUN_DIR in map(key_of, request.overrides)
    if is_named or request.search_path or request.config_path:  # or a file of the user's may name it
        check_is_free(_shown(hydra_run_dir(request)))


def _shown(run_dir: Path) -> Path:
    """A run directory as one types it from here."""
    return run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir


def _data(request: Request, flags: argparse.Namespace) -> int:  # noqa: ARG001 (as _train)
    from .tokenize_corpus import prepare_corpus, tokenize_corpus

    return tokenize_corpus(read_spec(request, then=prepare_corpus), Console())


def _sweep(command: str, request: Request, flags: argparse.Namespace) -> int:
    check_sweep(request)
    points: list[Point] = []

    def task(_: DictConfig) -> int:
        points.append(run_point(command, request, points))
        return points[-1].exit_code

    _hydra_app(request, flags, task)
    return end_of_sweep(points)


def _hydra_app(request: Request, flags: argparse.Namespace, task: Task) -> None:
    """Run Hydra's main with the request's overrides; its errors come out as exceptions."""
    os.environ["HYDRA_FULL_ERROR"] = "1"
    register_sources()
    switches = ("multirun", "resolve", "shell_completion", "hydra_help")
    kept = [f"--{name.replace('_', '-')}" for name in switches if getattr(flags, name)]
    for name in ("cfg", "info", "package"):
        value = getattr(flags, name)
        kept += [f"--{name}", value] if value else []
    kept += ["--config-path", request.config_path] if request.config_path else []
    overrides = flags.overrides if flags.shell_completion else hydra_arguments(request)
    sys.argv = ["meshloom", *kept, "--config-name", request.config_name, *overrides]
    try:
        hydra.main(version_base="1.3", config_path="pkg://meshloom.conf", config_name=request.config_name)(task)()
    except ValueError as error:
        if traceback.extract_tb(error.__traceback__)[-1].filename != logging.config.__file__:
            raise
        what = f"cannot be set up: {error.__cause__ or error}"
        fix = "mend it, or leave it out: what a run says is in its logs/ as well"
        raise ConfigError([Problem("hydra.job_logging", what, fix)]) from error


def _problems_beside(flags: argparse.Namespace) -> tuple[Problem, ...]:
    """What is wrong with the overrides of a line whose flags are wrong."""
    try:
        read_spec(request_of(flags), then=lambda spec: spec)
    except MISTAKES as error:
        return as_config_error(error).problems
    return ()


def _nothing(_: DictConfig) -> None: ...


def _show(error: ConfigError) -> int:
    """Say it, once for all processes."""
    from ..processes.distributed import current

    if current().is_first:
        write_error(str(error))
    return error.exit_code
