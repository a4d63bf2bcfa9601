"""torchtitan's TOML files, compared with overrides that were written by hand from its documentation."""

from pathlib import Path

import pytest

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.peers import torchtitan
from meshloom.compiler.peers.importing import import_declaration
from meshloom.compiler.peers.reading import Imported, peer_of

SMALL = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
[activation_checkpoint]
mode = "full"
[job]
description = "a run"
"""
ALONE = {
    "model=llama3_1_8b", "target=h100-64", "global_batch_size=128", "sequence_length=8192", "remat=full",
    "data=synthetic", "sharding=fsdp", "optimizer.learning_rate=0.0008", "optimizer.weight_decay_on=all",
    "num_steps=10000", "schedule=linear", "schedule.num_warmup_steps=200",
}  # fmt: skip


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    return str(path)


def imported(*words: str, target: str | None = "h100-64") -> Imported:
    return import_declaration("torchtitan", words, target, lambda place: Path(place).read_text())


def test_its_defaults_apply(toml):
    found = imported(toml)
    assert set(found.words) == ALONE
    assert found.without_effect == {"paths, logs and profiles": ("job.description",)}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option=op"),
         {"remat=save_dots"}),
        (("--activation_checkpoint.mode=none",), {"remat=none"}),
        (("--parallelism.tensor_parallel_degree", "8"),
         {"global_batch_size=16", "sharding=fsdp_tensor", "mesh.tensor=8"}),
        (("--parallelism.tensor_parallel_degree=8", "--parallelism.enable_async_tensor_parallel"),
         {"global_batch_size=16", "sharding=fsdp_tensor", "mesh.tensor=8", "parallel.matmul=collective_matmul"}),
        (("--parallelism.data_parallel_replicate_degree=8",),
         {"sharding=hsdp", "mesh.replica=8", "overlap.layers.reduce_in_backward=true"}),
        (("--parallelism.context_parallel_degree=4",),
         {"global_batch_size=32", "sharding=fsdp_context", "mesh.context=4", "parallel.context=all_gather"}),
        (("--parallelism.context_parallel_degree=4", "--parallelism.context_parallel_rotate_method=alltoall"),
         {"global_batch_size=32", "sharding=fsdp_context", "mesh.context=4", "parallel.context=ring"}),
        (("--parallelism.pipeline_parallel_degree=4", "--training.local_batch_size=8"),
         {"mesh.stage=4", "num_microbatches=8"}),
        (("--parallelism.pipeline_parallel_degree=4", "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"),
         {"global_batch_size=32", "mesh.stage=4", "num_microbatches=2", "pipeline=interleaved_1f1b"}),
        (("--training.global_batch_size=512",), {"global_batch_size=512", "num_microbatches=4"}),
        (("--training.dtype=bfloat16",), {"precision=bfloat16_pure", "precision.gradient_reduction=float32"}),
        (("--training.max_norm=0.5", "--optimizer.beta2=0.99"), {"optimizer.max_grad_norm=0.5", "optimizer.b2=0.99"}),
        (("--lr_scheduler.decay_ratio=0.1",), {"schedule=wsd", "schedule.num_decay_steps=1000"}),
        (("--training.batch_size=4",), {"global_batch_size=256"}),  # its name in 2024
    ],
)  # fmt: skip
def test_key_is_the_override_of_a_reading_by_hand(words, expected, toml):
    assert set(imported(toml, *words).words) - ALONE == expected


def test_command_with_a_file_declares_what_the_file_does(toml, tmp_path):
    command = f"NGPU=8 CONFIG_FILE={toml} ./run_train.sh --training.seq_len 4096"
    assert imported(command).words == imported(toml, "--training.seq_len=4096").words
    (tmp_path / "go.sh").write_text("torchrun -m torchtitan.train --job.config_file run.toml --training.seq_len 4096\n")
    assert imported(str(tmp_path / "go.sh")).words == imported(toml, "--training.seq_len=4096").words


def test_all_problems_are_reported_at_once(toml):
    words = ("--model.flavor=9B", "--training.seq_length=1", "--model.converters=int4",
             "--parallelism.tensor_parallel_degree=7", "--activation_checkpoint.mode=selective")  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        imported(toml, *words)
    found = {each.where.removeprefix("run.toml: "): each for each in caught.value.problems}
    assert found.keys() == {"model.flavor", "training.seq_length", "model.converters", "parallelism",
                            "activation_checkpoint.selective_ac_option"}  # fmt: skip
    assert "did you mean 'training.seq_len'" in found["training.seq_length"].fix
    assert "in float8" in found["model.converters"].what
    assert imported(toml, "--model.converters=").words == imported(toml).words


def test_without_a_target_the_problem_says_so(toml):
    with pytest.raises(ConfigError, match="does not name its GPUs"):
        imported(toml, target=None)


@pytest.mark.parametrize(("peer", "name"), [("maxtext", "run.toml"), ("torchtitan", "run.yml")])
def test_file_of_another_peer_is_one_error_that_names_it(peer, name, tmp_path):
    (tmp_path / name).write_text("[model]\nname = 1\n" if name.endswith("toml") else "model_name: llama2-7b\n")
    with pytest.raises(ConfigError) as caught:
        import_declaration(peer, [str(tmp_path / name)], "h100-8", lambda place: Path(place).read_text())
    (problem,) = caught.value.problems
    assert f"meshloom import {'torchtitan' if peer == 'maxtext' else 'maxtext'}" in problem.fix


def test_each_key_that_decides_is_read():
    text = Path(torchtitan.__file__).read_text()
    by_table = {f"parallelism.{name}" for name in torchtitan._AXES.values()}
    optimizer = {f"optimizer.{name}" for name in ("lr", "beta1", "beta2", "eps", "weight_decay")}
    of_float8 = ("recipe_name", "emulate", "enable_fsdp_float8_all_gather", "filter_fqns")
    by_table |= {f"{section}.{name}" for section in torchtitan._FLOAT8 for name in of_float8 if name in text}
    by_table |= {f"{section}.{name}" for section in torchtitan._MX for name in ("recipe_name", "filter_fqns")}
    by_name = {key for key in peer_of("torchtitan").defaults if f'"{key}"' in text}
    assert set(peer_of("torchtitan").defaults) == by_name | by_table | optimizer


def test_words_of_its_command_line_have_hyphens_and_no(toml):
    plain = imported(toml, "--training.seq_len", "4096", "--debug.seed", "3").words
    assert imported(toml, "--training.seq-len=4096", "--training.seed", "3", "--compile.no-enable").words == plain
    with pytest.raises(ConfigError, match=r"seq_len=4096.*declares nothing"):
        imported(toml, "seq_len=4096")


@pytest.mark.parametrize("section", ["float8", "quantize.linear.float8"])
def test_float8_by_tensor_and_by_row_is_imported(toml, section):
    """Without a filter its head is converted, too."""
    plain = imported(toml, f"--model.converters={section}")
    types = "forward: fp8, gradients: fp8_e5m2"
    assert f"precision.matmuls=[{{match: head/*, {types}}}, {{match: null, {types}}}]" in plain.words
    layers = imported(toml, f"--model.converters={section}", f"--{section}.filter_fqns=output").words
    assert "precision=fp8" in layers
    assert not any(word.startswith("precision.matmuls") for word in layers)
    rows = imported(
        toml, f"--model.converters={section}", f"--{section}.recipe_name=rowwise", f"--{section}.emulate",
        f"--{section}.filter_fqns=output,wq", f"--{section}.enable_fsdp_float8_all_gather",
    )  # fmt: skip
    rule = "precision.matmuls=[{match: null, forward: fp8_rowwise, gradients: fp8_rowwise, gather: fp8_rowwise}]"
    assert {rule, "precision.emulate=true"} < set(rows.words)
    assert any("wq multiply in float8 here, too" in note for note in rows.notes)
    with pytest.raises(ConfigError, match="the recipe mxfp8 cannot be imported"):
        imported(toml, f"--model.converters={section}", f"--{section}.recipe_name=mxfp8")


@pytest.mark.parametrize("section", ["mx", "quantize.linear.mx"])
def test_mxfp8_is_imported(toml, section):
    for more in ((), (f"--{section}.recipe_name=mxfp8_cublas",)):
        assert "precision=mxfp8" in imported(toml, f"--model.converters={section}", *more, target="b200-64").words
    with pytest.raises(ConfigError, match="the recipe mxfp4_cutlass cannot be imported"):
        imported(toml, f"--model.converters={section}", f"--{section}.recipe_name=mxfp4_cutlass")
