"""Renders the commands and files of the declared engine.

Texts are Jinja templates, which quote values for the shell, and manifests are YAML (templates/).
`local` and `slurm` have started runs; the others were checked without a cluster (docs/launch.md, "What was tried").
They stay as they are, and no engine is added, until they have started one.
"""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any
from meshloom.compiler.core.key_paths import leaves
from meshloom.compiler.core.places import PUBLISHED
from meshloom.compiler.declare.hydra_settings import RUN_DIR
from meshloom.compiler.declare.launch_spec import (
    JobSetLaunch,
    LaunchConfig,
    LaunchSpec,
    LocalLaunch,
    SkyPilotLaunch,
    SlurmLaunch,
    TpuVmLaunch,
    XpkLaunch,
)
from meshloom.compiler.declare.overrides import parsed_or_none

from ..core.failures import ASKING, FINAL, HUNG, LOST, STORAGE
from .plan import ChipNames, LaunchPlan, chip_names

HOSTS = "hosts"  # the only replicated job; its name is a part of the pods' names (plan.py)
COORDINATOR_PORT = 8476
TPU_PORTS = (8471, 8080, 8482, 8431)  # between chips, between slices, for JAX's coordinator, for metrics
RESTARTED = (1, STORAGE, HUNG, LOST)  # 1: a crash of Python; xpk restarts after 42 and from 127 up by itself
SKY_WORDS = (
    'distributed.coordinator_address="\'$(echo "$SKYPILOT_NODE_IPS" | head -n1):8476\'"',
    'distributed.num_processes="$SKYPILOT_NUM_NODES"',
    'distributed.process_id="$SKYPILOT_NODE_RANK"',
)
HAS_SCHEMA = find_spec("kubeflow_trainer_api") is not None  # the published schema of JobSet
SECONDS_BETWEEN_STARTS = 30  # until the last coordinator has released its port


@dataclass(frozen=True)
class Rendering:
    """The command and the file that an engine gets. tool: the program that has to be installed. command: run in a
    directory with the file. file: the name of the file. text: its contents. folders: made first, for the engine's own
    files. notes: printed as well."""

    tool: str
    command: tuple[str, ...]
    file: str | None = None
    text: str = ""
    folders: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def render(launch: LaunchSpec, plan: LaunchPlan) -> Rendering:
    """Returns the command and the file for the declared engine. Raises ConfigError if something is missing."""
    name = plan.name
    match launch:
        case SlurmLaunch():
            made = _of_file("sbatch", f"{name}.sbatch", render_slurm(plan, launch))
            return replace(made, folders=(f"{plan.run_dir}/logs",))
        case JobSetLaunch():
            unchecked = () if HAS_SCHEMA else ("not checked against JobSet's schema: pip install 'meshloom[jobset]'",)
            made = _of_file("kubectl apply --filename", f"{name}.yaml", render_jobset(plan, launch))
            return replace(made, notes=unchecked)
        case TpuVmLaunch():
            return replace(_of_file("bash", f"{name}.sh", render_tpu_vm(plan, launch)), tool="gcloud")
        case XpkLaunch():
            return Rendering("xpk", xpk_command(plan, launch))
        case SkyPilotLaunch():
            return _of_file(f"sky jobs launch --yes --name {name}", f"{name}.yaml", render_skypilot(plan, launch))
        case LocalLaunch():
            raise TypeError(launch)


def _of_file(command: str, file: str, text: str) -> Rendering:
    """Returns the rendering of a command that takes one file as its last word."""
    words = (*command.split(), file)
    return Rendering(words[0], words, file, text)


def render_slurm(plan: LaunchPlan, launch: SlurmLaunch) -> str:
    """Returns the script for `sbatch`. SLURM queues a job again after a preemption, a time limit or a lost host."""
    options = [f"--output={plan.run_dir}/logs/slurm-%j.log"]
    return _slurm_script(plan, launch, options=options, command=plan.command(*_device_words(plan, launch)))


def render_slurm_array(
    elements: Sequence[tuple[LaunchPlan, str, str]], launch: SlurmLaunch, *, num_at_once: int | None, log: str
) -> str:
    """Returns the script of an array. Each of its elements is a run of its own, on hosts of the same kind.

    elements: plans, each with a file for its output and one for its exit code. log: the log of the script itself.
    """
    limit = f"%{num_at_once}" if num_at_once else ""
    options = [f"--array=0-{len(elements) - 1}{limit}", f"--output={log}"]
    runs = [(plan.command(*_device_words(plan, launch)), *files) for plan, *files in elements]
    return _slurm_script(elements[0][0], launch, options=options, elements=runs)


def _slurm_script(plan: LaunchPlan, launch: SlurmLaunch, **more: Any) -> str:
    per_host, chips = launch.processes_per_host, plan.hosts.chips
    if per_host > 1 and chips and not (plan.hosts.is_gpu and per_host == chips):
        each = f"1 or {chips}, a process for each GPU" if plan.hosts.is_gpu else "1"
        what = f"{per_host} processes do not share a host with {chips} chips of {plan.hosts.kind}"
        raise ConfigError([Problem("launch.processes_per_host", what, f"use {each}")])
    image = [f"--container-image={launch.image}"] if launch.image else []
    mounts = [f"--container-mounts={','.join(launch.mounts)}"] if launch.mounts else []
    # If a process fails, the others are ended after the grace period.
    srun = shlex.join(["srun", "--kill-on-bad-exit=0", f"--wait={launch.grace_seconds}", *image, *mounts])
    preempted = "|".join(str(128 + number) for number in ASKING)
    filled = {"plan": plan, "launch": launch, "srun": srun, "preempted": preempted, "elements": []} | more
    return _template("slurm.sh.jinja").render(final="|".join(map(str, FINAL)), **filled)


def _device_words(plan: LaunchPlan, launch: SlurmLaunch) -> list[str]:
    """Returns the override that gives one process all GPUs of its node; under SLURM, JAX would give it one."""
    if not plan.hosts.is_gpu or launch.processes_per_host > 1:
        return []
    return [shlex.quote(f"distributed.local_device_ids=[{','.join(map(str, range(plan.hosts.chips or 0)))}]")]


def render_jobset(plan: LaunchPlan, launch: JobSetLaunch) -> str:
    """Returns the manifest as YAML. Raises ConfigError if something is missing, or the schema refuses it.

    A slice is a Job, and a host is a pod. TPU hosts find each other by the variables that GKE sets, other hosts by the
    DNS name of the first pod. The whole set restarts when a pod fails, unless its exit code is final.
    """
    raise_if_any(_jobset_problems(plan, launch))
    hosts, is_tpu = plan.hosts, plan.hosts.chips is not None and not plan.hosts.is_gpu
    resource = "nvidia.com/gpu" if hosts.is_gpu else "google.com/tpu"
    selector = dict[str, str]()
    if hosts.kind and hosts.is_gpu:
        selector["cloud.google.com/gke-accelerator"] = chip_names(hosts.kind).gke
    elif hosts.kind:
        selector["cloud.google.com/gke-tpu-accelerator"] = chip_names(hosts.kind).gke
        selector["cloud.google.com/gke-tpu-topology"] = hosts.topology
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
    manifest = _filled(
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
    raise_if_any(schema_problems(manifest))
    return _as_yaml(manifest)


def _literal(text: str) -> str:
    """Returns text that Kubernetes leaves unchanged: it replaces $(NAME) in commands and values, and $$ is a dollar."""
    return text.replace("$(", "$$(")


def _jobset_problems(plan: LaunchPlan, launch: JobSetLaunch) -> Iterator[Problem]:
    if launch.image is None:
        yield Problem("launch.image", "is not set: a pod runs in a container", "set launch.image=REGISTRY/IMAGE:TAG")
    if not plan.run_dir.startswith("/"):
        what = f"{plan.run_dir} is in the container, and is lost with it"
        yield Problem("launch.directory", what, "name a folder of one of launch.volumes: /mnt/runs")
    elif not _is_mounted(plan.run_dir, launch):
        what = f"no volume is mounted at {plan.run_dir}, which all hosts write"
        fix = "set launch.volumes=[{kind: claim, name: NAME, mount: /mnt/runs}], or kind bucket or host"
        yield Problem("launch.volumes", what, fix)
    for key, path in _absolute_paths(plan.words):
        if not _is_mounted(path, launch):
            what = f"no volume is mounted at {path}, which {key} names: a container has its image's files alone"
            fix = f"mount a volume at {os.path.dirname(path)}, or above it, or name a path below a mount"
            yield Problem("launch.volumes", what, fix)
    if launch.spot and not plan.hosts.chips:
        yield Problem("launch.spot", "asks for spot nodes with chips, and the target has no chips", "leave it out")


def _is_mounted(path: str, launch: JobSetLaunch) -> bool:
    return any(f"{path}/".startswith(f"{volume.mount.rstrip('/')}/") for volume in launch.volumes)


def _absolute_paths(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the keys of overrides that name absolute paths, with each path; but for the run directory."""
    for parsed in filter(None, map(parsed_or_none, words)):
        if parsed.key_or_group == RUN_DIR or parsed.is_delete():
            continue
        for key, node in leaves(parsed.value(), parsed.key_or_group):
            for value in node if isinstance(node, list) else [node]:
                path = str(value).removeprefix(PUBLISHED)
                if path.startswith("/"):
                    yield key, path


def schema_problems(manifest: dict[str, Any]) -> Iterator[Problem]:
    """Yields the problems that the published schema of JobSet finds in a manifest, if its package is installed."""
    if not HAS_SCHEMA:
        return
    from kubeflow_trainer_api.models import jobset_v1alpha2_job_set as schema  # noqa: PLC0415 (it takes a second)
    from pydantic import ValidationError  # noqa: PLC0415

    fix = "correct the keys of launch that set it"
    try:
        read = schema.JobsetV1alpha2JobSet.from_dict(manifest)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            where = ".".join(map(str, detail["loc"]))
            yield Problem("launch", f"the JobSet is not valid at {where}: {detail['msg']}", fix)
        return
    assert read is not None
    for where in _lost(manifest, read.to_dict()):
        yield Problem("launch", f"the JobSet has no field {where}", fix)


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


def render_tpu_vm(plan: LaunchPlan, launch: TpuVmLaunch) -> str:
    """Returns a script that creates the slices, waits for them, and runs on all of their hosts.

    Each host restarts its process after an exit code that is not final. All hosts do the same: a lost host ends the
    processes of the others too.
    """
    names, count = _tpu_names(plan, "tpu_vm"), plan.hosts.num_slices
    raise_if_any(_cloud_problems(plan, launch, "zone"))
    where = [f"--zone={launch.zone}", *([f"--project={launch.project}"] if launch.project else [])]
    nodes = [plan.name] if count == 1 else [f"{plan.name}-{i}" for i in range(count)]
    named = [f"--node-id={plan.name}"] if count == 1 else [f"--node-count={count}", f"--node-prefix={plan.name}"]
    create = [
        *named,
        f"--accelerator-type={_slice_name(plan, names.gcloud)}",
        f"--runtime-version={launch.runtime_version or names.runtime}",
        *([] if launch.provisioning == "on_demand" else [f"--{launch.provisioning}"]),
        *_options(launch.options),
        *where,
    ]
    final, seconds = "|".join(map(str, FINAL)), SECONDS_BETWEEN_STARTS
    script = _template("restarting.sh.jinja").render(plan=plan, launch=launch, final=final, seconds=seconds)
    words = {"create": shlex.join(create), "where": shlex.join(where), "nodes": shlex.join(nodes)}
    return _template("tpu_vm.sh.jinja").render(plan=plan, launch=launch, script=script, **words)


def xpk_command(plan: LaunchPlan, launch: XpkLaunch) -> tuple[str, ...]:
    """Returns the command that creates the workload. xpk names a 3D slice by its topology."""
    names, hosts = _tpu_names(plan, "xpk"), plan.hosts
    raise_if_any(_cloud_problems(plan, launch, "cluster", "image"))
    is_3d = len(hosts.shape or ()) == 3
    options = {
        "workload": plan.name,
        **{key: value for key in ("cluster", "project", "zone", "priority") if (value := getattr(launch, key))},
        "tpu-type": f"{hosts.kind}-{hosts.topology}" if is_3d else _slice_name(plan, names.gcloud),
        "num-slices": str(hosts.num_slices),
        "docker-image": launch.image,
        "max-restarts": str(launch.max_restarts),
        "restart-on-exit-codes": ",".join(map(str, RESTARTED)),
    }
    variables = [f"--env={name}={value}" for name, value in plan.environment.items()]
    command = f"--command={' && '.join([*launch.setup, plan.command()])}"
    return "xpk", "workload", "create", *_options(options), *variables, *_options(launch.options), command


def render_skypilot(plan: LaunchPlan, launch: SkyPilotLaunch) -> str:
    """Returns a task of SkyPilot as YAML."""
    hosts, accelerators = plan.hosts, dict[str, Any]()
    raise_if_any(_cloud_problems(plan, launch))
    if hosts.kind and hosts.is_gpu:
        accelerators = {"accelerators": f"{chip_names(hosts.kind).sky}:{hosts.chips}"}
    elif hosts.kind:
        names = _tpu_names(plan, "skypilot")
        if hosts.num_slices > 1:
            what = "SkyPilot starts one TPU slice, and the target has several"
            raise ConfigError([Problem("target.num_slices", what, "use launch=jobset, xpk or tpu_vm")])
        arguments = {"runtime_version": names.runtime, "tpu_vm": True}
        accelerators = {"accelerators": _slice_name(plan, names.sky), "accelerator_args": arguments}
    is_told = hosts.count > 1 and (hosts.is_gpu or hosts.chips is None)
    task = _filled(
        "skypilot.yaml.jinja",
        plan=plan,
        launch=launch,
        is_told=is_told,
        accelerators=accelerators,
        variables=dict(plan.environment),
        command=plan.command(*(SKY_WORDS if is_told else ())),
    )
    return _as_yaml(task)


def _cloud_problems(plan: LaunchPlan, launch: LaunchConfig, *needed: str) -> Iterator[Problem]:
    for key in needed:
        if getattr(launch, key) is None:
            yield Problem(f"launch.{key}", "is not set", f"set launch.{key}=...")
    if not plan.run_dir.startswith("/"):
        what = f"{plan.run_dir} is another folder on each host"
        yield Problem("launch.directory", what, "name a folder that all hosts see: /mnt/runs")


def _tpu_names(plan: LaunchPlan, engine: str) -> ChipNames:
    hosts = plan.hosts
    if hosts.kind is None or hosts.is_gpu:
        what = f"launch={engine} starts TPUs"
        raise ConfigError([Problem("target", what, "choose one, such as v5p-128, or launch=slurm or jobset")])
    names = chip_names(hosts.kind)
    if engine != "xpk" and names.gcloud is None:
        raise ConfigError([Problem("launch", f"{engine} has no {hosts.kind}", "use launch=jobset or launch=xpk")])
    return names


def _slice_name(plan: LaunchPlan, pattern: str | None) -> str:
    """Returns an engine's name of a slice by its pattern: v5litepod-256 for 16x16 chips of v5e."""
    hosts = plan.hosts
    if not hosts.is_usual_shape:
        what = f"the engine names a slice by its size, and {hosts.topology} is not the usual shape of it"
        raise ConfigError([Problem("target", what, f"use target={hosts.kind}-N, or launch=jobset or xpk")])
    chips = hosts.per_slice * (hosts.chips or 1)
    return (pattern or "").format(chips=chips, cores=chips * hosts.cores)


def _options(options: Mapping[str, str | None]) -> list[str]:
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()]


@cache
def _template(name: str) -> Template:
    loader = PackageLoader("meshloom.runtime.launch", "templates")
    made = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters["quote"] = shlex.quote
    made.policies["json.dumps_kwargs"] = {"sort_keys": False}
    return made.get_template(name)


def _filled(name: str, **values: Any) -> dict[str, Any]:
    """Returns a YAML template filled in, without what is empty."""
    return _without_empty(yaml.safe_load(_template(name).render(**values)))


def _without_empty(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_empty(each) for each in node]
    if isinstance(node, str):  # JSON writes a character beyond U+FFFF as two halves, which YAML does not join
        return node.encode("utf-16", "surrogatepass").decode("utf-16")
    if not isinstance(node, dict):
        return node
    kept = {key: _without_empty(value) for key, value in node.items()}
    return {key: value for key, value in kept.items() if value not in (None, {}, [])}


class _Dumper(yaml.SafeDumper):
    """Writes YAML as a person would: scripts as blocks, nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _as_yaml(value: Any) -> str:
    """Returns the value as YAML, with keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10_000)
