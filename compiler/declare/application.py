"""Runs Hydra's own application for a request that was checked, and gives its task a job in plain values.

Hydra's compose API makes no run directory, calls no callbacks, answers no `--cfg`, `--info` or completion, and starts
no sweeper and no launcher, of ours or of others. The application does all of these, so every command goes through it:
run directories of our own for single runs would be a second way beside it, and more code.
"""

import argparse
import logging.config
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ..core.errors import ConfigError, Problem
from .choices import chosen_model
from .compose import Request, hydra_arguments
from .config_files import register_sources
from .hydra_private import make_sources_portable

__all__ = ["HydraJob", "make_sources_portable", "register_function", "run_application"]

SWITCHES = ("multirun", "resolve", "shell_completion", "hydra_help")
FLAGS_WITH_VALUE = ("cfg", "info", "package")


@dataclass(frozen=True)
class HydraJob:
    """A job of Hydra: a single run, or a point of a sweep. It can be asked only while Hydra runs it."""

    composed: DictConfig
    settings: HydraConf

    @property
    def directory(self) -> Path:
        """Returns the directory that Hydra has made for the job."""
        return Path(self.settings.runtime.output_dir)

    @property
    def number(self) -> int:
        """Returns the number of the job within its sweep."""
        return int(self.settings.job.num)

    @property
    def overrides(self) -> tuple[str, ...]:
        """Returns the overrides that Hydra has for the job, without those of its own settings."""
        return tuple(self.settings.overrides.task)

    def model(self) -> str | None:
        """Returns the name of the model that the job chooses, as `choices.chosen_model` does."""
        return chosen_model(self.composed, self.settings)


def run_application(
    request: Request, flags: argparse.Namespace, task: Callable[[HydraJob], Any] = lambda _: None
) -> None:
    """Runs Hydra's application with the overrides of the request. Its errors are raised as exceptions.

    task: called for each job; a launcher may pickle it and call it on another machine.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"
    register_sources()
    kept = [f"--{name.replace('_', '-')}" for name in SWITCHES if getattr(flags, name)]
    for name in FLAGS_WITH_VALUE:
        value = getattr(flags, name)
        kept += [f"--{name}", value] if value else []
    kept += ["--config-path", request.config_path] if request.config_path else []
    overrides = flags.overrides if flags.shell_completion else hydra_arguments(request)
    sys.argv = ["meshloom", *kept, "--config-name", request.config_name, *overrides]  # Hydra reads its words here

    def job(composed: DictConfig) -> Any:
        return task(HydraJob(composed, HydraConfig.get()))

    try:
        hydra.main(version_base="1.3", config_path="pkg://meshloom.conf", config_name=request.config_name)(job)()
    except ValueError as error:
        if traceback.extract_tb(error.__traceback__)[-1].filename != logging.config.__file__:
            raise
        what = f"cannot be set up: {error.__cause__ or error}"
        fix = "correct it, or leave it out: a run writes its messages to logs/ anyway"
        raise ConfigError([Problem("hydra.job_logging", what, fix)]) from error


def register_function(name: str, function: Callable[..., str]) -> None:
    """Lets settings of Hydra call a function: `${name:arguments}`."""
    OmegaConf.register_new_resolver(name, function, replace=True)
