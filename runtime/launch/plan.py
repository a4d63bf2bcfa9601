"""Plans a launch: hosts, processes, their environment and their command, from a declaration and its target.

    target=v5p-128 target.num_slices=2 -> 2 slices of 16 hosts, 4 chips and a process on each

An engine (engines.py) turns the plan into a job of its own.
"""

import hashlib
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from meshloom.compiler.core.errors import ConfigError, Problem, all_of
from meshloom.compiler.core.format import be, counted
from meshloom.compiler.core.key_paths import is_within
from meshloom.compiler.core.places import PlaceError, local_path
from meshloom.compiler.core.user_code import FLAG
from meshloom.compiler.declare.compose import Request
from meshloom.compiler.declare.hydra_settings import RUN_DIR
from meshloom.compiler.declare.launch_spec import LaunchSpec, LocalLaunch, SlurmLaunch
from meshloom.compiler.declare.overrides import overridden_key, override, parse_override
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.spec.flag_presets import read_environment
from meshloom.compiler.spec.own_config import own_config
from meshloom.compiler.spec.target_spec import CpuTarget, GpuTarget, TargetSpec, TpuTarget
from meshloom.compiler.xla.programs import FLAGS, UNSET
from meshloom.models.record import Record

from ..compile.artifact import read_artifact

# Kubernetes allows 63 characters for a pod's name, which JobSet makes from the job's: NAME-hosts-SLICE-HOST-abcde, with
# up to 3 digits for the slice and 4 for the host. xpk allows 40 for a workload.
MOST_CHARACTERS = 40
NUM_DIGITS = 6  # of the hash
# These keys say how a run is started, labelled or watched, not what it computes.
NOT_IN_NAME = (
    "run", "watchdog", "profile", "launch", "distributed", "logging", "compilation_cache", "artifact", "sweep", "tune",
)  # fmt: skip


@dataclass(frozen=True)
class Hosts:
    """The machines of a run.

    num_slices: the number of slices. per_slice: the hosts of each slice. chips: the chips of each host; None for
    simulated and attached devices. kind: the kind of chip, such as v5p. shape: chips along the axes of a slice.
    is_usual_shape: True if the size of a slice alone names this shape. cores: the cores of a chip, as names count them.
    """

    num_slices: int
    per_slice: int
    chips: int | None = None
    kind: str | None = None
    shape: tuple[int, ...] | None = None
    is_gpu: bool = False
    is_usual_shape: bool = True
    cores: int = 1

    @property
    def count(self) -> int:
        return self.num_slices * self.per_slice

    @property
    def topology(self) -> str:
        """Returns the shape of a slice as text: "4x4x4"."""
        return "x".join(map(str, self.shape or ()))

    def __str__(self) -> str:
        of = f" with {counted(self.chips, 'chip')} of {self.kind} each" if self.chips else ""
        slices = f"{counted(self.num_slices, 'slice')} of " if self.num_slices > 1 else ""
        return f"{slices}{counted(self.per_slice, 'host')}{of}"


@dataclass(frozen=True)
class LaunchPlan:
    """The plan of a launch. name: the name of the job. program: the words that start Meshloom. words: those after it,
    the same on every host. environment: variables of every process. run_dir: the run directory, for all hosts."""

    name: str
    hosts: Hosts
    program: tuple[str, ...]
    words: tuple[str, ...]
    environment: Mapping[str, str]
    run_dir: str

    def command(self, *more: str) -> str:
        """Returns the shell command of a process. more: words of this process alone, in shell syntax."""
        return " ".join([shlex.join([*self.program, *self.words]), *more])


def plan_launch(spec: RunSpec, request: Request, *, label: str, allowed: Sequence[str] = ()) -> LaunchPlan:
    """Returns the plan. Raises ConfigError if the requested hosts are not those of the target, no directory that all
    hosts share is named, or a declared artifact is damaged.

    request: declares the run. label: the readable part of the job's name. allowed: modules whose code the run may use.
    """
    declared = {key: value for key, value in spec.as_compared().items() if key not in NOT_IN_NAME}
    typed = [text for text in request.overrides if overridden_key(text) == RUN_DIR]  # another directory is another run
    name = job_name(label, [declared, typed])
    hosts, run_dir = all_of(lambda: find_hosts(spec.launch, spec.target), lambda: _run_dir(spec.launch, typed, name))

    def is_for_hosts(text: str) -> bool:
        key = overridden_key(text)
        return not (is_within(key, "launch") or key.startswith("launch@") or key == RUN_DIR)

    on_hosts = replace(request, overrides=tuple(filter(is_for_hosts, request.overrides)))
    variables = dict[str, str]()  # compile options are passed to the compiler instead
    if isinstance(spec.target, TpuTarget | GpuTarget):
        variables = read_environment("tpu" if isinstance(spec.target, TpuTarget) else "gpu", spec.target.chip.known_as)
    if spec.artifact and Path(spec.artifact).exists():  # it may be on the hosts alone
        compiled_with = read_artifact(Path(spec.artifact)).fingerprint.environment
        variables |= {name: compiled_with[name] for name in FLAGS if compiled_with.get(name, UNSET) != UNSET}
    return LaunchPlan(
        name=name,
        hosts=hosts,
        program=tuple(shlex.split(spec.launch.program)),
        words=("train", *words_of_train(on_hosts, allowed, override(RUN_DIR, run_dir))),
        environment={**variables, **spec.launch.environment},
        run_dir=run_dir,
    )


def find_hosts(launch: LaunchSpec, target: TargetSpec) -> Hosts:
    """Returns the hosts of the target; in a rehearsal each is played by one process. Raises ConfigError if other hosts
    were requested, or simulated devices do not divide over them."""
    if isinstance(launch, LocalLaunch):
        per_slice, rest = divmod(launch.num_processes, launch.num_slices)
        if rest:
            asked = counted(launch.num_processes, "process", "processes")
            what = f"{asked} cannot be {launch.num_slices} slices of equal size"
            raise ConfigError([Problem("launch.num_processes", what, f"use a multiple of {launch.num_slices}")])
        if not isinstance(target, CpuTarget):
            what = f"launch=local rehearses on simulated devices, and the target is {target.name}"
            fix = "use target=cpu-8; `meshloom train` needs no launch on one machine"
            raise ConfigError([Problem("target", what, fix)])
        hosts = Hosts(launch.num_slices, per_slice)
    elif isinstance(target, TpuTarget):
        network, size = target.network, math.prod(target.shape)
        chips = math.prod(min(size, most) for size, most in zip(target.shape, network.chips_per_host, strict=True))
        of_slice = size // chips, chips, target.chip.known_as, target.shape
        is_usual, cores = network.shape_of(size) == target.shape, target.chip.num_cores
        hosts = Hosts(target.num_slices, *of_slice, is_usual_shape=is_usual, cores=cores)
    elif isinstance(target, GpuTarget):
        of_host = min(target.shape[1], target.network.chips_per_host)
        num_hosts = target.shape[0] * -(-target.shape[1] // of_host)
        hosts = Hosts(1, num_hosts, of_host, target.chip.known_as, target.shape, is_gpu=True)
    else:
        hosts = Hosts(1, launch.num_hosts or 1)
    asked = hosts.count if isinstance(launch, LocalLaunch) else launch.num_hosts
    if asked is not None and asked != hosts.count:
        what = f"{counted(asked, 'host')} {be(asked)} not {target.name}, which is {hosts}"
        raise ConfigError([Problem("launch.num_hosts", what, "leave it out, or choose another target")])
    if isinstance(target, CpuTarget) and target.num_devices % hosts.count:
        do = "does" if target.num_devices == 1 else "do"
        what = f"{counted(target.num_devices, 'simulated device')} {do} not divide over {hosts.count} processes"
        more = hosts.count * (target.num_devices // hosts.count + 1)
        raise ConfigError([Problem("target", what, f"use cpu-{more}, or another number of processes")])
    return hosts


def _run_dir(launch: LaunchSpec, typed: Sequence[str], name: str) -> str:
    """Returns one directory for all hosts and restarts: the typed one, or one with the name of the run. `~` is this
    machine's home directory if the hosts share it."""
    key, place = "launch.directory", launch.directory
    if typed:
        key, place = RUN_DIR, str(parse_override(typed[-1]).value())
        if "${" in place:
            what = f"{place} is another directory on each host and at each restart"
            raise ConfigError([Problem(RUN_DIR, what, f"name one, or leave it out: it is launch.directory/{name}")])
        place = place.strip("'\"")
    if place is None:
        what = "is not set: all hosts write one run directory, and a restart continues there"
        raise ConfigError([Problem("launch.directory", what, "name a folder that all hosts see: /mnt/runs")])
    try:
        path = local_path(place)
    except PlaceError as error:
        raise ConfigError([Problem(key, error.what, error.fix)]) from error
    path = path if isinstance(launch, LocalLaunch | SlurmLaunch) else place
    return path if typed else str(PurePath(path) / name)


def job_name(label: str, declaration: Any) -> str:
    """Returns the name of a run: ("Llama 3 8B, v5p", {...}) -> "llama-3-8b-v5p-1f2e3d". It is a DNS label that begins
    with a letter, as Kubernetes requires.

    declaration: JSON values that are equal only for the same run.
    """
    digest = hashlib.sha256(json.dumps(declaration, sort_keys=True).encode()).hexdigest()[:NUM_DIGITS]
    words = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
    words = words if words[:1].isalpha() else f"run-{words}"
    return f"{words[: MOST_CHARACTERS - NUM_DIGITS - 1].strip('-')}-{digest}"


def words_of_train(request: Request, allowed: Sequence[str], *more: str) -> list[str]:
    """Returns the words after `meshloom train`. allowed: modules whose code it may run. more: overrides after those of
    the request."""
    words = [f"{FLAG}={','.join(allowed)}"] if allowed else []
    return [*words, *request.config_words, *request.overrides, *more]


class ChipNames(Record):
    """The names that engines have for a chip; None if an engine does not offer it."""

    gke: str
    gcloud: str | None
    runtime: str | None
    sky: str | None


def chip_names(chip: str) -> ChipNames:
    """Returns the names that engines have for a chip. Raises ConfigError if there are none."""
    found = own_config("launch/_chips.yaml")
    if chip not in found:
        what = f"the engines have no known name for {chip}"
        raise ConfigError([Problem("launch", what, f"choose a target of {', '.join(found)}")])
    return ChipNames.model_validate(found[chip])
