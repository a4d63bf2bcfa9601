"""A composition that is kept is the one that Hydra makes."""

import pytest

from meshloom.compiler.config.compose import Request, read_spec
from meshloom.compiler.config.kept_compositions import compositions_kept
from meshloom.compiler.config.model_choice import model_of
from meshloom.compiler.core.errors import ConfigError

LINES = [
    ("seed=3",),
    ("model.num_layers=2", "mesh.tensor=2", "sharding=fsdp_tensor"),
    ("sharding=fsdp_tensor", "mesh.tensor=4"),
    ("notes={a: 1}", "++notes.b=${seed}", "seed=5"),
    ("~model.num_kv_heads", "+model.num_kv_heads=2"),
    ("model=llama3_8b", "target=v5e-16", "remat=full"),
    ("experiment=smoke", "num_steps=7"),
    ("compiler_options.xla_a=1", "compiler_options.xla_b=2"),
    ("compiler_options={xla_c: 3}",),
    ("seed=3",),
]


@pytest.mark.ci
def test_kept_compositions_are_those_of_hydra():
    """In this order each comes after another of the same choices, whose values must not be left in it."""
    fresh = [(read_spec(Request(line), lambda spec: spec), model_of(Request(line))) for line in LINES]
    with compositions_kept():
        for _ in range(2):
            kept = [(read_spec(Request(line), lambda spec: spec), model_of(Request(line))) for line in LINES]
            assert kept == fresh


@pytest.mark.parametrize("line", [("seed=x",), ("model.num_layers.deep=1",), ("seed=${nobody}",), ("model=nobody",)])
def test_mistakes_are_the_same(line):
    def said() -> str:
        with pytest.raises(ConfigError) as caught:
            read_spec(Request(line), lambda spec: spec)
        return str(caught.value)

    fresh = said()
    with compositions_kept():
        read_spec(Request(()), lambda spec: spec)
        assert said() == fresh
        assert said() == fresh
