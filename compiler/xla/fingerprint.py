"""Identifies a compiled program: equal fingerprints mean the same program for the same devices.

The text of the lowered program says all that a declaration, a model's code and the version of Meshloom have to do with
it; so it is what is compared, as a hash. The step of the declaration (StepSpec) is kept beside it for one purpose: to
name the keys that make two texts differ. Where it runs is compared as what it comes to: devices, compiler options and
the sizes of the mesh, so that mesh.fsdp=-1 is mesh.fsdp=8 on eight devices.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from ..core.config_types import CompilerOption
from ..core.errors import Problem
from ..core.key_paths import leaves
from ..pipeline.table_file import write_table
from ..plan import Plan
from ..spec.step_spec import StepSpec
from .programs import Programs

PACKAGES = ("jax", "jaxlib")
PLUGINS = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-pjrt", "jax-cuda12-pjrt")}  # where the compiler of a platform is
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # they change the compiled program, not the lowered one
UNSET = "not set"


@dataclass(frozen=True)
class Fingerprint:
    """programs: SHA-256 of each lowered text. devices, environment: what they are compiled for, and by.
    compiler_options: those declared, by name or in sets; options_without_device: those added where the devices are not
    there. spec: the keys of the step, and the sizes of the mesh, each value as JSON."""

    programs: Mapping[str, str]
    devices: Mapping[str, str]
    environment: Mapping[str, str]
    compiler_options: Mapping[str, CompilerOption]
    options_without_device: Mapping[str, CompilerOption]
    spec: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Returns one text for everything that decides the compiled program."""
        return sha256(json.dumps(asdict(self) | {"spec": None}, sort_keys=True))


def fingerprint_of(plan: Plan, lowered: Programs, mesh: Mesh) -> Fingerprint:
    """Returns the fingerprint of lowered programs, before they are compiled."""
    own_table, file = dict[str, str](), plan.spec.pipeline.table
    if plan.pipeline is not None and file is not None:  # a table of the user's own has its contents beside its name
        own_table["pipeline.table"] = json.dumps(f"{file} ({sha256(write_table(plan.pipeline.table))[:12]})")
    return Fingerprint(
        programs={name: sha256(program.as_text()) for name, program in lowered.items()},
        devices=describe_devices(mesh),
        environment=describe_environment(mesh.devices.flat[0].platform),
        compiler_options=lowered.compiler_options,
        options_without_device=lowered.options_without_device,
        spec=dict(flat(StepSpec.of(plan.spec).as_compared() | {"mesh": dict(plan.mesh.sizes)})) | own_table,
    )


def describe_devices(mesh: Mesh) -> dict[str, str]:
    """Returns kind, number and order in the mesh of the devices."""
    devices = list(mesh.devices.flat)
    first = devices[0]
    places = [[getattr(d, name, None) for name in ("coords", "core_on_chip", "slice_index")] for d in devices]
    if not hasattr(first, "coords"):
        places = [[d.id, d.process_index] for d in devices]
    described = {
        "platform": first.platform,
        "kind": first.device_kind,
        "num_devices": str(len(devices)),
        "arrangement": sha256(json.dumps(places)),
    }
    return described | ({"processor": _processor()} if first.platform == "cpu" else {})


def describe_environment(platform_name: str) -> dict[str, str]:
    """Versions of the compiler, and flags that it takes from environment variables."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    plugin = plugin_version(platform_name)
    flags = {name: os.environ.get(name, UNSET) for name in FLAGS}
    return versions | ({"plugin": plugin} if plugin else {}) | flags


def plugin_version(platform_name: str) -> str | None:
    """Returns the compiler, such as "libtpu 0.0.42.1"; None if it is part of jaxlib."""
    for name in PLUGINS.get(platform_name, ()):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return None


def differences(wanted: Fingerprint, found: Fingerprint, *, folder: str, fix: str) -> list[Problem]:
    """Returns the differences between the programs in `folder`, of fingerprint `found`, and the wanted ones; empty if
    they are the same. Programs that were not compiled there are not compared."""
    problems = []
    for name, ours, theirs in (
        ("devices", wanted.devices, found.devices),
        ("environment", wanted.environment, found.environment),
        ("compiler_options", wanted.compiler_options, found.compiler_options),
    ):
        problems += _different(name, ours, theirs, folder, fix)
    others = [name for name, text in found.programs.items() if wanted.programs.get(name) != text]
    if others:
        keys = list(_different("", wanted.spec, found.spec, folder, fix))
        what = f"the {' and '.join(others)} program of {folder} is another, though no key of the declaration is"
        unnamed = Problem("artifact", what, "the code of the model or of Meshloom has changed: compile it again")
        problems += keys or ([] if problems else [unnamed])
    return problems


def flat(values: Any) -> Iterable[tuple[str, str]]:
    """Yields keys with values as JSON: {"optimizer": {"b1": 0.9}} -> ("optimizer.b1", "0.9"). Lists are values, and so
    is a group without keys."""
    return ((key, json.dumps(value)) for key, value in leaves(values))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _different(
    name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], folder: str, fix: str
) -> Iterable[Problem]:
    for key in dict.fromkeys([*ours, *theirs]):
        here, there = ours.get(key, UNSET), theirs.get(key, UNSET)
        if here != there:
            where = f"{name}.{key}" if name else key
            yield Problem(where, f"{_short(here)} here, {_short(there)} in {folder}", fix)


def _short(value: Any) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 and " " not in text else text


def _processor() -> str:
    """Returns the instructions that this machine's processor has: a program for one CPU may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.machine()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {sha256(' '.join(sorted(flags.split())))[:12]}"
