"""Compares what the processes of a run are about to do, before the first step, and names each difference.

Devices would not notice one: processes with different programs wait for each other forever, and processes with
different seeds or learning rates diverge. Hashes are compared first; the rest is exchanged only if they differ.
"""

import hashlib
import json
import os
import platform
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from meshloom import __version__
from meshloom.compiler.core.errors import Problem
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.xla.programs import Programs, flat

from .distributed import Disagreement, Processes, name_processes

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
COMPILER_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # they change the compiled program, not the lowered one
# Keys of the spec that may differ between processes. Each host keeps compiled programs where it has room.
OF_ONE_PROCESS = ("distributed.process_id", "distributed.local_device_ids", "compilation_cache")
UNSET = "not set"


def check_same_declaration(spec: RunSpec, processes: Processes) -> None:
    """Raises Disagreement in all processes if one of them has another spec, version or compiler flag."""
    declaration = {
        "spec": {key: value for key, value in flat(spec.as_compared()) if key not in OF_ONE_PROCESS},
        "environment": environment_of_program(),
    }
    found = _all_if_different("spec", json.dumps(declaration, sort_keys=True), processes)
    if found:
        declarations = [json.loads(text) for text in found]
        keys = differences([each["spec"] for each in declarations], fix="give all processes the same overrides")
        fix = "give all processes the same packages and environment variables"
        raise Disagreement(keys + differences([each["environment"] for each in declarations], fix=fix))


def check_same_program(lowered: Programs, processes: Processes) -> None:
    """Raises Disagreement if a process has lowered another program from the same declaration."""
    if processes.count == 1:
        return
    hashes = {f"the lowered {name} program": _hash(program.as_text()) for name, program in lowered.items()}
    fix = "look for code of the model that depends on the process, on time or on the order of a set"
    _check_same("program", hashes, processes, fix=fix)


def check_same_data(identity: Mapping[str, Any], processes: Processes) -> None:
    """Raises Disagreement in all processes if one of them would read other data than the rest.

    identity: the identity of `Data`, which includes hashes of its contents, but not the rows that a process reads.
    """
    values = {key: _shown(value) for key, value in identity.items()}
    _check_same("data", values, processes, fix="give all processes the same files and the same tokenizer")


def environment_of_program() -> dict[str, str]:
    """Returns what the compiled program depends on besides the spec: versions, and flags of the compiler."""
    versions = {name: version(name) for name in PACKAGES}
    flags = {name: os.environ.get(name, UNSET) for name in COMPILER_FLAGS}
    return {"python": platform.python_version(), "meshloom": __version__, **versions, **flags}


def differences(values: Sequence[Mapping[str, str]], *, fix: str) -> list[Problem]:
    """Returns a Problem for each key whose value is not the same in all processes, the rarest value first.

    [{"seed": "0"}, {"seed": "0"}, {"seed": "1"}] -> "seed: 1 in process 2, 0 in processes 0, 1"
    """
    problems = []
    for key in dict.fromkeys(key for each in values for key in each):
        owners: dict[str, list[int]] = defaultdict(list)
        for index, each in enumerate(values):
            owners[each.get(key, UNSET)].append(index)
        if len(owners) > 1:
            groups = sorted(owners.items(), key=lambda group: (len(group[1]), group[1]))
            shown = [f"{value} in {name_processes(indices, len(values))}" for value, indices in groups]
            problems.append(Problem(key, ", ".join(shown), fix))
    return problems


def _check_same(name: str, values: Mapping[str, str], processes: Processes, *, fix: str) -> None:
    found = _all_if_different(name, json.dumps(values), processes)
    if found:
        raise Disagreement(differences([json.loads(text) for text in found], fix=fix))


def _all_if_different(name: str, text: str, processes: Processes) -> list[str]:
    """Returns the texts of all processes if they differ, otherwise nothing. Only then are texts exchanged."""
    hashes = processes.gather(f"{name}/hash", _hash(text))
    return processes.gather(f"{name}/text", text) if len(set(hashes)) > 1 else []


def _shown(value: Any) -> str:
    """Returns a value as JSON; a SHA-256 is shortened."""
    return value[:12] if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) else json.dumps(value)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
