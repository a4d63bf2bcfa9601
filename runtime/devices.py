"""The devices of this process, set up before JAX looks for them."""

import jax

from meshloom.compiler.problems import ConfigError, Problem
from meshloom.compiler.target import plan_target
from meshloom.compiler.target_spec import CpuTarget, GpuTarget, LocalTarget, TargetSpec, TpuTarget

from .distributed import Processes

MOST_SIMULATED = 256  # each simulated device is a thread with its own memory


def plan_without_devices(target: TargetSpec) -> None:
    """Keep JAX away from accelerators, whose start takes seconds; `local` alone has to see them."""
    if not isinstance(target, LocalTarget):
        jax.config.update("jax_platforms", "cpu")


def start_devices(target: TargetSpec, processes: Processes) -> None:
    """Have the devices of the target: simulate this process's part of a cpu target, find those of a kind of chip.

    Raises ConfigError for chips that are not there, and for devices that do not divide over the processes, or are more
    than one can sensibly simulate.
    """
    match target:
        case LocalTarget():
            return
        case CpuTarget():
            _simulate(target.num_devices, processes)
        case _:
            _check_attached(target)


def _simulate(num_devices: int, processes: Processes) -> None:
    num_local, rest = divmod(num_devices, processes.count)
    if rest:
        fitting = f"{max(num_local, 1) * processes.count} or cpu-{(num_local + 1) * processes.count}"
        what = f"{num_devices} simulated devices do not divide over {processes.count} processes"
        raise ConfigError([Problem("target", what, f"use cpu-{fitting}, or another number of processes")])
    if num_local > MOST_SIMULATED:
        what = f"{num_local} simulated devices are too many to run in one process"
        raise ConfigError([Problem("target", what, f"plan them with `meshloom explain`, run at most cpu-{MOST_SIMULATED * processes.count}")])  # fmt: skip  # noqa: E501
    jax.config.update("jax_platforms", "cpu")
    if jax.config.jax_num_cpu_devices != num_local:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_num_cpu_devices", num_local)


def _check_attached(target: TpuTarget | GpuTarget) -> None:
    """Raise ConfigError where the devices of JAX are not those of the target."""
    plan = plan_target(target, "float32")
    fix = "plan it with `meshloom explain`; run on target=local, or on simulated devices: target=cpu-8"
    try:
        devices = jax.devices(plan.platform)
    except RuntimeError:
        raise ConfigError([Problem("target", f"{plan.name} is not attached to this machine", fix)]) from None
    found = f"{len(devices)} of {devices[0].device_kind}"
    if (len(devices), devices[0].device_kind) != (plan.num_devices, target.chip.device_kind):
        wanted = f"{plan.num_devices} of {target.chip.device_kind}"
        raise ConfigError([Problem("target", f"{plan.name} is {wanted}, and attached are {found}", fix)])
