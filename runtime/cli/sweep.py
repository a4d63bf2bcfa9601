"""A sweep: each point is a command in a process of its own, since devices, compiler and signals belong to one run."""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from meshloom.compiler.config.allowed_code import allow_words
from meshloom.compiler.config.compose import Request, check_sweep
from meshloom.compiler.config.hydra_settings import one_directory
from meshloom.compiler.config.override_text import override
from meshloom.compiler.core.errors import MISTAKE
from meshloom.compiler.core.visible import write_error, write_out

from .hydra_app import run_hydra_app


@dataclass(frozen=True)
class Point:
    """One point of a sweep that has ended."""

    overrides: list[str]
    run_dir: str
    exit_code: int


def run_sweep(command: str, request: Request, flags: argparse.Namespace) -> int:
    """Runs every point, once all values are checked. Returns the exit code, that of the worst point."""
    check_sweep(request)
    points: list[Point] = []

    def task(_: DictConfig) -> int:
        points.append(run_point(command, request, points))
        return points[-1].exit_code

    run_hydra_app(request, flags, task)
    return end_of_sweep(points)


def run_point(command: str, request: Request, before: Sequence[Point]) -> Point:
    """Runs the point that Hydra is at, to its end. before: the points that were run."""
    config = HydraConfig.get()
    overrides = list(config.overrides.task)
    write_out(f"--- {' '.join(overrides)}")
    if config.runtime.output_dir in {point.run_dir for point in before}:
        write_error(str(one_directory(config.runtime.output_dir)))
        return Point(overrides, config.runtime.output_dir, MISTAKE)
    exit_code = subprocess.run(line_of_point(command, request, config), check=False).returncode
    return Point(overrides, config.runtime.output_dir, exit_code)


def line_of_point(command: str, request: Request, config: HydraConf) -> list[str]:
    """Returns the point's own overrides in its own run directory, with configs from the same places."""
    paths = [text for text in config.overrides.hydra if text.startswith("hydra.searchpath=")]
    flags = ["--config-name", request.config_name]
    flags += ["--config-path", request.config_path] if request.config_path else []
    words = [*config.overrides.task, *paths, override("hydra.run.dir", config.runtime.output_dir)]
    # -P: the working directory is not on the path of this process, and must not be on that of the point.
    return [sys.executable, "-P", "-m", "meshloom", command, *allow_words(), *flags, *words]


def end_of_sweep(points: list[Point]) -> int:
    """Says how many points are done, and which are not. Returns the exit code, that of the worst point."""
    failed = [point for point in points if point.exit_code]
    for point in failed:
        write_error(f"exit code {point.exit_code}: {' '.join(point.overrides)} ({point.run_dir})")
    if points:
        write_out(f"{len(points) - len(failed)} of {len(points)} runs done")
    return max((point.exit_code for point in points), default=0)
