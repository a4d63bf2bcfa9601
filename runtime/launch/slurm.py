"""Renders `launch=slurm`: a batch script, which SLURM restarts after a preemption, a time limit or a lost host."""

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.declare.launch_spec import SlurmLaunch

from ..core.failures import FINAL, PREEMPTED
from .plan import LaunchPlan
from .templates import template


def render_slurm(plan: LaunchPlan, launch: SlurmLaunch) -> str:
    """Returns the script for `sbatch`."""
    return _render(
        plan,
        launch,
        options=[*_options(plan, launch), f"--output={plan.run_dir}/logs/slurm-%j.log"],
        command=plan.command(*_words(plan, launch)),
        failures=shlex.quote(f"{plan.run_dir}/logs/failures"),
        elements=[],
    )


def render_slurm_array(
    elements: Sequence[tuple[LaunchPlan, str, str]], launch: SlurmLaunch, *, num_at_once: int | None, log: str
) -> str:
    """Returns the script of an array. Each of its elements is a run of its own, on hosts of the same kind.

    elements: plans, each with a file for its output and one for its exit code. log: the log of the script itself.
    """
    first = elements[0][0]
    limit = f"%{num_at_once}" if num_at_once else ""
    runs = [
        {
            "command": plan.command(*_words(plan, launch)),
            "output": shlex.quote(output),
            "exit_file": shlex.quote(exit_file),
            "failures": shlex.quote(f"{exit_file}.failures"),
        }
        for plan, output, exit_file in elements
    ]
    options = [*_options(first, launch), f"--array=0-{len(elements) - 1}{limit}", f"--output={log}"]
    return _render(first, launch, options=options, elements=runs)


def _render(plan: LaunchPlan, launch: SlurmLaunch, **more: Any) -> str:
    _check(plan, launch)
    return template("slurm.sh.jinja").render(
        environment={name: shlex.quote(value) for name, value in plan.environment.items()},
        setup=launch.setup,
        srun=shlex.join(_srun(launch)),
        final="|".join(map(str, FINAL)),
        preempted=PREEMPTED,
        max_restarts=launch.max_restarts,
        **more,
    )


def _check(plan: LaunchPlan, launch: SlurmLaunch) -> None:
    per_host = launch.processes_per_host
    if per_host == 1 or not plan.hosts.chips:
        return
    if not plan.hosts.is_gpu or per_host != plan.hosts.chips:
        each = f"1 or {plan.hosts.chips}, a process for each GPU" if plan.hosts.is_gpu else "1"
        what = f"{per_host} processes do not share a host with {plan.hosts.chips} chips of {plan.hosts.kind}"
        raise ConfigError([Problem("launch.processes_per_host", what, f"use {each}")])


def _options(plan: LaunchPlan, launch: SlurmLaunch) -> Iterator[str]:
    """Yields options of sbatch."""
    yield f"--job-name={plan.name}"
    yield f"--nodes={plan.hosts.count}"
    yield f"--ntasks-per-node={launch.processes_per_host}"
    if plan.hosts.is_gpu:
        yield f"--gpus-per-node={plan.hosts.chips}"
    for name in ("partition", "account", "qos"):
        if value := getattr(launch, name):
            yield f"--{name}={value}"
    if launch.time_limit:
        yield f"--time={launch.time_limit}"
        yield f"--signal=TERM@{launch.grace_seconds}"  # sent to the processes, not to this script
    yield "--requeue"
    yield "--open-mode=append"
    for name, value in launch.options.items():
        yield f"--{name}" if value is None else f"--{name}={value}"


def _srun(launch: SlurmLaunch) -> list[str]:
    """Returns the srun command. If a process fails, the others are ended after the grace period."""
    words = ["srun", "--kill-on-bad-exit=0", f"--wait={launch.grace_seconds}"]
    words += [f"--container-image={launch.image}"] if launch.image else []
    words += [f"--container-mounts={','.join(launch.mounts)}"] if launch.mounts else []
    return words


def _words(plan: LaunchPlan, launch: SlurmLaunch) -> list[str]:
    """Returns the override that gives one process all GPUs of its node; under SLURM, JAX would give it one."""
    if not plan.hosts.is_gpu or launch.processes_per_host > 1:
        return []
    return [shlex.quote(f"distributed.local_device_ids=[{','.join(map(str, range(plan.hosts.chips or 0)))}]")]
