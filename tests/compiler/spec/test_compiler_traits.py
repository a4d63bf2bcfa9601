"""What is known of compilers: it is read where a target is planned, and carried in the plan."""

from dataclasses import replace
from pathlib import Path

import pytest

from conftest import plan_of
from meshloom.compiler.spec.compiler_traits import CompilerTraits, read_compiler_traits, traits_by_name
from meshloom.compiler.spec.flag_presets import preset_file, read_flag_presets
from meshloom.compiler.spec.target_names import kinds
from meshloom.compiler.target.compiler_options import options_by_traits, presets_for
from support.programs import target_of

COMPILER = Path(__file__).parents[3] / "compiler"
PLATFORMS = {"cpu", "gpu", "tpu"}


def test_what_is_described_is_a_platform_or_a_chip():
    files = preset_file().presets.values()
    presets = {name for one in files for name in (*one.values, *one.default_for, *one.inert)}
    options = {name for one in preset_file().options.values() for name in (*one.hides, *one.default_for)}
    assert set(traits_by_name()) | presets | options <= PLATFORMS | set(kinds())


@pytest.mark.parametrize("name", ["cpu-8", "v5e-16", "v5p-128", "h100-8"])
def test_a_target_carries_the_traits_of_its_own_compiler(name):
    target = target_of(name)
    assert target.compiler == read_compiler_traits(target.platform, target.chip.name if target.chip else None)
    assert target.compiler.synchronous_collectives == (target.platform == "cpu")
    assert target.compiler.copies_loop_carry == (target.platform == "tpu")
    assert target.compiler.copies_for_collectives == (target.platform == "tpu")
    assert target.compiler.fuses_after_matmuls == (target.platform != "gpu")
    assert target.compiler.copies_conditionals == (target.platform == "gpu")
    assert target.flag_presets["synchronous"].flags is not None
    assert (target.flag_presets["sparse_core"].flags is not None) == (name == "v5p-128")


def test_a_chip_replaces_what_its_platform_says_and_keeps_the_rest():
    tpu, v5e = read_compiler_traits("tpu", None), read_compiler_traits("tpu", "v5e")
    assert (tpu.max_chips_async_permutes, v5e.max_chips_async_permutes) == (None, 16)
    own = {"max_chips_async_permutes": 16, "max_chips_ragged_all_to_all": 8, "scattered_block": (4, 4)}
    assert v5e == tpu.model_copy(update=own)


@pytest.mark.parametrize(
    ("declared", "names"),
    [
        ("[auto]", ("sparse_core",)),
        ("[]", ()),
        ("[auto,no_windowed_einsum]", ("sparse_core", "no_windowed_einsum")),
        ("[sparse_core,auto]", ("sparse_core",)),
    ],
)
def test_auto_is_the_preset_that_a_chip_needs(declared, names):
    plan = plan_of("target=v6e-8", f"overlap.flag_presets={declared}")
    assert plan.spec.overlap.flag_presets == names
    assert ("xla_tpu_enable_sparse_core_collective_offload_all_gather" in plan.preset_options) == bool(
        {"sparse_core"} & set(names)
    )
    assert plan.flag_presets is not None
    assert "default for v6e-8" in plan.flag_presets


@pytest.mark.parametrize(("num_gpus", "num_parts", "names"), [(16, 2, ("concurrent",)), (16, 1, ()), (8, 2, ())])
def test_auto_sends_several_collectives_at_once_where_a_split_batch_uses_two_networks(num_gpus, num_parts, names):
    layout = ("sharding=fsdp_tensor", "mesh.tensor=2", f"mesh.fsdp={num_gpus // 2}")
    plan = plan_of(f"target=h100-{num_gpus}", *layout, f"overlap.layers.batch_split={num_parts}")
    assert plan.spec.overlap.flag_presets == names


@pytest.mark.parametrize(
    ("mesh", "num_shards"),
    [
        (("sharding=fsdp",), 16),
        (("sharding=hsdp", "mesh.replica=2"), 8),
        (("sharding=fsdp_tensor", "mesh.tensor=2"), 8),
    ],
)
def test_the_limit_of_combined_sums_is_of_what_a_device_sends(mesh, num_shards):
    """XLA's option limits what a device keeps of the sums. It sends num_shards times as much."""
    sums = read_compiler_traits("gpu", "h100").combined_sums
    assert sums is not None
    options = plan_of("target=h100-16", "global_batch_size=16", *mesh).preset_options
    assert options[sums.option] == sums.most_bytes / num_shards
    by_name = plan_of("target=h100-16", "global_batch_size=16", *mesh, "overlap.flag_presets=[single]").preset_options
    assert by_name[sums.option] == 0, "a preset goes before"


def test_a_compiler_plans_for_as_much_memory_as_jax_has_taken():
    """XLA plans for this many hundredths of 0.8 of a GPU's memory, whatever JAX has of it."""
    plan = plan_of("target=h100-8")
    memory = plan.target.hbm_bytes_per_device
    assert memory is not None

    def hundredths(num_bytes: int) -> int:
        ((_, value),) = options_by_traits(plan.spec, replace(plan.target, hbm_bytes_per_device=num_bytes), 1).items()
        assert isinstance(value, int)
        return value

    assert 0.9 < 0.8 * hundredths(memory) / 100 < 0.95
    assert hundredths(memory // 2) == hundredths(memory) // 2


@pytest.mark.parametrize("target", ["cpu-8", "v5e-8"])
def test_a_compiler_that_needs_nothing_gets_nothing(target):
    plan = plan_of(f"target={target}")
    assert (plan.spec.overlap.flag_presets, dict(plan.preset_options), plan.flag_presets) == ((), {}, None)


@pytest.mark.parametrize(("target", "name"), [("h100-8", "windowed_einsum"), ("v5e-8", "async_fusion")])
def test_a_preset_without_effect_is_not_offered_and_naming_it_says_so(target, name):
    plan = plan_of(f"target={target}", f"overlap.flag_presets=[{name}]")
    assert name not in presets_for(plan.target)
    (warning,) = plan.warnings
    assert (warning.where, warning.fix) == ("overlap.flag_presets[0]", "leave it out")
    assert warning.what.startswith(f"'{name}' does nothing on {target}")


@pytest.mark.parametrize(
    ("target", "reduction", "num_microbatches", "has_it"),
    [("v5e-8", "bfloat16", 2, True), ("v5e-8", "bfloat16", 1, False), ("v5e-8", "float32", 2, False),
     ("h100-8", "bfloat16", 2, False)],
)  # fmt: skip
def test_a_declaration_gets_the_options_that_its_compiler_fails_without(target, reduction, num_microbatches, has_it):
    precision = ("precision=bfloat16", f"precision.gradient_reduction={reduction}")
    plan = plan_of(f"target={target}", *precision, f"num_microbatches={num_microbatches}")
    assert ("xla_disable_hlo_passes" in plan.preset_options) is has_it


def test_nothing_is_assumed_of_an_unknown_platform():
    assert read_compiler_traits("abacus", None) == CompilerTraits()
    assert all(one.flags is None for one in read_flag_presets("abacus", None).values())


def test_the_largest_odd_factor_falls_with_the_devices():
    traits = CompilerTraits(max_reduce_scatter=1664)
    assert [traits.max_odd_factor(n) for n in (16, 64, 1664, 2048)] == [104, 26, 1, None]
    assert CompilerTraits().max_odd_factor(64) is None


@pytest.mark.parametrize(
    ("others", "does"),
    [((256_000,), True), ((2304,), False), ((2304, 256_000), True), ((128_256,), True), ((4096,), False), ((), False)],
)
def test_a_reduce_scatter_becomes_an_all_reduce_by_the_odd_part_of_another_dimension(others, does):
    """256,000 = 125 x 2^11, 2,304 = 9 x 2^8, 128,256 = 501 x 2^8."""
    assert CompilerTraits(max_reduce_scatter=1664).all_reduces(32, others) is does
    assert not CompilerTraits().all_reduces(32, others)


def test_passes_do_not_read_the_files_of_conf():
    """Only spec/ and declare/, the border, open them: every later pass is a function of frozen values."""
    border = (COMPILER / "spec", COMPILER / "declare")
    own = {path for path in COMPILER.rglob("*.py") if path.parent not in border}
    assert not [
        path for path in own if "importlib.resources" in path.read_text() or "meshloom.conf" in path.read_text()
    ]
    readers = ("read_compiler_traits", "read_flag_presets", "read_option_effects", "preset_file", "chip_file")
    assert {path.name for path in own if any(name in path.read_text() for name in readers)} == {"target.py"}
