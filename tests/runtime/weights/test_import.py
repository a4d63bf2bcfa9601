"""Published weights come into the train state as they are in the files, on any mesh; all else begins anew."""

import io
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from conftest import SMALL, spec_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.driver import plan_run
from meshloom.compiler.step.train_step import build_init
from meshloom.runtime.weights.find import PublishedWeights, StoredWeights, describe_weights, find_weights
from meshloom.runtime.weights.load import file_sharding, load_params, with_weights
from support.programs import programs_of
from support.published import write_published
from support.tiers import tiered

LLAMA = ("model.num_layers=2", "model.embed_dim=32", "model.num_kv_heads=4", "model.mlp_dim=40")
QUIET = Console(is_quiet=True)
MESHES = {
    "one device": ("target=cpu-1",),
    "fsdp": ("target=cpu-8", "sharding=fsdp"),
    "fsdp x tensor": ("target=cpu-8", "sharding=fsdp_tensor", "mesh.tensor=4"),
    "tensor": ("target=cpu-4", "sharding=tensor", "mesh.tensor=4"),
}
LATER = ("fsdp", "tensor")  # in the ci tier


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("published")
    return folder, write_published(folder, spec_of(*LLAMA).model, num_files=3)


def _plan(folder: Path | str, *overrides: str) -> Any:
    place = f"hf:{folder}" if isinstance(folder, Path) else folder
    return plan_run(spec_of(*LLAMA, *overrides, f"checkpoint.weights_from={place}"))


def _found(plan: Any) -> StoredWeights:
    weights = find_weights(plan)
    assert weights is not None
    return weights


def _loaded(plan: Any) -> dict[str, np.ndarray]:
    weights = _found(plan)
    mesh = plan.mesh.of_devices(jax.devices()[: plan.target.num_devices])
    params = leaves_by_path(load_params(plan, mesh, weights, QUIET))
    specs = leaves_by_path(plan.specs["params"], is_leaf=lambda x: isinstance(x, jax.P))
    assert all(x.sharding == jax.NamedSharding(mesh, specs[path]) for path, x in params.items())
    return {path: np.asarray(x) for path, x in params.items()}


def _expected(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parameters by hand: torch's matrices are (out, in), ours (in, out) with heads apart, stacked by layer."""

    def stacked(name: str, *shape: int) -> np.ndarray:
        layers = [values[f"model.layers.{n}.{name}.weight"].astype(np.float32) for n in range(2)]
        return np.stack([x.T.reshape(shape) if shape else x for x in layers])

    return {
        "embed/table_VE": values["model.embed_tokens.weight"].astype(np.float32),
        "head/kernel_EV": values["lm_head.weight"].astype(np.float32).T,
        "head/norm/scale_E": values["model.norm.weight"].astype(np.float32),
        "layers/attention/query_EHD": stacked("self_attn.q_proj", 32, 16, 4),
        "layers/attention/key_EKD": stacked("self_attn.k_proj", 32, 4, 4),
        "layers/attention/value_EKD": stacked("self_attn.v_proj", 32, 4, 4),
        "layers/attention/out_HDE": stacked("self_attn.o_proj", 16, 4, 32),
        "layers/mlp/gate_EM": stacked("mlp.gate_proj", 32, 40),
        "layers/mlp/up_EM": stacked("mlp.up_proj", 32, 40),
        "layers/mlp/down_ME": stacked("mlp.down_proj", 40, 32),
        "layers/attention_norm/scale_E": stacked("input_layernorm"),
        "layers/mlp_norm/scale_E": stacked("post_attention_layernorm"),
    }


@pytest.mark.ci
@pytest.mark.parametrize("mesh", tiered(["one device", "fsdp x tensor"], plain=["fsdp x tensor"]))
def test_a_base_is_encoded_as_it_is_read(mesh, published):
    """Each matrix has the elements and the scales of the float32 one that the file holds, encoded at once."""
    folder, values = published
    base = "adapter.base={element: nf4, block: 2, scales_block: 2}"
    plan = _plan(folder, "adapter=lora", base, *MESHES[mesh])
    loaded, plain = _loaded(plan), _expected(values)
    formats = {each.array.path: each.array.format for each in plan.sharding.parameters}
    for path, x in plain.items():
        if formats[path] is None:
            np.testing.assert_array_equal(loaded[path], x, err_msg=path)
            continue
        expected = leaves_by_path({path: formats[path].encode(jax.numpy.asarray(x))})
        for part, values_of in expected.items():
            np.testing.assert_array_equal(loaded[part].astype(np.float32), np.float32(values_of), err_msg=part)
    assert sum(format is not None for format in formats.values()) == 7


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=pytest.mark.ci if m in LATER else ()) for m in MESHES])
def test_every_parameter_is_that_of_the_files_on_any_mesh(published, mesh, capfd):
    folder, values = published
    loaded, expected = _loaded(_plan(folder, *MESHES[mesh])), _expected(values)
    assert loaded.keys() == expected.keys()
    for path, x in expected.items():
        assert loaded[path].dtype == np.float32
        assert np.array_equal(loaded[path], x), path
    assert not capfd.readouterr().err  # of a tensor that it replicates on the way, the partitioner would warn


@pytest.mark.ci
def test_a_new_run_starts_at_step_0_with_master_weights_and_a_fresh_optimizer(published):
    folder, values = published
    plan = _plan(folder, "target=cpu-4", "sharding=zero1", "precision=bfloat16_params", "frozen_parameters=[embed/*]")
    programs, weights = programs_of(plan), _found(plan)
    drawn = programs["init"]()
    layouts = jax.tree.map(lambda x: (x.sharding, x.dtype), drawn)
    state = with_weights(programs["init"](), weights, plan, QUIET)
    assert jax.tree.map(lambda x: (x.sharding, x.dtype), state) == layouts
    expected = _expected(values)
    for path, x in leaves_by_path(state["master"]).items():
        assert np.array_equal(x, expected[path]), path
    for path, x in leaves_by_path(state["params"]).items():
        assert np.array_equal(np.asarray(x).astype(np.float32), expected[path]), path  # the files have bfloat16
    for mine, fresh in zip(jax.tree.leaves(state["optimizer"]), jax.tree.leaves(drawn["optimizer"]), strict=True):
        assert np.array_equal(mine, fresh)
    assert int(state["step"]) == 0


@pytest.mark.ci
def test_left_out_parameters_stay_as_they_are_drawn(published):
    folder, values = published
    plan = _plan(folder, "target=cpu-1", "checkpoint.weights_skip=[head/*, model.embed_tokens.weight]")
    loaded, drawn = _loaded(plan), leaves_by_path(jax.jit(plan.model.init)(jax.random.key(plan.spec.seed)))
    fresh = {"embed/table_VE", "head/kernel_EV", "head/norm/scale_E"}
    for path, x in _expected(values).items():
        assert np.allclose(loaded[path], drawn[path] if path in fresh else x, rtol=1e-6 if path in fresh else 0), path
    lines = describe_weights(_found(plan))
    assert lines[-1] == "drawn anew: embed/table_VE, head/kernel_EV, head/norm/scale_E"
    for path, x in leaves_by_path(jax.jit(build_init(plan, _found(plan).fresh))()["params"]).items():
        assert np.allclose(x, drawn[path] if path in fresh else 0, rtol=1e-6, atol=0), path


WRONG = {
    "another size": (
        ("model.mlp_dim=48",),
        ("mlp.gate_proj.weight is BF16[40,32] there, [48, 32] of BF16, F16, F32 here", "in 6 places"),
    ),
    "another vocabulary": (
        ("model.vocab_size=256",),
        (
            "model.embed_tokens.weight is BF16[264,32] there, [256, 32]",
            "take the rows that are there: model.vocab_size=264",
        ),
    ),
    "more layers": (("model.num_layers=3",), ("model.layers.2.input_layernorm.weight [32] is missing", "and 3 more")),
    "fewer layers": (("model.num_layers=1",), ("BF16[32] is there, not here", "in 9 places")),
    "a pattern of nothing": (("checkpoint.weights_skip=[heads/*]",), ("'heads/*' matches no parameter",)),
    "nothing left": (("checkpoint.weights_skip=['*']",), ("leaves out all weights",)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_differs_is_listed_before_anything_is_allocated(published, wrong):
    overrides, said = WRONG[wrong]
    with pytest.raises(ConfigError) as raised:
        find_weights(_plan(published[0], "target=cpu-1", *overrides))
    for text in said:
        assert text in str(raised.value)


def test_names_that_a_wrapper_left_are_read(tmp_path):
    values = write_published(tmp_path, spec_of(*LLAMA).model)
    for wrapper in ("module.", "_orig_mod."):
        save_file({f"{wrapper}{name}": x for name, x in values.items()}, tmp_path / "model.safetensors")
        weights = _found(_plan(tmp_path, "target=cpu-1"))
        assert isinstance(weights, PublishedWeights)
        assert len(weights.matched.taken) == len(values)


def test_a_type_that_is_not_read_is_to_be_converted(tmp_path):
    values = write_published(tmp_path, spec_of(*LLAMA).model)
    save_file({name: x.astype(np.float64) for name, x in values.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="convert the file to float32: F64 is not read"):
        find_weights(_plan(tmp_path, "target=cpu-1"))


def test_a_renamed_tensor_is_shown_with_the_nearest_name(tmp_path):
    values = write_published(tmp_path, spec_of(*LLAMA).model)
    values["model.layers.0.mlp.gate.weight"] = values.pop("model.layers.0.mlp.gate_proj.weight")
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as raised:
        find_weights(_plan(tmp_path, "target=cpu-1"))
    missing = "model.layers.0.mlp.gate_proj.weight [40, 32] is missing; the nearest is model.layers.0.mlp.gate.weight"
    assert missing in str(raised.value)


def test_a_model_that_computes_something_else_with_these_weights_is_named(published):
    lines = describe_weights(_found(_plan(published[0], "target=cpu-1", "model.rope_theta=123.0")))
    assert any("warning" in line and "rope_theta 123.0 here, 10000.0 there" in line for line in lines)
    assert not any("warning" in line for line in describe_weights(_found(_plan(published[0], "target=cpu-1"))))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("checkpoint.restore_from=a", "checkpoint.weights_from=b"), "set one of them to null"),
        (("checkpoint.weights_skip=[head/*]",), "leaves out weights, and none are read"),
        (("checkpoint.weights_from=hf:s3://bucket/x",), "is a URL"),
    ],
)
def test_contradictory_places_are_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        spec_of(*SMALL, *overrides)


def test_restoring_published_weights_is_to_start_from_them(published):
    spec = spec_of(*LLAMA, f"checkpoint.restore_from=hf:{published[0]}")
    assert (spec.checkpoint.weights, spec.checkpoint.continued) == (f"hf:{published[0]}", None)
    said = io.StringIO()
    Console(said).line(describe_weights(_found(plan_run(spec)))[0])
    assert "21 tensors of" in said.getvalue()


@pytest.mark.parametrize(("shape", "times"), [((8, 3), 1), ((3, 8), 1), ((2, 5, 4), 1), ((4, 3), 2), ((7,), 8)])
def test_devices_read_each_byte_once_as_far_as_dimensions_divide(shape, times):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))
    read = np.zeros(shape, int)
    for index in file_sharding(shape, mesh).devices_indices_map(shape).values():
        read[index] += 1
    assert (read == times).all()
