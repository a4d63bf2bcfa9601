"""The typed config of `meshloom launch`: one class for each engine, and the keys that all of them need.

No program depends on these keys. The hosts follow from the target; an engine only says how to get them.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveInt

from meshloom.models.config import Config, mistake

from ..core.config_types import Text


def _as_text(value: Any) -> Any:
    """Returns a number as text: variables of an environment are text, and numbers are typed without quotes."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _variables(environment: dict[str, str]) -> dict[str, str]:
    wrong = [name for name in environment if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)]
    if not wrong:
        return environment
    raise mistake(f"'{wrong[0]}' is not the name of a variable", "use letters, digits and _")


Environment = Annotated[dict[Text, Annotated[str, BeforeValidator(_as_text)]], AfterValidator(_variables)]


class LaunchConfig(Config):
    """The keys that every engine has."""

    dry_run: bool | None  # print what would run, and run nothing; None: where the engine's tool is not installed
    program: Text  # the command that starts Meshloom on a host; its words are split as a shell does
    setup: tuple[Text, ...]  # shell lines that each host runs before
    environment: Environment  # variables of every process, besides those that the target needs
    directory: Text | None  # all hosts see it; the run is in a folder below it, unless hydra.run.dir says otherwise
    max_restarts: NonNegativeInt  # after a lost host or a crash; a mistake in the declaration is never tried again


class LocalLaunch(LaunchConfig):
    """Processes on this machine, with simulated devices: a rehearsal."""

    engine: Literal["local"]
    num_processes: PositiveInt
    num_slices: PositiveInt  # above 1, processes get the variables that GKE gives the hosts of several TPU slices


class SlurmLaunch(LaunchConfig):
    """A batch job of SLURM."""

    engine: Literal["slurm"]
    num_hosts: PositiveInt | None  # None: those of the target
    processes_per_host: PositiveInt  # of GPUs: 1, or one for each GPU
    partition: Text | None
    account: Text | None
    qos: Text | None
    time_limit: Text | None  # as SLURM writes it: 12:00:00
    grace_seconds: PositiveInt  # before the time limit the run is asked to save, and the job is queued again
    image: Text | None  # a container of Pyxis
    mounts: tuple[Text, ...]  # mounts of the container: /data:/data
    options: dict[Text, Annotated[str, BeforeValidator(_as_text)] | None]  # more of sbatch: {reservation: mine}


class Volume(Config):
    """Storage that every host of a JobSet sees."""

    kind: Literal[
        "claim", "bucket", "host"
    ]  # a persistent volume claim, a bucket by GKE's Cloud Storage FUSE, a folder
    name: Text  # of the claim or the bucket, or the path on the host
    mount: Annotated[Text, Field(pattern=r"^/")]


class JobSetLaunch(LaunchConfig):
    """A JobSet of Kubernetes: a slice is a Job, a host is a pod."""

    engine: Literal["jobset"]
    num_hosts: PositiveInt | None  # None: those of the target
    image: Text | None  # of the container; it has Meshloom and bash
    namespace: Text | None
    queue: Text | None  # of Kueue
    priority_class: Text | None
    service_account: Text | None
    volumes: tuple[Volume, ...]
    secrets: tuple[Text, ...]  # of Kubernetes: their keys are variables of every process
    spot: bool  # GKE's spot nodes
    host_network: bool  # needed by some clusters for several TPU slices; without it Workload Identity works
    grace_seconds: PositiveInt  # between SIGTERM and SIGKILL of a pod: time to save
    node_selector: dict[Text, Text]  # besides the chip's
    resources: dict[Text, Annotated[str, BeforeValidator(_as_text)]]  # of a host, besides its chips: {memory: 300Gi}
    labels: dict[Text, Text]  # of the JobSet and its pods
    annotations: dict[Text, Text]  # of the pods


class TpuVmLaunch(LaunchConfig):
    """Cloud TPU VMs, by queued resources and ssh to all workers."""

    engine: Literal["tpu_vm"]
    num_hosts: PositiveInt | None  # None: those of the target
    project: Text | None  # None: gcloud's own
    zone: Text | None
    runtime_version: Text | None  # of the hosts' software; None: the usual one of the chip
    provisioning: Literal["on_demand", "spot", "reserved"]
    options: dict[Text, Annotated[str, BeforeValidator(_as_text)] | None]  # more of `queued-resources create`
    delete_after: bool  # delete the slices when the run has ended


class XpkLaunch(LaunchConfig):
    """A workload of xpk, which makes a JobSet of its own."""

    engine: Literal["xpk"]
    num_hosts: PositiveInt | None  # None: those of the target
    cluster: Text | None
    project: Text | None
    zone: Text | None
    image: Text | None
    priority: Text | None
    options: dict[Text, Annotated[str, BeforeValidator(_as_text)] | None]  # further options of `xpk workload create`


class SkyPilotLaunch(LaunchConfig):
    """A managed job of SkyPilot."""

    engine: Literal["skypilot"]
    num_hosts: PositiveInt | None  # None: those of the target
    infra: Text | None  # such as gcp/us-central1 or kubernetes; None: the cheapest
    image: Text | None  # a container
    spot: bool
    workdir: Text | None  # a local folder that is copied to each host
    file_mounts: dict[Text, Text]  # places by their path on the hosts: {/mnt/runs: gs://my-bucket}


AnyLaunch = LocalLaunch | SlurmLaunch | JobSetLaunch | TpuVmLaunch | XpkLaunch | SkyPilotLaunch
LaunchSpec = Annotated[AnyLaunch, Field(discriminator="engine")]
