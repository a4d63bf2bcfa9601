"""Shardings share one table of rules, and each names its mesh; one that names none gets a mesh that splits what its
rules split."""

import shutil
from pathlib import Path

import pytest

from meshloom import conf
from meshloom.compiler.declare.compose import Request, mesh_for, read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.spec.sharding_spec import Rule, rules_over, with_rules_of_others
from support.tiers import tiered

FOLDER = Path(conf.__path__[0])
SHARDINGS = sorted(path.stem for path in FOLDER.glob("sharding/[!_]*.yaml"))
ALONE = ("ddp", "fsdp", "tensor", "zero1", "zero2")  # whose own mesh needs no choice of the user


def read(*overrides: str, config_path: Path | None = None) -> RunSpec:
    request = Request(overrides, config_path=str(config_path) if config_path else None)
    return read_spec(request, then=lambda spec: spec)


def places(own: Path) -> str:
    return f"hydra.searchpath=[meshloom://targets,file://{own}]"


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize("name", [*ALONE, "fsdp_tensor"])
def test_a_sharding_that_names_no_mesh_has_that_of_its_axes(name, tmp_path):
    """If there are several axes, fsdp has all devices."""
    original = read(f"sharding={name}")
    (tmp_path / "sharding").mkdir()
    (tmp_path / "sharding/mine.yaml").write_text(original.sharding.model_dump_json())  # JSON is YAML, too
    copy = read("sharding=mine", places(tmp_path))
    assert copy.sharding == original.sharding
    assert copy.mesh == (original.mesh if name in ALONE else read("mesh=fsdp").mesh)


def test_a_mesh_of_the_same_name_is_taken(tmp_path):
    (tmp_path / "sharding").mkdir()
    (tmp_path / "mesh").mkdir()
    (tmp_path / "sharding/mine.yaml").write_text(read().sharding.model_dump_json())
    (tmp_path / "mesh/mine.yaml").write_text("defaults: [_axes, _self_]\nfsdp: 4\ndata: 2\n")
    own = places(tmp_path)
    assert (read("sharding=mine", own).mesh.fsdp, read("sharding=mine", own).mesh.data) == (4, 2)
    assert read("sharding=mine", "mesh=ddp", own).mesh.data == -1


def test_rules_of_the_batch_choose_no_mesh():
    assert mesh_for({"activations": [{"logical": ["batch"], "mesh": ["replica", "data", "fsdp"]}]}) == "ddp"


def test_axes_that_a_sharding_does_not_use_choose_no_mesh():
    rules = [{"logical": ["embed"], "mesh": ["fsdp", "data"]}, {"logical": ["mlp"], "mesh": ["tensor"]}]
    assert mesh_for({"mesh_axes": None, "parameters": rules}) == "fsdp"
    assert mesh_for({"mesh_axes": ["replica", "tensor"], "parameters": rules}) == "tensor"


@pytest.mark.parametrize("name", tiered(SHARDINGS, plain=["fsdp"], ci=["fsdp_tensor", "fsdp_expert", "zero2"]))
def test_a_new_logical_axis_edits_one_file(name, tmp_path):
    """Every sharding lays it out in all three tables after one line of one file; a table of its own needs the line,
    too."""
    own = tmp_path / "conf"
    shutil.copytree(FOLDER, own)
    files = {"_base", *({name} & {"fsdp_2d"})}
    for file in (own / f"sharding/{each}.yaml" for each in files):
        file.write_text(file.read_text().replace("head_dim]", "head_dim, state]"))
    found = read(f"sharding={name}", config_path=own).sharding
    for table in (found.parameters, found.optimizer, found.activations):
        assert [rule.mesh for rule in table if "state" in rule.logical] == [()]


def test_a_table_of_some_mesh_axes_leaves_the_others_out():
    """By hand. `mlp` has a rule left, `heads` has none and is whole, and of two rules that are alike there is one."""
    rules = (
        Rule(logical=("heads",), mesh=("tensor",)),
        Rule(logical=("embed",), mesh=("fsdp", "expert")),
        Rule(logical=("embed",), mesh=("fsdp",)),
        Rule(logical=("mlp",), mesh=("expert",)),
        Rule(logical=("mlp",), mesh=("data",)),
        Rule(logical=("layers",), mesh=()),
    )
    assert rules_over(rules, None) == rules
    assert rules_over(rules, ("data", "fsdp")) == (
        Rule(logical=("embed",), mesh=("fsdp",)),
        Rule(logical=("mlp",), mesh=("data",)),
        Rule(logical=("layers", "heads"), mesh=()),
    )
    assert rules_over(rules[:1], ("data",)) == (Rule(logical=("heads",), mesh=()),)
    own = (Rule(logical=("embed",), mesh=("data",)),)
    assert with_rules_of_others(own, rules[-1:]) == (*own, rules[-1])
    assert with_rules_of_others(own, rules[1:3]) == own
    assert with_rules_of_others((), rules) == rules
