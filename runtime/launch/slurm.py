"""`launch=slurm`: a batch script, which SLURM runs again after a preemption, a time limit or a lost host."""

import shlex
from collections.abc import Iterator

from meshloom.compiler.config.launch_spec import SlurmLaunch
from meshloom.compiler.core.errors import ConfigError, Problem

from ..core.failures import FINAL, PREEMPTED
from .plan import LaunchPlan
from .templates import template


def render_slurm(plan: LaunchPlan, launch: SlurmLaunch) -> str:
    """Returns the script for `sbatch`."""
    _check(plan, launch)
    return template("slurm.sh.jinja").render(
        options=list(_options(plan, launch)),
        environment={name: shlex.quote(value) for name, value in plan.environment.items()},
        setup=launch.setup,
        srun=shlex.join(_srun(launch)),
        command=plan.command(*_words(plan, launch)),
        failures=shlex.quote(f"{plan.run_dir}/logs/failures"),
        final="|".join(map(str, FINAL)),
        preempted=PREEMPTED,
        max_restarts=launch.max_restarts,
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
        yield f"--signal=TERM@{launch.grace_seconds}"  # to the processes, not to this script
    yield "--requeue"
    yield "--open-mode=append"
    yield f"--output={plan.run_dir}/logs/slurm-%j.log"
    for name, value in launch.options.items():
        yield f"--{name}" if value is None else f"--{name}={value}"


def _srun(launch: SlurmLaunch) -> list[str]:
    """Returns the words that start the processes: if one fails, the others are ended after the grace period."""
    words = ["srun", "--kill-on-bad-exit=0", f"--wait={launch.grace_seconds}"]
    words += [f"--container-image={launch.image}"] if launch.image else []
    words += [f"--container-mounts={','.join(launch.mounts)}"] if launch.mounts else []
    return words


def _words(plan: LaunchPlan, launch: SlurmLaunch) -> list[str]:
    """Under SLURM JAX gives a process one GPU, unless it is told that it has all of its node's."""
    if not plan.hosts.is_gpu or launch.processes_per_host > 1:
        return []
    return [shlex.quote(f"distributed.local_device_ids=[{','.join(map(str, range(plan.hosts.chips or 0)))}]")]
