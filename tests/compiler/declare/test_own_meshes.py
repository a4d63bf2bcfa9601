"""A sharding without a mesh of its name gets one that splits what its rules split."""

from pathlib import Path

import pytest
import yaml

from meshloom import conf
from meshloom.compiler.declare.own_meshes import mesh_for

FOLDER = Path(conf.__path__[0])
ALONE = ("ddp", "fsdp", "tensor", "zero1", "zero2")  # whose own mesh needs no choice of the user


@pytest.mark.parametrize("name", ALONE)
def test_a_copy_of_a_sharding_has_the_mesh_of_the_original(name):
    chosen = mesh_for(_read("sharding", name).values())
    assert _read("mesh", chosen) == _read("mesh", name)


@pytest.mark.parametrize("name", ["fsdp_tensor", "fsdp_expert", "fsdp_context", "hsdp"])
def test_of_several_axes_fsdp_has_all_devices(name):
    assert mesh_for(_read("sharding", name).values()) == "fsdp"


def test_rules_of_the_batch_choose_no_mesh():
    assert mesh_for([[{"logical": ["batch"], "mesh": ["replica", "data", "fsdp"]}]]) == "ddp"


def _read(group: str, name: str) -> dict:
    """Returns the keys of a file over those of the file that its defaults name."""
    own = yaml.safe_load((FOLDER / group / f"{name}.yaml").read_text())
    first, *_ = own.pop("defaults", ["_self_"])
    return own if first == "_self_" else _read(group, first) | own
