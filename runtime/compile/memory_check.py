"""Does the memory suffice? Asked before anything is allocated: the kernel ends a process without a word.

Asked twice: before the compile, of the arrays that are planned exactly; and after it, of what the compiler made.
Simulated devices have no memory of their own, but share that of the host.
"""

from typing import Any

import jax

from meshloom.compiler.core.errors import DOES_NOT_FIT, Problem
from meshloom.compiler.core.format import counted, human_bytes
from meshloom.compiler.plan import Plan
from meshloom.compiler.xla.aot import memory_of

from ..core.failures import RunFailed
from ..core.host_memory import available_bytes
from ..processes.distributed import Processes

REGARDLESS = "on_out_of_memory=try goes on regardless"


def check_state_memory(plan: Plan, processes: Processes) -> None:
    """Raises RunFailed where parameters, optimizer state and batch alone take more than there is, or on an accelerator
    the copy that a save makes of them in the memory of the host."""
    needed = plan.memory.state_bytes + plan.memory.batch
    _check_devices(plan, needed, "for parameters, optimizer state and batch alone", processes)
    if plan.spec.checkpoint.is_saving and plan.target.platform != "cpu":
        _check_host(plan, _saved_bytes(plan, processes), "a save copies the state to the memory of its host")


def check_program_memory(plan: Plan, compiled: Any, processes: Processes) -> None:
    """Raises RunFailed where the compiled train step takes more than there is, of devices or of the host."""
    memory = memory_of(compiled)
    needed = memory.needed_bytes(plan.target.platform)
    if needed is not None:  # else the compiler alone knows, and it has let the program pass
        _check_devices(plan, needed, "for the compiled train step", processes)
    if memory.host_bytes:
        on_host = memory.host_bytes * _devices_of_host(plan, processes)
        _check_host(plan, on_host, "the compiled train step keeps arrays in the memory of its host")


def _check_devices(plan: Plan, bytes_per_device: int, purpose: str, processes: Processes) -> None:
    each = f"{human_bytes(bytes_per_device)} are needed on each"
    if plan.target.platform == "cpu":
        num_devices = _devices_of_host(plan, processes)
        who = f"of {counted(num_devices, 'simulated device')} {purpose}; the memory is this machine's"
        _check_host(plan, bytes_per_device * num_devices, f"{each} {who}")
        return
    available = _device_bytes(plan)
    if available is not None and bytes_per_device > available:
        _refuse(plan, f"{each} device of {plan.target.name} {purpose}, and {human_bytes(available)} are available")


def _check_host(plan: Plan, needed: int, why: str) -> None:
    available = available_bytes()
    if needed > available:
        _refuse(plan, f"{why}: {human_bytes(needed)} are needed, {human_bytes(available)} are available")


def _refuse(plan: Plan, what: str) -> None:
    if plan.spec.on_out_of_memory == "refuse":
        fix = "choose a smaller model or batch, or more devices (`meshloom explain` plans without any)"
        raise RunFailed(Problem("target", what, f"{fix}; {REGARDLESS}"), DOES_NOT_FIT)


def _device_bytes(plan: Plan) -> int | None:
    """Returns what the runtime lets programs take of a device; where it does not say, what the chip is known to
    have."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", plan.target.hbm_bytes_per_device)


def _devices_of_host(plan: Plan, processes: Processes) -> int:
    return plan.target.num_devices // processes.count * processes.num_on_host


def _saved_bytes(plan: Plan, processes: Processes) -> int:
    """Replicas are saved once."""
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(plan.abstract))
    return min(whole, plan.memory.state_bytes * _devices_of_host(plan, processes))
