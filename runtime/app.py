"""From a command line to a run: Hydra's own grammar, checked before anything is written.

A single run is composed and checked first, then handed to Hydra, which makes the run directory. A sweep is checked
value by value, then runs each point in a process of its own: devices, compiler and signals belong to one run alone.
"""

import argparse
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser  # private: the flags that every Hydra app has (pinned <1.4)
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from meshloom.compiler import target_names
from meshloom.compiler.compose import (
    MISTAKES,
    Request,
    as_config_error,
    check_sweep,
    hydra_arguments,
    read_spec,
    search_path_override,
)
from meshloom.compiler.problems import ConfigError, Problem
from meshloom.compiler.spec import RunSpec

from .help import show_help

LOG = logging.getLogger("meshloom")
Task = Callable[[DictConfig], Any]


def run_command(command: str, args: list[str]) -> int:
    """Run `meshloom COMMAND ARGS`. Mistakes of the user's are printed, all of them, and give exit code 2."""
    flags = _parse_flags(command, args)
    try:
        request = _request(flags)
        if flags.help:
            show_help(command, request)
        elif flags.multirun or "hydra.mode=MULTIRUN" in request.overrides:
            return _sweep(command, request, flags)
        elif flags.cfg:
            read_spec(request, then=lambda spec: spec)
            _hydra_app(request, flags, task=_nothing)
        elif flags.info or flags.shell_completion or flags.hydra_help:
            _hydra_app(request, flags, task=_nothing)
        else:
            return {"train": _train, "explain": _explain, "compile": _compile, "data": _data}[command](request, flags)
    except MISTAKES as error:
        return _show(as_config_error(error))
    return 0


def _train(request: Request, flags: argparse.Namespace) -> int:
    """The same in every process of a run: a mistake that one of them finds ends all of them."""
    from . import distributed

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
    from . import distributed
    from .failures import is_of_one_process
    from .process_log import process_log
    from .run_dir import in_shared_run_dir
    from .train import Job, prepare, train

    declared: Job | distributed.Disagreement
    try:
        declared = distributed.together("declaration", lambda: read_spec(request, then=prepare))
    except distributed.Disagreement as error:  # to be named in the log of each process
        declared = error
    processes, exit_codes = distributed.current(), [2]

    def task(_: DictConfig) -> None:
        run_dir = Path(HydraConfig.get().runtime.output_dir)
        shown = _shown(run_dir)
        with process_log(run_dir, processes):
            try:
                if isinstance(declared, distributed.Disagreement):
                    raise declared
                console = Console(quiet=not processes.is_first)
                exit_codes[0] = train(
                    declared, shown, overrides=request.overrides, console=console, processes=processes
                )
            except MISTAKES as error:  # Hydra would print a line of its own about it
                LOG.error(error, exc_info=isinstance(error, OSError))
                if is_of_one_process(error) and processes.count > 1:
                    distributed.crash(error, shown)
                exit_codes[0] = _show(as_config_error(error))
            except BaseException as error:
                LOG.error("crashed", exc_info=True)
                distributed.crash(error, shown)
                raise

    _hydra_app(in_shared_run_dir(request, processes), flags, task)
    return exit_codes[0]


def _explain(request: Request, flags: argparse.Namespace) -> int:  # noqa: ARG001 (as _train)
    from meshloom.compiler.driver import plan_run
    from meshloom.compiler.explain import explain

    from .devices import plan_without_devices

    def plan(spec: RunSpec) -> Any:
        plan_without_devices(spec.target)
        return plan_run(spec)

    console = Console()
    explain(read_spec(request, then=plan), console if console.is_terminal else Console(width=240))
    return 0


def _compile(request: Request, flags: argparse.Namespace) -> int:
    from meshloom.compiler.model_choice import chosen_model

    from .compile_command import compile_step, prepare_compile
    from .distributed import Processes
    from .process_log import process_log

    job, exit_codes = read_spec(request, then=prepare_compile), [2]

    def task(composed: DictConfig) -> None:
        run_dir = _shown(Path(HydraConfig.get().runtime.output_dir))
        model = chosen_model(composed, HydraConfig.get())
        with process_log(run_dir, Processes()):
            try:
                exit_codes[0] = compile_step(job, run_dir, request=request, model=model, console=Console())
            except MISTAKES as error:  # Hydra would print a line of its own about it
                LOG.error(error, exc_info=isinstance(error, OSError))
                exit_codes[0] = _show(as_config_error(error))

    _hydra_app(request, flags, task)
    return exit_codes[0]


def _shown(run_dir: Path) -> Path:
    """A run directory as one types it from here."""
    return run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir


def _data(request: Request, flags: argparse.Namespace) -> int:  # noqa: ARG001 (as _train)
    from .tokenize_corpus import prepare_corpus, tokenize_corpus

    return tokenize_corpus(read_spec(request, then=prepare_corpus), Console())


@dataclass(frozen=True)
class Point:
    """One point of a sweep that has ended."""

    overrides: list[str]
    run_dir: str
    exit_code: int


def _sweep(command: str, request: Request, flags: argparse.Namespace) -> int:
    check_sweep(request)
    points: list[Point] = []
    _hydra_app(request, flags, task=partial(_run_point, command, request, points))
    failed = [point for point in points if point.exit_code]
    for point in failed:
        print(f"exit code {point.exit_code}: {' '.join(point.overrides)} ({point.run_dir})", file=sys.stderr)
    if points:
        print(f"{len(points) - len(failed)} of {len(points)} runs done")
    return max((point.exit_code for point in points), default=0)


def _run_point(command: str, request: Request, points: list[Point], _: DictConfig) -> int:
    config = HydraConfig.get()
    overrides = list(config.overrides.task)
    paths = [text for text in config.overrides.hydra if text.startswith("hydra.searchpath=")]
    flags = ["--config-name", request.config_name]
    flags += ["--config-path", request.config_path] if request.config_path else []
    run_dir = config.runtime.output_dir
    line = [sys.executable, "-m", "meshloom", command, *flags, *overrides, *paths, f"hydra.run.dir='{run_dir}'"]
    print(f"--- {' '.join(overrides)}", flush=True)
    point = Point(overrides, run_dir, subprocess.run(line, check=False).returncode)
    points.append(point)
    return point.exit_code


def _hydra_app(request: Request, flags: argparse.Namespace, task: Task) -> None:
    """Run Hydra's main with the request's overrides; its errors come out as exceptions."""
    os.environ["HYDRA_FULL_ERROR"] = "1"
    target_names.register()
    switches = ("multirun", "resolve", "shell_completion", "hydra_help")
    kept = [f"--{name.replace('_', '-')}" for name in switches if getattr(flags, name)]
    for name in ("cfg", "info", "package"):
        value = getattr(flags, name)
        kept += [f"--{name}", value] if value else []
    kept += ["--config-path", request.config_path] if request.config_path else []
    overrides = flags.overrides if flags.shell_completion else hydra_arguments(request)
    sys.argv = ["meshloom", *kept, "--config-name", request.config_name, *overrides]
    hydra.main(version_base="1.3", config_path="pkg://meshloom.conf", config_name=request.config_name)(task)()


def _nothing(_: DictConfig) -> None: ...


def _parse_flags(command: str, args: list[str]) -> argparse.Namespace:
    parser = get_args_parser()
    parser.prog = f"meshloom {command}"
    return parser.parse_args(args)


def _request(flags: argparse.Namespace) -> Request:
    """The request with `--config-dir` as what it is: one more place to look for configs."""
    overrides = list(flags.overrides)
    if flags.config_dir or any(text.startswith("hydra.searchpath=") for text in overrides):
        if flags.config_dir and not Path(flags.config_dir).is_dir():
            what, fix = f"there is no directory {flags.config_dir}", "name a folder with groups in it: model/mine.yaml"
            raise ConfigError([Problem("--config-dir", what, fix)])
        overrides = search_path_override(overrides, flags.config_dir)
    path = str(Path(flags.config_path).resolve()) if flags.config_path else None
    return Request(tuple(overrides), flags.config_name or "config", path)


def _show(error: ConfigError) -> int:
    """Say it, once for all processes."""
    from .distributed import current

    if current().is_first:
        Console(stderr=True, highlight=False, soft_wrap=True).print(str(error), markup=False)
    return error.exit_code
