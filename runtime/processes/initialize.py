"""Starts `jax.distributed`: finds its arguments in the declaration and the environment, and reports its failures.

JAX detects clusters by itself. Added here: a process that is alone does not wait. A start that would leave each of
several processes alone, or one waiting for others that never come, is an error. Processes that did not come are named,
and so is a port that is taken.
"""

import errno
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import jax

from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any
from meshloom.compiler.declare.run_spec import DistributedSpec
from meshloom.compiler.spec.launchers import ADDRESS, LAUNCHERS, POD, Launcher, is_in_pod, launcher_of
from meshloom.compiler.spec.target_spec import TargetSpec

from ..core.failures import LOST, RunFailed
from .jax_private import TPU_CLUSTERS, Starter, joined, started_by
from .lost import Group, Lookout

ALONE = "or choose distributed=alone"
Arguments = dict[str, Any]  # of jax.distributed.initialize, without its timeouts
OTHER_NUMBERS = {"SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"}


def plan_start(spec: DistributedSpec, target: TargetSpec, environment: Mapping[str, str]) -> Arguments | None:
    """Returns the arguments with which this process joins the others: {"cluster_detection_method": "slurm"}; None if it
    is alone.

    Raises ConfigError if keys or environment say that there are others, but not how to find them.
    """
    environment = _checked(environment) if spec.cluster != "none" else environment
    keys = _keys(spec, environment)
    extra = {} if spec.local_device_ids is None else {"local_device_ids": list(spec.local_device_ids)}
    if spec.cluster not in ("auto", "none"):
        _check_started_by(spec.cluster, environment)
        return {"cluster_detection_method": spec.cluster, **keys, **extra}
    launcher = None if spec.cluster == "none" else launcher_of(environment)
    found = _launched(launcher, keys, environment) if launcher else _found(spec, target, keys, environment)
    return None if found is None else {**found, **extra}


def process_index(arguments: Arguments, environment: Mapping[str, str]) -> int:
    """Returns the index of this process before it joins the others. arguments: the result of `plan_start`."""
    if "process_id" in arguments:
        return int(arguments["process_id"])
    method = arguments.get("cluster_detection_method")
    if method in TPU_CLUSTERS:
        return int(TPU_CLUSTERS[method].get_process_id())
    environment = _checked(environment)
    launcher = launcher_of(environment)
    return int(environment.get(launcher.process_id, 0)) if launcher else 0


def _checked(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the variables that are not empty. Raises ConfigError with the numbers of launchers, which JAX reads too,
    that are not numbers."""
    given = {name: value for name, value in environment.items() if value.strip()}
    counts = {name for launcher in LAUNCHERS for name in (launcher.num_processes, launcher.process_id)}
    wrong = [name for name in sorted(counts | OTHER_NUMBERS) if not given.get(name, "0").strip().isdecimal()]
    fix = f"unset it, or start this process by the launcher that sets it, {ALONE}"
    raise_if_any(Problem(name, f"'{given[name]}' is not a whole number", fix) for name in wrong)
    return given


def _keys(spec: DistributedSpec, environment: Mapping[str, str]) -> Arguments:
    """Returns the keys that are set; JAX_COORDINATOR_ADDRESS counts as one of them. Raises ConfigError if they do not
    fit together."""
    address = spec.coordinator_address or environment.get(ADDRESS)
    problems = []
    port = address.rpartition(":")[2] if address is not None else "1"
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        what = f"'{address}' names no port, 1 to 65535"
        problems.append(Problem("distributed.coordinator_address", what, "give host:port, a free port of process 0"))
    if spec.num_processes is not None and spec.process_id is not None and spec.process_id >= spec.num_processes:
        what = f"{spec.process_id} is none of {spec.num_processes} processes"
        problems.append(Problem("distributed.process_id", what, f"use 0 to {spec.num_processes - 1}"))
    raise_if_any(problems)
    keys = {"coordinator_address": address, "num_processes": spec.num_processes, "process_id": spec.process_id}
    return {name: value for name, value in keys.items() if value is not None}


def _check_started_by(cluster: str, environment: Mapping[str, str]) -> None:
    """Raises ConfigError if this process cannot be part of the cluster that the declaration names."""
    reason = None
    if cluster == "mpi4py":
        reason = None if find_spec("mpi4py") else "package mpi4py is not installed"
    elif cluster in TPU_CLUSTERS:
        reason = None if TPU_CLUSTERS[cluster].is_env_present() else "this is not a host of a TPU slice"
    else:
        launcher = next(launcher for launcher in LAUNCHERS if launcher.name == cluster)
        needed = (*launcher.needs, launcher.num_processes, launcher.process_id)
        missing = [name for name in needed if name not in environment]
        reason = f"{', '.join(missing)} not set" if missing else None
    if reason:
        what = f"'{cluster}' did not start this process: {reason}"
        raise ConfigError([Problem("distributed.cluster", what, "use auto, or start it there")])


def _launched(launcher: Launcher, keys: Arguments, environment: Mapping[str, str]) -> Arguments | None:
    """Returns the arguments of a process that a launcher started; None if it is the only one."""
    count = int(environment[launcher.num_processes])
    if count == 1 and not keys:
        return None
    # In a shell that SLURM runs as a step of its own, SLURM_NTASKS is the number of tasks of the whole job.
    is_whole_step = int(environment.get("SLURM_STEP_NUM_TASKS", count)) == count
    if all(name in environment for name in launcher.needs) and is_whole_step:
        return {"cluster_detection_method": launcher.name, **keys}
    if "coordinator_address" in keys and launcher.process_id in environment:
        told = {"num_processes": count, "process_id": int(environment[launcher.process_id])}
        return {"cluster_detection_method": "deactivate", **told, **keys}
    if launcher.name == "slurm":
        what = f"SLURM gave this job {count} tasks, but this process was not started as one of them"
        raise ConfigError([Problem("distributed", what, f"start it by srun: `srun meshloom train ...`, {ALONE}")])
    what = f"{launcher.num_processes} says that {count} processes were started, and nothing says where the first is"
    fix = f"set distributed.coordinator_address=HOST:PORT, a free port on the first host, {ALONE}"
    raise ConfigError([Problem("distributed", what, fix)])


def _found(
    spec: DistributedSpec, target: TargetSpec, keys: Arguments, environment: Mapping[str, str]
) -> Arguments | None:
    """Returns the arguments of a process without a launcher: by keys, or as a pod or a host of a TPU slice."""
    if len(keys) == 3:
        return {"cluster_detection_method": "deactivate", **keys}
    if spec.cluster == "auto" and target.kind != "cpu":  # simulated devices have no slice
        for name, cluster in TPU_CLUSTERS.items():
            if cluster.is_env_present():
                return {"cluster_detection_method": name, **keys}
    if spec.cluster == "auto" and is_in_pod(environment):
        if find_spec("kubernetes"):
            return keys
        what = f"this is pod {environment[POD[1]]} of a Kubernetes Job, of which package kubernetes tells"
        fix = f"pip install 'jax[k8s]', set coordinator_address, num_processes and process_id, {ALONE}"
        raise ConfigError([Problem("distributed", what, fix)])
    if not keys:
        return None
    missing = [name for name in ("coordinator_address", "num_processes", "process_id") if name not in keys]
    what = f"{' and '.join(keys)} given without {' and '.join(missing)}, which no cluster tells here"
    fix = f"set {' and '.join(f'distributed.{name}' for name in missing)} too, or none of the three"
    raise ConfigError([Problem("distributed", what, fix)])


SECONDS_FOR_ANSWER = 5  # for the service to name missing processes before clients give up by themselves


def initialize(arguments: Mapping[str, Any], timeouts: DistributedSpec, lookout: Lookout) -> None:
    """Joins the other processes, with a lookout for what makes JAX end this one.

    arguments: the result of `plan_start`. Raises RunFailed if process 0 cannot listen at its port, and whatever JAX
    raises.
    """

    def service(start_service: Starter, address: str, count: int, **options: Any) -> Any:
        check_port_is_free(address)
        seconds = timeouts.initialization_timeout_seconds
        return start_service(address, count, cluster_register_timeout=seconds, **options)

    def client(make_client: Starter, address: str, index: int, **options: Any) -> Any:
        lookout.start(Group(index, joined().num_processes, address, timeouts))
        return make_client(address, index, **options)

    with started_by(service, client):
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=timeouts.initialization_timeout_seconds + SECONDS_FOR_ANSWER,
            heartbeat_timeout_seconds=timeouts.heartbeat_timeout_seconds,
            shutdown_timeout_seconds=timeouts.shutdown_timeout_seconds,
        )


def check_port_is_free(address: str) -> None:
    """Raises RunFailed if process 0 cannot listen at an address, "[::]:8476": JAX would crash by a memory fault.

    The next start may find the port free: its owner may be the last start of this run, which has not ended yet.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            # A connection that has ended does not hold the port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if ":" in host:
                with suppress(OSError):
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind((host, int(port)))
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            return  # such as a machine without IPv6: JAX may find a way
        reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be opened: {os.strerror(error.errno)}"
        what = f"port {port} of {socket.gethostname()} {reason}, and process 0 waits there for the others"
        fix = (
            f"`ss -ltnp sport = :{port}` shows who has it; end that, or give all processes another port "
            "(distributed.coordinator_address, or JAX_COORDINATOR_PORT)"
        )
        raise RunFailed(Problem("distributed", what, fix), LOST) from error
