"""A small declaration has what the declared one has, as far as it decides the program."""

import pytest

from meshloom.compiler.check.same_program import SameProgram
from meshloom.compiler.check.shrink import Shrinking
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.pipeline.table_file import write_table
from support.programs import plan_as_declared

CASES = {
    "dense": ("model=llama3_70b", "target=v5p-256", "sharding=fsdp_tensor", "mesh.tensor=4", "remat=full",
              "global_batch_size=64"),
    "windows": ("model=gemma3_1b", "target=v5e-16", "sequence_length=4096", "global_batch_size=64"),
    "experts": ("model=qwen3_30b_a3b", "target=v6e-64", "sharding=fsdp_expert", "mesh.expert=8",
                "sequence_length=4096", "global_batch_size=64"),
    "latent": ("model=deepseek_v2_lite", "target=v5p-64", "sharding=fsdp_expert", "mesh.expert=8",
               "global_batch_size=64"),
    "stages": ("model=llama3_8b", "target=v5p-64", "mesh.stage=4", "num_microbatches=8", "global_batch_size=64"),
}  # fmt: skip


@pytest.fixture(scope="module")
def shrunk():
    cache = {}

    def get(name):
        if name not in cache:
            declared = plan_as_declared(*CASES[name])
            cache[name] = declared, Shrinking(declared).shrunk()
        return cache[name]

    return get


@pytest.mark.parametrize("name", CASES)
def test_each_axis_of_several_devices_has_two(name, shrunk):
    declared, small = shrunk(name)
    assert small.plan.mesh.sizes == {axis: min(size, 2) for axis, size in declared.mesh.sizes.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_same_axes_split_the_same_dimensions(name, shrunk):
    declared, small = shrunk(name)
    assert not list(SameProgram(declared, small.plan).other_layouts())


def test_what_decides_the_program_stays(shrunk):
    for name in CASES:
        declared, small = shrunk(name)
        for key in ("remat", "sharding", "data", "optimizer", "objective", "precision"):
            assert getattr(small.plan.spec, key) == getattr(declared.spec, key), (name, key)
        assert small.plan.spec.overlap.layers == declared.spec.overlap.layers


def test_kinds_of_layers_stay(shrunk):
    _, windows = shrunk("windows")
    model = windows.plan.spec.model
    assert model.num_layers >= len(model.attention_windows) == 6
    assert [each is None for each in model.attention_windows] == [False] * 5 + [True]
    assert max(each for each in model.attention_windows if each) < windows.plan.spec.sequence_length
    declared, latent = shrunk("latent")
    assert latent.plan.spec.model.latent_attention is not None
    assert latent.plan.spec.model.num_dense_layers == 1
    assert [s.name for s in latent.plan.model.stacks] == [s.name for s in declared.model.stacks]


def test_a_loop_that_prefetches_has_more_periods_of_windows_than_it_gathers_ahead():
    declared = plan_as_declared(
        "target=cpu-2", "sharding=fsdp", "model.num_layers=12", "model.attention_windows=[16,null]",
        "overlap=prefetch", "overlap.layers.prefetch=2",
    )  # fmt: skip
    small = Shrinking(declared).shrunk().plan
    assert [stack.num_layers for stack in small.model.stacks] == [4]
    assert small.spec.model.model_dump()["num_layers"] == 8


def test_nothing_is_large(shrunk):
    for name in CASES:
        _, small = shrunk(name)
        assert small.plan.num_parameters < 300_000, name
        assert all(cut.why for cut in small.cuts)


def test_strategies_of_other_compilers_are_named(shrunk):
    declared, small = shrunk("experts")
    assert declared.operation("attention").chosen.name == "splash"
    assert any("instead of splash" in text for text in small.replaced)


def test_a_table_of_many_stages_cannot_shrink(tmp_path):
    table = tmp_path / "table.csv"
    plan = plan_as_declared("target=cpu-8", "mesh.fsdp=1", "mesh.stage=8", "model.num_layers=8", "num_microbatches=16")
    assert plan.pipeline is not None
    table.write_text(write_table(plan.pipeline.table))
    own = plan_as_declared(
        "target=cpu-8", "mesh.fsdp=1", "mesh.stage=8", "model.num_layers=8", "num_microbatches=16",
        f"pipeline.table={table}",
    )  # fmt: skip
    with pytest.raises(ConfigError) as error:
        Shrinking(own).shrunk()
    (problem,) = error.value.problems
    assert problem.where == "pipeline.table"
    assert "8 stages" in problem.what
    assert "pipeline.schedule=1f1b" in problem.fix


def _refused(declared):
    try:
        Shrinking(declared).shrunk()
    except ConfigError as error:
        return str(error)
    return None


BLOCKS = {
    "context": ("model=llama3_8b", "sharding=fsdp_context", "mesh.context=2", "parallel.context=all_gather"),
    "latent": ("model=deepseek_v2_lite", "sharding=fsdp"),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_types_with_blocks_shrink_to_sizes_that_blocks_divide(case):
    keys = ("target=b200-8", "global_batch_size=16", "sequence_length=4096", *BLOCKS[case])
    for name in ("mxfp8", "nvfp4"):
        declared = plan_as_declared(*keys, f"precision={name}")
        assert not _refused(declared)
        small = Shrinking(declared).shrunk().plan

        def in_blocks(plan):
            return {each.site.name for each in plan.operations if each.precision and each.precision.arithmetic}

        assert in_blocks(small) == in_blocks(declared) != set()
