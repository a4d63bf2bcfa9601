"""Sets up the devices of this process before JAX looks for them."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import jax

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import counted
from meshloom.compiler.core.visible import write_error
from meshloom.compiler.spec.attached import has_chip
from meshloom.compiler.spec.target_spec import CpuTarget, GpuTarget, LocalTarget, TargetSpec, TpuTarget
from meshloom.compiler.target.target import plan_target
from meshloom.compiler.target.topology import installed_compilers

from ..core.stderr_capture import Captured, captured_stderr
from .distributed import Processes

MOST_SIMULATED = 256  # each simulated device is a thread with its own memory
THREADS_OF_A_DEVICE = 2
Warn = Callable[[str], None]


class TooFewSimulated(ConfigError):
    """JAX has started in this process with fewer simulated devices than are needed; another process can have them."""


def plan_without_devices(target: TargetSpec) -> tuple[str, ...]:
    """Keeps JAX away from accelerators, whose start takes seconds; only the target `local` has to see them. Returns
    lines for the log, as `start_devices` does."""
    if isinstance(target, LocalTarget):
        return _find_attached(Processes())
    jax.config.update("jax_platforms", "cpu")
    return ()


def start_devices(target: TargetSpec, processes: Processes, warn: Warn = write_error) -> tuple[str, ...]:
    """Provides the devices of the target: simulates this process's part of a cpu target, or finds attached chips.

    Returns the lines that were printed meanwhile, for the log. warn: takes a warning about attached devices.
    Raises ConfigError for chips that are not attached or do not start, for devices that do not divide over the
    processes, for too many simulated devices, and if JAX has started in this process with fewer.
    """
    match target:
        case LocalTarget():
            return _find_attached(processes, warn)
        case CpuTarget():
            _simulate(target.num_devices, processes)
            return ()
        case _:
            return _check_attached(target)


def start_as_found() -> None:
    """Starts JAX with the devices that it finds by itself, in a program that may use them for something else.

    Compiling for chips that are not attached starts JAX. On a machine without chips no plugin is asked for one, so JAX
    uses the CPU and plugins print nothing.
    """
    before = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if not before and not has_chip():
        jax.config.update("jax_platforms", "cpu")
    try:
        _start_jax()
    finally:
        jax.config.update("jax_platforms", before)


def _find_attached(processes: Processes, warn: Warn = write_error) -> tuple[str, ...]:
    """Lets JAX look for accelerators. If it falls back to the CPU, process 0 says so in one line, unless JAX_PLATFORMS
    asks for the CPU."""
    if jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        _start_jax()
        return ()
    with _quiet_without_chip() as captured:
        platform = _start_jax()
    if platform != "cpu":
        return captured.lines
    compilers, why = installed_compilers(), "no GPU or TPU was found"
    if has_chip():
        why = "there is a GPU or TPU that JAX does not use, as it says above"
    elif compilers:
        are = "is" if len(compilers) == 1 else "are"
        why = f"{' and '.join(compilers.values())} {are} installed, but no {' or '.join(compilers)} was found"
    warning = f"warning: {why}: target=local is this machine's processor"
    if processes.is_first:
        warn(warning)
    return (warning, *captured.lines)


def _quiet_without_chip() -> AbstractContextManager[Captured]:
    """Sends what accelerator plugins print, a traceback for CUDA, to the log only if the machine has no accelerator.
    With one it goes to the terminal at once, as a driver may end the process."""
    return nullcontext(Captured()) if has_chip() else captured_stderr()


def _start_jax() -> str:
    """Starts JAX, and returns the platform that it uses."""
    try:
        return jax.default_backend()
    except RuntimeError as error:
        what = f"JAX does not start: {' '.join(str(error).split())}"
        fix = "fix what it names, or choose simulated devices: target=cpu-8"
        raise ConfigError([Problem("target", what, fix)]) from error


def _simulate(num_devices: int, processes: Processes) -> None:
    num_local, rest = divmod(num_devices, processes.count)
    if rest:
        do = "does" if num_devices == 1 else "do"
        fitting = f"{max(num_local, 1) * processes.count} or cpu-{(num_local + 1) * processes.count}"
        what = f"{counted(num_devices, 'simulated device')} {do} not divide over {processes.count} processes"
        raise ConfigError([Problem("target", what, f"use cpu-{fitting}, or another number of processes")])
    if num_local > MOST_SIMULATED:
        what = f"{num_local} simulated devices are too many to run in one process"
        most = MOST_SIMULATED * processes.count
        raise ConfigError([Problem("target", what, f"plan them with `meshloom explain`, run at most cpu-{most}")])
    _give_threads(num_local)
    asked: int = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.config.update("jax_num_cpu_devices", max(num_local, asked))  # more that the program asked for stay
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:  # JAX has started: a notebook may have used it, or simulated devices before
        devices = jax.devices()
        if devices[0].platform == "cpu" and len(devices) >= num_local:
            return
        has = f"{counted(len(devices), 'device')} ({devices[0].device_kind})"
        what = f"JAX has started in this process with {has}, and {num_local} can be simulated only before it starts"
        begin = f"begin with cpu-{num_local} or more, before JAX is first used"
        fix = f"restart Python (the kernel of a notebook) and {begin}"
        raise TooFewSimulated([Problem("target", what, fix)]) from None


def _give_threads(num_local: int) -> None:
    """Sets the threads of XLA's pool, before its CPU client starts.

    A simulated device holds a thread while it waits for the others in a collective. By default the pool has a thread
    for each processor, or for each device if there are more devices. Steps in flight take some of them; then a device
    finds none, and the others wait until XLA ends the process: "Expected 8 threads to join the rendezvous". With 9
    threads for 8 devices and 150 steps in flight, 7 of 8 processes ended in this way; with 16 threads, none of 8.
    """
    if not {"NPROC", "PJRT_NPROC"} & os.environ.keys():
        os.environ["PJRT_NPROC"] = str(max(os.cpu_count() or 1, THREADS_OF_A_DEVICE * num_local))


def _check_attached(target: TpuTarget | GpuTarget) -> tuple[str, ...]:
    """Returns the lines that JAX printed while it looked for the target's devices. Raises ConfigError if it has others
    or none."""
    plan = plan_target(target, "float32")
    fix = "plan it with `meshloom explain`; run on target=local, or on simulated devices: target=cpu-8"
    try:
        with _quiet_without_chip() as captured:
            devices = jax.devices(plan.platform)
    except RuntimeError:
        raise ConfigError([Problem("target", f"{plan.name} is not attached to this machine", fix)]) from None
    found = f"{len(devices)} of {devices[0].device_kind}"
    if (len(devices), devices[0].device_kind) != (plan.num_devices, target.chip.device_kind):
        wanted = f"{plan.num_devices} of {target.chip.device_kind}"
        raise ConfigError([Problem("target", f"{plan.name} is {wanted}, and attached are {found}", fix)])
    return captured.lines
