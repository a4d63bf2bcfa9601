"""Settles what a declaration of published weights leaves to a machine without an accelerator: its devices and types.

    target=auto    one device, unless a mesh, a sharding or processes are declared, or a launcher started several
                   processes; then eight simulated ones
    precision      float32 on one device of the processor, where none is chosen

Simulated devices are for trying a mesh. They share the cores of one machine, and copy and wait for each other. A
processor without instructions for bfloat16 converts weights to float32 at each matmul. With published weights somebody
wants the result, and both cost processor time (docs/results/local_speed.md).
"""

import os
from collections.abc import Collection, Mapping
from typing import Any

from ..core.key_paths import is_within
from ..core.places import is_published
from ..spec.attached import AUTO, SIMULATED
from ..spec.launchers import names_others
from ..spec.own_config import own_config
from .published_model import FAMILY

TYPES = "precision"
DECLARED = "bfloat16"
FASTER = "float32"
SPLITS = ("mesh", "sharding", "pipeline", "device_order")  # a word of these asks for several devices


def on_processor(
    values: dict[str, Any], choices: Mapping[str, Any], typed: Collection[str]
) -> tuple[dict[str, Any], str | None]:
    """Returns the values of a declaration with its target and precision, where it leaves them to this machine, and a
    line that says what was chosen; None if nothing was. choices: the option of each group. typed: the keys and groups
    of the overrides."""
    target, changes, others = values.get("target"), dict[str, Any](), list[str]()
    if not isinstance(target, dict) or target.get("kind") != "cpu" or not _has_published_weights(values):
        return values, None
    if choices.get("target") == AUTO and not (_has_word(SPLITS, typed) or _is_split(values) or _has_others(values)):
        changes["target"] = target = target | {"num_devices": 1}
        others.append(f"target={SIMULATED}")
    if target.get("num_devices") == 1 and choices.get(TYPES) == DECLARED and not _has_word((TYPES,), typed):
        changes[TYPES] = own_config(f"{TYPES}/{FASTER}.yaml")
        others.append(f"{TYPES}={DECLARED}")
    if not changes:
        return values, None
    types = f", {FASTER} (faster here than {DECLARED})" if TYPES in changes else ""
    return values | changes, f"for this machine's processor: one device{types}; {' or '.join(others)} sets another"


def _has_published_weights(values: Mapping[str, Any]) -> bool:
    model, checkpoint = values.get("model"), values.get("checkpoint")
    named = [checkpoint.get(key) for key in ("weights_from", "restore_from")] if isinstance(checkpoint, dict) else []
    return (isinstance(model, dict) and model.get("family") == FAMILY) or any(is_published(str(each)) for each in named)


def _has_word(keys: Collection[str], typed: Collection[str]) -> bool:
    return any(is_within(each.replace("/", "."), key) for each in typed for key in keys)


def _is_split(values: Mapping[str, Any]) -> bool:
    """Returns True if the mesh has an axis of a declared size. -1 is as many devices as there are."""
    mesh = values.get("mesh")
    return isinstance(mesh, dict) and any(size not in (1, -1) for size in mesh.values())


def _has_others(values: Mapping[str, Any]) -> bool:
    """Returns True if the declaration or the environment names other processes, over which devices are to divide."""
    declared = values.get("distributed")
    if not isinstance(declared, dict):
        return False
    keys = ("coordinator_address", "num_processes", "process_id")
    is_named = declared.get("cluster") not in ("auto", "none") or any(declared.get(key) is not None for key in keys)
    return is_named or (declared.get("cluster") == "auto" and names_others(os.environ))
