"""Hydra's own main, run for a request that was checked: it makes the run directory and calls a task in it."""

import argparse
import logging.config
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import hydra
from omegaconf import DictConfig

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.visible import write_error
from meshloom.compiler.declare.compose import Request, hydra_arguments
from meshloom.compiler.declare.config_files import register_sources

HydraTask = Callable[[DictConfig], Any]


def run_hydra_app(request: Request, flags: argparse.Namespace, task: HydraTask) -> None:
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
        fix = "correct it, or leave it out: a run writes its messages to logs/ anyway"
        raise ConfigError([Problem("hydra.job_logging", what, fix)]) from error


def do_nothing(_: DictConfig) -> None:
    """The task where Hydra itself does all that is asked for."""


def show_mistake(error: ConfigError) -> int:
    """Prints all that is wrong; returns the exit code."""
    write_error(str(error))
    return error.exit_code
