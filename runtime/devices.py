"""The devices of this process, set up before JAX looks for them."""

import jax

from meshloom.compiler.problems import ConfigError, Problem
from meshloom.compiler.spec import TargetSpec

from .distributed import Processes

MOST_SIMULATED = 256  # each simulated device is a thread with its own memory


def plan_without_devices(target: TargetSpec) -> None:
    """Keep JAX away from accelerators, whose start takes seconds; `local` alone has to see them."""
    if target.kind == "cpu":
        jax.config.update("jax_platforms", "cpu")


def start_devices(target: TargetSpec, processes: Processes) -> None:
    """Simulate this process's part of the devices of a cpu target; others are there already.

    Raises ConfigError for devices that do not divide over the processes, or are more than one can sensibly simulate.
    """
    if target.kind != "cpu":
        return
    num_local, rest = divmod(target.num_devices or 1, processes.count)
    if rest:
        fitting = f"{max(num_local, 1) * processes.count} or cpu-{(num_local + 1) * processes.count}"
        what = f"{target.num_devices} simulated devices do not divide over {processes.count} processes"
        raise ConfigError([Problem("target", what, f"use cpu-{fitting}, or another number of processes")])
    if num_local > MOST_SIMULATED:
        what = f"{num_local} simulated devices are too many to run in one process"
        raise ConfigError([Problem("target", what, f"plan them with `meshloom explain`, run at most cpu-{MOST_SIMULATED * processes.count}")])  # fmt: skip  # noqa: E501
    jax.config.update("jax_platforms", "cpu")
    if jax.config.jax_num_cpu_devices != num_local:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_num_cpu_devices", num_local)
