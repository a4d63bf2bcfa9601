"""Renders a batch script of SLURM, and a JobSet of Kubernetes: the engines that restart a run by its exit code.

SLURM queues a job again after a preemption, a time limit or a lost host. In a JobSet a slice is a Job, and a host is a
pod. TPU hosts find each other by the variables that GKE sets, other hosts by the DNS name of the first pod. The whole
set restarts when a pod fails, unless its exit code is final.
"""

import shlex
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any
from meshloom.compiler.declare.launch_spec import JobSetLaunch, SlurmLaunch

from ..core.failures import FINAL, PREEMPTED
from .plan import LaunchPlan, chip_names
from .templates import as_yaml, filled, template

HOSTS = "hosts"  # the only replicated job; its name is a part of the pods' names (plan.py)
COORDINATOR_PORT = 8476
TPU_PORTS = (8471, 8080, 8482, 8431)  # between chips, between slices, for JAX's coordinator, for metrics


def render_slurm(plan: LaunchPlan, launch: SlurmLaunch) -> str:
    """Returns the script for `sbatch`."""
    return _render_script(
        plan,
        launch,
        options=[f"--output={plan.run_dir}/logs/slurm-%j.log"],
        command=plan.command(*_device_words(plan, launch)),
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
            "command": plan.command(*_device_words(plan, launch)),
            "output": shlex.quote(output),
            "exit_file": shlex.quote(exit_file),
            "failures": shlex.quote(f"{exit_file}.failures"),
        }
        for plan, output, exit_file in elements
    ]
    options = [f"--array=0-{len(elements) - 1}{limit}", f"--output={log}"]
    return _render_script(first, launch, options=options, elements=runs)


def _render_script(plan: LaunchPlan, launch: SlurmLaunch, **more: Any) -> str:
    per_host, chips = launch.processes_per_host, plan.hosts.chips
    if per_host > 1 and chips and not (plan.hosts.is_gpu and per_host == chips):
        each = f"1 or {chips}, a process for each GPU" if plan.hosts.is_gpu else "1"
        what = f"{per_host} processes do not share a host with {chips} chips of {plan.hosts.kind}"
        raise ConfigError([Problem("launch.processes_per_host", what, f"use {each}")])
    image = [f"--container-image={launch.image}"] if launch.image else []
    mounts = [f"--container-mounts={','.join(launch.mounts)}"] if launch.mounts else []
    return template("slurm.sh.jinja").render(
        plan=plan,
        launch=launch,
        environment={name: shlex.quote(value) for name, value in plan.environment.items()},
        # If a process fails, the others are ended after the grace period.
        srun=shlex.join(["srun", "--kill-on-bad-exit=0", f"--wait={launch.grace_seconds}", *image, *mounts]),
        final="|".join(map(str, FINAL)),
        preempted=PREEMPTED,
        **more,
    )


def _device_words(plan: LaunchPlan, launch: SlurmLaunch) -> list[str]:
    """Returns the override that gives one process all GPUs of its node; under SLURM, JAX would give it one."""
    if not plan.hosts.is_gpu or launch.processes_per_host > 1:
        return []
    return [shlex.quote(f"distributed.local_device_ids=[{','.join(map(str, range(plan.hosts.chips or 0)))}]")]


def render_jobset(plan: LaunchPlan, launch: JobSetLaunch) -> str:
    """Returns the manifest as YAML. Raises ConfigError if something is missing, or the schema refuses it."""
    manifest = build_jobset(plan, launch)
    raise_if_any(schema_problems(manifest))
    return as_yaml(manifest)


def build_jobset(plan: LaunchPlan, launch: JobSetLaunch) -> dict[str, Any]:
    """Returns the manifest. Raises ConfigError if something is missing."""
    raise_if_any(_problems(plan, launch))
    hosts, is_tpu = plan.hosts, plan.hosts.chips is not None and not plan.hosts.is_gpu
    resource = "nvidia.com/gpu" if hosts.is_gpu else "google.com/tpu"
    selector = dict[str, str]()
    if hosts.kind and hosts.is_gpu:
        selector["cloud.google.com/gke-accelerator"] = chip_names(hosts.kind).gke
    elif hosts.kind:
        selector["cloud.google.com/gke-tpu-accelerator"] = chip_names(hosts.kind).gke
        selector["cloud.google.com/gke-tpu-topology"] = "x".join(map(str, hosts.shape or ()))
    spot = {"cloud.google.com/gke-spot": "true"} if launch.spot else {}
    buckets = {"gke-gcsfuse/volumes": "true"} if any(each.kind == "bucket" for each in launch.volumes) else {}
    words = []  # on a TPU, JAX reads GKE's variables instead
    if not is_tpu and hosts.count > 1:
        first = f"{plan.name}-{HOSTS}-0-0.{plan.name}:{COORDINATOR_PORT}"
        words = [
            shlex.quote(f"distributed.coordinator_address='{first}'"),
            f"distributed.num_processes={hosts.count}",
            'distributed.process_id="$JOB_COMPLETION_INDEX"',
        ]
    # exec: SIGTERM reaches the run, and its exit code is the container's.
    script = "\n".join(["set -e", *launch.setup, f"exec {plan.command(*words)}"])
    return filled(
        "jobset.yaml.jinja",
        plan=plan,
        launch=launch,
        hosts=hosts,
        is_tpu=is_tpu,
        hosts_name=HOSTS,
        final=FINAL,
        annotations=launch.annotations | buckets,
        node_selector=selector | spot | launch.node_selector,
        resource=resource,
        script=_literal(script),
        variables={name: _literal(value) for name, value in plan.environment.items()},
        ports=TPU_PORTS if is_tpu else (COORDINATOR_PORT,),
        limits=({resource: str(hosts.chips)} if hosts.chips else {}) | launch.resources,
    )


def schema_problems(manifest: dict[str, Any]) -> Iterator[Problem]:
    """Yields the problems that the published schema of JobSet finds in a manifest, if its package is installed."""
    if not is_schema_there():
        return
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import (  # noqa: PLC0415 (it takes a second)
        JobsetV1alpha2JobSet,
    )
    from pydantic import ValidationError  # noqa: PLC0415

    fix = "correct the keys of launch that set it"
    try:
        read = JobsetV1alpha2JobSet.from_dict(manifest)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            where = ".".join(map(str, detail["loc"]))
            yield Problem("launch", f"the JobSet is not valid at {where}: {detail['msg']}", fix)
        return
    assert read is not None
    for where in _lost(manifest, read.to_dict()):
        yield Problem("launch", f"the JobSet has no field {where}", fix)


def is_schema_there() -> bool:
    """Returns True if the published schema of JobSet is installed."""
    return find_spec("kubeflow_trainer_api") is not None


def _lost(given: Any, read: Any, path: str = "") -> Iterator[str]:
    """Yields the fields that a typed reader has dropped, as it does not know them."""
    if isinstance(given, dict) and isinstance(read, dict):
        for key, value in given.items():
            if key not in read:
                yield f"{path}{key}"
            else:
                yield from _lost(value, read[key], f"{path}{key}.")
    elif isinstance(given, list) and isinstance(read, list):
        for index, (one, other) in enumerate(zip(given, read, strict=True)):
            yield from _lost(one, other, f"{path}{index}.")


def _problems(plan: LaunchPlan, launch: JobSetLaunch) -> Iterator[Problem]:
    if launch.image is None:
        yield Problem("launch.image", "is not set: a pod runs in a container", "set launch.image=REGISTRY/IMAGE:TAG")
    if not plan.run_dir.startswith("/"):
        what = f"{plan.run_dir} is in the container, and is lost with it"
        yield Problem("launch.directory", what, "name a folder of one of launch.volumes: /mnt/runs")
    elif not any(_is_below(plan.run_dir, volume.mount) for volume in launch.volumes):
        what = f"no volume is mounted at {plan.run_dir}, which all hosts write"
        fix = "set launch.volumes=[{kind: claim, name: NAME, mount: /mnt/runs}], or kind bucket or host"
        yield Problem("launch.volumes", what, fix)
    if launch.spot and not plan.hosts.chips:
        yield Problem("launch.spot", "asks for spot nodes with chips, and the target has no chips", "leave it out")


def _is_below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _literal(text: str) -> str:
    """Returns text that Kubernetes leaves unchanged: it replaces $(NAME) in commands and values, and $$ is a dollar."""
    return text.replace("$(", "$$(")
