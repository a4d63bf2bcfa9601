"""Renders commands and files for engines that also create the machines: gcloud for TPU VMs, xpk and SkyPilot."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any
from meshloom.compiler.declare.launch_spec import LaunchConfig, SkyPilotLaunch, TpuVmLaunch, XpkLaunch

from ..core.failures import FINAL, HUNG, LOST, STORAGE
from .plan import ChipNames, LaunchPlan, chip_names
from .templates import as_yaml, filled, template

RESTARTED = (1, STORAGE, HUNG, LOST)  # 1: a crash of Python; xpk restarts after 42 and from 127 up by itself
SKY_WORDS = (
    'distributed.coordinator_address="\'$(echo "$SKYPILOT_NODE_IPS" | head -n1):8476\'"',
    'distributed.num_processes="$SKYPILOT_NUM_NODES"',
    'distributed.process_id="$SKYPILOT_NODE_RANK"',
)
SECONDS_BETWEEN_STARTS = 30  # until the last coordinator has released its port


def render_tpu_vm(plan: LaunchPlan, launch: TpuVmLaunch) -> str:
    """Returns a script that creates the slices, waits for them, and runs on all of their hosts."""
    names, hosts = _tpu_names(plan, "tpu_vm"), plan.hosts
    raise_if_any([*_needs(launch, "zone"), *_place(plan)])
    where = [f"--zone={launch.zone}", *([f"--project={launch.project}"] if launch.project else [])]
    nodes = [plan.name] if hosts.num_slices == 1 else [f"{plan.name}-{i}" for i in range(hosts.num_slices)]
    named = (
        [f"--node-id={plan.name}"]
        if hosts.num_slices == 1
        else [f"--node-count={hosts.num_slices}", f"--node-prefix={plan.name}"]
    )
    create = [
        *named, f"--accelerator-type={_slice_name(plan, names)}",
        f"--runtime-version={launch.runtime_version or names.runtime}",
        *([] if launch.provisioning == "on_demand" else [f"--{launch.provisioning}"]),
        *_options(launch.options), *where,
    ]  # fmt: skip
    return template("tpu_vm.sh.jinja").render(
        name=plan.name,
        create=shlex.join(create),
        where=shlex.join(where),
        nodes=shlex.join(nodes),
        script=shlex.quote(restarting_script(plan, launch)),
        delete_after=launch.delete_after,
    )


def xpk_command(plan: LaunchPlan, launch: XpkLaunch) -> tuple[str, ...]:
    """Returns the command that creates the workload."""
    names = _tpu_names(plan, "xpk")
    raise_if_any([*_needs(launch, "cluster", "image"), *_place(plan)])
    given = {"cluster": launch.cluster, "project": launch.project, "zone": launch.zone, "priority": launch.priority}
    variables = [f"--env={name}={value}" for name, value in plan.environment.items()]
    return (
        "xpk", "workload", "create", f"--workload={plan.name}",
        *(f"--{name}={value}" for name, value in given.items() if value),
        f"--tpu-type={_slice_name(plan, names, shaped=True)}", f"--num-slices={plan.hosts.num_slices}",
        f"--docker-image={launch.image}", f"--max-restarts={launch.max_restarts}",
        f"--restart-on-exit-codes={','.join(map(str, RESTARTED))}",
        *variables, *_options(launch.options),
        f"--command={' && '.join([*launch.setup, plan.command()])}",
    )  # fmt: skip


def render_skypilot(plan: LaunchPlan, launch: SkyPilotLaunch) -> str:
    """Returns a task of SkyPilot as YAML."""
    hosts = plan.hosts
    raise_if_any(_place(plan))
    is_told = hosts.count > 1 and (hosts.is_gpu or hosts.chips is None)
    task = filled(
        "skypilot.yaml.jinja",
        plan=plan,
        launch=launch,
        is_told=is_told,
        accelerators=_accelerators(plan),
        variables=dict(plan.environment),
        command=plan.command(*(SKY_WORDS if is_told else ())),
    )
    return as_yaml(task)


def restarting_script(plan: LaunchPlan, launch: LaunchConfig) -> str:
    """Returns a script for each host that restarts its process after an exit code that is not final.

    All hosts do the same: a lost host ends the processes of the others too.
    """
    return template("restarting.sh.jinja").render(
        environment={name: shlex.quote(value) for name, value in plan.environment.items()},
        setup=launch.setup,
        command=plan.command(),
        final="|".join(map(str, FINAL)),
        max_restarts=launch.max_restarts,
        seconds=SECONDS_BETWEEN_STARTS,
    )


def _accelerators(plan: LaunchPlan) -> dict[str, Any]:
    hosts = plan.hosts
    if hosts.kind is None:
        return {}
    if hosts.is_gpu:
        return {"accelerators": f"{chip_names(hosts.kind).sky}:{hosts.chips}"}
    names = _tpu_names(plan, "skypilot")
    if hosts.num_slices > 1:
        what = "SkyPilot starts one TPU slice, and the target has several"
        raise ConfigError([Problem("target.num_slices", what, "use launch=jobset, xpk or tpu_vm")])
    return {
        "accelerators": _slice_name(plan, names, pattern=names.sky),
        "accelerator_args": {"runtime_version": names.runtime, "tpu_vm": True},
    }


def _tpu_names(plan: LaunchPlan, engine: str) -> ChipNames:
    hosts = plan.hosts
    if hosts.kind is None or hosts.is_gpu:
        what = f"launch={engine} starts TPUs"
        raise ConfigError([Problem("target", what, "choose one, such as v5p-128, or launch=slurm or jobset")])
    names = chip_names(hosts.kind)
    if engine != "xpk" and names.gcloud is None:
        raise ConfigError([Problem("launch", f"{engine} has no {hosts.kind}", "use launch=jobset or launch=xpk")])
    return names


def _slice_name(plan: LaunchPlan, names: ChipNames, *, pattern: str | None = None, shaped: bool = False) -> str:
    """Returns an engine's name of a slice: v5litepod-256 for 16x16 chips of v5e. shaped: name a 3D slice by its
    topology, as xpk does. pattern: the engine's pattern; None: gcloud's."""
    hosts = plan.hosts
    if shaped and len(hosts.shape or ()) == 3:
        return f"{hosts.kind}-{'x'.join(map(str, hosts.shape or ()))}"
    chips = hosts.per_slice * (hosts.chips or 1)
    if not hosts.is_usual_shape:
        shape = "x".join(map(str, hosts.shape or ()))
        what = f"the engine names a slice by its size, and {shape} is not the usual shape of it"
        raise ConfigError([Problem("target", what, f"use target={hosts.kind}-N, or launch=jobset or xpk")])
    return (pattern or names.gcloud or "").format(chips=chips, cores=chips * hosts.cores)


def _needs(launch: LaunchConfig, *keys: str) -> Iterator[Problem]:
    for key in keys:
        if getattr(launch, key) is None:
            yield Problem(f"launch.{key}", "is not set", f"set launch.{key}=...")


def _place(plan: LaunchPlan) -> Iterator[Problem]:
    if not plan.run_dir.startswith("/"):
        what = f"{plan.run_dir} is another folder on each host"
        yield Problem("launch.directory", what, "name a folder that all hosts see: /mnt/runs")


def _options(options: Mapping[str, str | None]) -> list[str]:
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()]
