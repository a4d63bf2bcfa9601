"""MaxText's declarations, compared with overrides that were written by hand from its documentation."""

from pathlib import Path

import pytest

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.peers import maxtext
from meshloom.compiler.peers.importing import import_declaration
from meshloom.compiler.peers.reading import Imported, peer_of

TARGET = "v5p-128"  # 64 chips
SMALL = ("model_name=llama2-7b", "per_device_batch_size=1", "dataset_type=synthetic")
FROM_DEFAULTS = ("num_steps", "schedule.", "optimizer.learning_rate", "optimizer.weight_decay_on")  # of base.yml


def read_file(place: str) -> str:
    return Path(place).read_text()


def imported(*words: str, target: str | None = TARGET) -> Imported:
    return import_declaration("maxtext", words, target, read_file)


def overrides(*words: str, target: str | None = TARGET) -> set[str]:
    """Returns the overrides of some keys besides those of SMALL, without what SMALL alone gives."""
    alone = set(imported(*SMALL, target=target).words)
    return set(imported(*SMALL, *words, target=target).words) - alone


def problems(*words: str, target: str | None = TARGET) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        imported(*words, target=target)
    return {each.where.removeprefix("command: "): f"{each.what} {each.fix}" for each in caught.value.problems}


def test_defaults_of_its_base_config_apply():
    words = {each for each in imported("model_name=llama2-7b").words if not each.startswith(FROM_DEFAULTS)}
    assert words == {
        "model=llama2_7b", "target=v5p-128", "global_batch_size=768", "sequence_length=2048", "remat=full",
        "data=synthetic", "sharding=fsdp", "precision.gradient_reduction=bfloat16",
    }  # fmt: skip
    steps = {each for each in imported("model_name=llama2-7b").words if each.startswith(FROM_DEFAULTS)}
    assert steps == {"num_steps=150001", "schedule.num_warmup_steps=15000", "optimizer.learning_rate=3e-05",
                     "optimizer.weight_decay_on=all"}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("per_device_batch_size=0.25",), {"global_batch_size=16"}),
        (("per_device_batch_size=2", "gradient_accumulation_steps=4"), {"global_batch_size=512", "num_microbatches=4"}),
        (("max_target_length=8192",), {"sequence_length=8192"}),
        (("remat_policy=minimal",), {"remat=save_dots"}),
        (("remat_policy=minimal_with_context",), {"remat=minimal"}),
        (("remat_policy=none",), {"remat=none"}),
        (("remat_policy=save_qkv_proj",), {"remat=save_names", "remat.names=[queries,keys,values]"}),
        (("remat_policy=qkv_proj_offloaded",), {"remat=offload", "remat.names=[queries,keys,values]"}),
        (("remat_policy=custom", "decoder_layer_input=offload"), {"remat=offload", "remat.names=[layer_input]"}),
        (("remat_policy=custom", "context=device", "mlpwo=device"),
         {"remat=save_names", "remat.names=[attended,mlp_output]"}),
        (("remat_policy=custom", "decoder_layer_input=offload", "mlpwi_0=offload", "key_proj=device"),
         {"remat=by_name",
          "remat.choices={layer_input: offload, attended: recompute, keys: save, mlp_gate: offload}"}),
        (("decoder_layer_input=offload",), set()),  # without remat_policy=custom it means nothing
        (("ici_tensor_parallelism=4",),
         {"sharding=fsdp_tensor", "mesh.tensor=4",
          "sharding.activations=[{logical: [batch], mesh: [replica, data, fsdp]}, "
          "{logical: [vocab, mlp, heads, kv_heads, embed], mesh: [tensor]}, "
          "{logical: [length, sequence_parallel_length, head_dim], mesh: []}]"}),
        (("ici_tensor_sequence_parallelism=4",), {"sharding=fsdp_tensor", "mesh.tensor=4"}),
        (("ici_fsdp_transpose_parallelism=2",), {"sharding=fsdp_2d", "mesh.data=2"}),
        (("ici_context_parallelism=8", "context_parallel_strategy=ring"),
         {"sharding=fsdp_context", "mesh.context=8", "parallel.context=ring"}),
        (("ici_data_parallelism=2",), {"mesh.data=2"}),
        (("ici_data_parallelism=-1", "ici_fsdp_parallelism=1"), {"sharding=ddp"}),
        (("ici_pipeline_parallelism=4", "num_pipeline_microbatches=8"),
         {"mesh.stage=4", "num_microbatches=8", "pipeline=gpipe"}),
        (("weight_dtype=bfloat16",), {"precision=bfloat16_pure", "optimizer.moment_dtype=bfloat16"}),
        (("mu_dtype=bfloat16",), {"optimizer.first_moment_dtype=bfloat16"}),
        (("optimizer_memory_host_offload=true",), {"optimizer.moments_on=host"}),
        (("grad_dtype=bfloat16",), {"precision.gradients=bfloat16"}),
        (("dtype=float32",), {"precision=float32"}),
        (("num_vocab_tiling=8",), {"loss.num_chunks=8"}),
        (("attention=dot_product",), {"parallel.attention=xla"}),
        (("attention=flash",), set()),
        (("tile_batch_seq=512",), {"moe.tile_rows=512"}),
        (("wi_tile_fwd_batch_seq=256",), {"moe.tile_rows=256"}),
        (("wi_tile_fwd_batch_seq=256", "use_tokamax_gmm=true"), set()),  # another kernel
        (("tile_batch_seq=512", "megablox=false"), set()),
        (("adam_b2=0.99", "gradient_clipping_threshold=0"), {"optimizer.b2=0.99", "optimizer.max_grad_norm=null"}),
        (("compile_xla_flags=--xla_tpu_scoped_vmem_limit_kib=65536 --xla_enable_async_all_gather=true",),
         {"overlap.flag_presets=[]",
          "compiler_options={xla_tpu_scoped_vmem_limit_kib: 65536, xla_enable_async_all_gather: true}"}),
        (("steps=40", "warmup_steps_fraction=0.25"), {"num_steps=40", "schedule.num_warmup_steps=10"}),
    ],
)  # fmt: skip
def test_key_is_the_override_of_a_reading_by_hand(words, expected):
    assert overrides(*words) == expected


def test_topology_of_a_command_names_the_target_and_its_slices():
    words = imported(*SMALL, "compile_topology=v5e-256", "compile_topology_num_slices=2", target=None).words
    assert {"target=v5e-256", "target.num_slices=2", "global_batch_size=512", "sharding=hsdp"} < set(words)


def test_slices_may_be_fully_sharded_over():
    words = imported(*SMALL, "dcn_fsdp_parallelism=2", "num_slices=2", target="v6e-256").words
    assert {"sharding=fsdp", "target.num_slices=2", "global_batch_size=512"} < set(words)


def test_nodes_of_gpus_are_what_its_dcn_axes_are_over():
    sizes = ("dcn_data_parallelism=2", "dcn_fsdp_parallelism=16", "ici_fsdp_parallelism=8")
    words = imported(*SMALL, *sizes, "hardware=gpu", target="h200-256").words
    assert {"sharding=hsdp", "mesh.replica=2", "overlap.layers.reduce_in_backward=true"} < set(words)


def test_default_model_grows_by_its_scale():
    """256b of MaxText's v5p scripts has 96 layers of 16384 by these rules: 2^8 is 8 times 4 times 4 twice over."""
    words = set(imported("global_parameter_scale=32", "ici_tensor_parallelism=4").words)
    assert {"model=llama2_7b", "model.embed_dim=8192", "model.num_heads=64", "model.num_kv_heads=64",
            "model.mlp_dim=28672", "model.num_layers=32"} < words  # fmt: skip


def test_all_problems_are_reported_at_once():
    found = problems(
        "model_name=llama4-17b-16e", "max_target_lenght=2048", "quantization=int8w", "per_device_batch_size=0.3",
        "remat_policy=some", "ici_fsdp_parallelism=3", "mtp_num_layers=1",
    )  # fmt: skip
    assert found.keys() == {"model_name", "max_target_lenght", "quantization", "per_device_batch_size", "remat_policy",
                            "ici_*_parallelism", "mtp_num_layers"}  # fmt: skip
    assert "did you mean 'max_target_length'" in found["max_target_lenght"]
    assert "multiplies in no other type of few bits" in found["quantization"]
    assert "add quantization=''" in found["quantization"]
    assert "family of llama4-17b-16e" in found["model_name"]


def test_no_problem_is_left_once_its_fix_is_typed():
    assert "quantization" in problems(*SMALL, "quantization=int8w")
    assert imported(*SMALL, "quantization=int8w", "quantization=").words == imported(*SMALL).words


@pytest.mark.parametrize(
    ("words", "where", "said"),
    [
        (("steps=many",), "steps", "not a number"),
        (("per_device_batch_size=${BATCH}",), "per_device_batch_size", "nothing that was read sets it"),
        (("dcn_diloco_parallelism=2",), "dcn_diloco_parallelism", "no axis like diloco"),
        (("ici_fsdp_parallelism=-1", "ici_data_parallelism=-1"), "ici_data_parallelism and ici_fsdp_parallelism", "-1"),
        (("opt_type=shampoo",), "opt_type", "use one of adamw"),
        (("scan_layers=perhaps",), "scan_layers", "not a truth value"),
        (("optimizer_memory_host_offload=true", "opt_type=muon"), "optimizer_memory_host_offload", "muon has no"),
        (("compile_topology=v5e-100",), "compile_topology", "nearest"),
        (("tile_batch_seq=200",), "tile_batch_seq", "is 200"),
    ],
)
def test_bad_value_is_one_problem_at_its_key(words, where, said):
    found = problems(*SMALL, *words, target=None if "topology" in words[0] else TARGET)
    assert said in found[where]


@pytest.mark.parametrize("value", [".nan", ".inf", "0", "-2", "2.5", "[1]", "abc"])
@pytest.mark.parametrize("key", ["ici_tensor_parallelism", "dcn_data_parallelism"])
def test_degree_that_is_no_count_is_one_problem(key, value):
    assert list(problems(*SMALL, f"{key}={value}")) == [key]


def test_large_number_keeps_its_digits():
    assert overrides("vocab_size=1234567") == {"model.vocab_size=1234567"}


def test_target_that_does_not_exist_is_named_alone():
    assert list(problems(*SMALL, target="v5p-9")) == ["target"]


def test_without_chips_the_problem_says_how_many_devices():
    found = problems(*SMALL, "dcn_data_parallelism=2", "ici_fsdp_parallelism=8", target=None)
    assert "16 devices" in found["command"]


def test_each_key_that_decides_is_read():
    """A key among the defaults which nothing reads would be dropped in silence."""
    text = Path(maxtext.__file__).read_text()
    axes = {f"{level}_{axis}_parallelism" for level in ("ici", "dcn") for axis in maxtext._AXES}
    read_by_name = {key for key in peer_of("maxtext").defaults if f'"{key}"' in text}
    adam = {"adam_b1", "adam_b2", "adam_eps"}
    activations = set(peer_of("maxtext").tables["activations"])
    assert set(peer_of("maxtext").defaults) == read_by_name | axes | adam | activations


def test_no_key_has_two_meanings():
    peer = peer_of("maxtext")
    keys = [*peer.defaults, *peer.refused, *(key for group in peer.no_effect.values() for key in group)]
    assert len(keys) == len(set(keys))


RECIPE = """\
#!/bin/bash
export OUT=""
FLAGS=" \\
  --xla_tpu_bf16_emission_mode=NATIVE_EMISSION \\
  --xla_dump_to=/tmp/x"
ARGS="\\
model_name=llama2-7b \\
per_device_batch_size=2 \\
sa_block_q=2048 \\
dataset_type=synthetic \\
run_name=${OUT}"
xpk workload create --device-type=tpu7x-4x4x4 --num-slices=1 \\
  --command="set -e && export LIBTPU_INIT_ARGS='${FLAGS}' && \\
python3 -m MaxText.train MaxText/configs/base.yml ${ARGS} | tee log"
"""


def test_recipe_of_a_launcher_is_read_with_its_chips_and_flags(tmp_path):
    (tmp_path / "run_recipe.sh").write_text(RECIPE)
    found = imported(str(tmp_path / "run_recipe.sh"), target=None)
    assert {"target=tpu7x:4x4x4", "global_batch_size=256", "model=llama2_7b",
            "compiler_options={xla_tpu_bf16_emission_mode: NATIVE_EMISSION}"} < set(found.words)  # fmt: skip
    assert found.without_effect == {"paths, logs and profiles": ("run_name",), "kernel tiles": ("sa_block_q",)}
    assert any("xla_dump_to" in note for note in found.notes)


def test_file_command_and_words_declare_the_same(tmp_path):
    (tmp_path / "mine.yml").write_text("base_config: base.yml\nmodel_name: llama2-7b\nper_device_batch_size: 1\n"
                                       "dataset_type: synthetic\n")  # fmt: skip
    expected = imported(*SMALL).words
    assert imported(str(tmp_path / "mine.yml")).words == expected
    assert imported("python3 -m MaxText.train base.yml " + " ".join(SMALL)).words == expected
    assert imported(*f"python3 src/MaxText/train.py configs/base.yml {' '.join(SMALL)}".split()).words == expected
    assert imported(" ".join(SMALL)).words == expected
    (tmp_path / "page.md").write_text(f"# A page\n\n```bash\npython3 -m maxtext.trainers.pre_train.train base.yml "
                                      f"{' '.join(SMALL)}\n```\n")  # fmt: skip
    assert imported(str(tmp_path / "page.md")).words == expected


def test_words_after_a_file_replace_its_keys(tmp_path):
    (tmp_path / "mine.yml").write_text("model_name: llama2-7b\nsteps: 5\n")
    assert "num_steps=7" in imported(str(tmp_path / "mine.yml"), "steps=7").words


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yml", "a: [1\n", "is not valid YAML in line 2"),
        ("a.yml", "- 1\n", "holds no keys"),
        ("a.yml", "apples: 1\npears: 2\n", "does not have 2, such as apples, pears"),
        ("a.toml", "a = [\n", "is not valid TOML"),
        ("a.sh", "echo hello\nls\n", "has no train command"),
        ("a.sh", "python3 -m benchmarks.benchmark_runner xpk --model_name=x", "names no keys"),
        ("a.sh", "python3 -m MaxText.train base.yml steps=1\npython3 -m MaxText.train base.yml steps=2", "2 train"),
        ("a.sh", "python3 -m MaxText.train configs/mine.yml steps=1", "reads mine.yml, which is not here"),
    ],
)  # fmt: skip
def test_a_file_that_declares_nothing_is_one_error(name, text, said, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        imported(str(tmp_path / name))
    assert len(caught.value.problems) == 1


def test_value_that_depends_on_a_condition_is_said(tmp_path):
    text = "if [ $X ]; then\n  BATCH=2\nfi\n"
    text += "python3 -m MaxText.train base.yml model_name=llama2-7b per_device_batch_size=$BATCH"
    (tmp_path / "a.sh").write_text(text)
    assert any("$BATCH" in note for note in imported(str(tmp_path / "a.sh")).notes)


@pytest.mark.parametrize("word", ["--foo", "bar", "--steps=3"])
def test_a_word_that_is_no_key_is_never_dropped(word, tmp_path):
    (tmp_path / "mine.yml").write_text("model_name: llama2-7b\n")
    for words in ((*SMALL, word), (str(tmp_path / "mine.yml"), word), ("MaxText.train", "base.yml", *SMALL, word)):
        with pytest.raises(ConfigError, match="declares nothing"):
            imported(*words)


def test_command_of_another_trainer_is_named(tmp_path):
    (tmp_path / "a.sh").write_text("torchrun pretrain_gpt.py --num-layers 2\n")
    with pytest.raises(ConfigError, match="meshloom import megatron"):
        imported(str(tmp_path / "a.sh"))


def test_rules_of_layouts_are_honoured_where_they_are_those_of_its_base_config():
    axes = ["diloco", "data", "stage", "fsdp", "fsdp_transpose", "context", "context_usp_ulysses",
            "context_autoregressive", "tensor", "tensor_sequence", "expert", "autoregressive"]  # fmt: skip
    assert imported(*SMALL, f"mesh_axes={axes}").words == imported(*SMALL).words
    assert "rules of layouts" in problems(*SMALL, f"mesh_axes={axes[::-1]}")["mesh_axes"]


def test_file_changes_the_file_that_it_names(tmp_path):
    (tmp_path / "below.yml").write_text("base_config: base.yml\nsteps: 7\nmax_target_length: 512\n")
    (tmp_path / "run.yml").write_text("base_config: below.yml\nmodel_name: llama2-7b\nmax_target_length: '1024'\n")
    words = imported(str(tmp_path / "run.yml"), "steps=9").words
    assert {"num_steps=9", "sequence_length=1024", "model=llama2_7b"} <= set(words)
    (tmp_path / "below.yml").write_text("base_config: run.yml\n")
    assert "names a file that names it" in problems(str(tmp_path / "run.yml"))["below.yml: base_config"]
    (tmp_path / "below.yml").unlink()
    assert "reads below.yml, which is not here" in problems(str(tmp_path / "run.yml"))["run.yml"]


def test_values_in_quotes_and_null_are_what_they_say(tmp_path):
    (tmp_path / "run.yml").write_text(
        "model_name: llama2-7b\nquantization: null\nuse_dpo: 'false'\nmtp_num_layers: 0\n"
    )
    assert "model=llama2_7b" in imported(str(tmp_path / "run.yml")).words
    (tmp_path / "run.yml").write_text("model_name: llama2-7b\nuse_dpo: 'true'\n")
    assert "declare objective=dpo" in problems(str(tmp_path / "run.yml"))["run.yml: use_dpo"]


def test_parts_of_the_model_and_its_loss_are_overrides():
    assert overrides("attn_logits_soft_cap=50", "final_logits_soft_cap=30.0") == {
        "model.attention_soft_cap=50", "model.logit_soft_cap=30",
    }  # fmt: skip
    words = imported("model_name=mixtral-8x7b", "per_device_batch_size=1", "load_balance_loss_weight=0.02").words
    assert "model.load_balancing_weight=0.02" in words


def test_word_of_a_variable_that_nothing_sets_is_a_note(tmp_path):
    (tmp_path / "run.sh").write_text("python3 -m MaxText.train base.yml model_name=llama2-7b steps=5 $MORE\n")
    found = imported(str(tmp_path / "run.sh"))
    assert "num_steps=5" in found.words
    assert "nothing that was read sets $MORE: what it adds is not known" in found.notes


def test_long_command_in_quotes_is_no_file_name():
    flags = " ".join(f"sa_block_q={n}" for n in range(30))
    assert "num_steps=5" in imported(f"python3 -m MaxText.train base.yml model_name=llama2-7b steps=5 {flags}").words


def test_containers_that_list_words_are_read(tmp_path):
    (tmp_path / "pod.yaml").write_text("""
apiVersion: v1
kind: Pod
spec:
  nodeSelector: {cloud.google.com/gke-tpu-accelerator: tpu-v5p-slice, cloud.google.com/gke-tpu-topology: 4x4x4}
  containers:
  - command: [python3]
    args: [-m, MaxText.train, base.yml, model_name=llama2-7b, per_device_batch_size=2]
    env: [{name: M_STEPS, value: "12"}]
""")
    found = imported(str(tmp_path / "pod.yaml"), target=None).words
    assert {"num_steps=12", "target=v5p:4x4x4", "global_batch_size=128"} <= set(found)


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        (("quantization=fp8_full",), {"precision=fp8"}),
        (("quantization=fp8",), {"precision=fp8"}),
        (("use_int8_training=true",), {"precision=int8"}),
        (("quantization=int8", "weight_dtype=bfloat16"),
         {"precision=bfloat16_pure", "precision.matmuls=[{match: null, forward: int8, gradients: int8}]"}),
    ],
)  # fmt: skip
def test_matmuls_in_few_bits_are_imported(words, precision):
    found = imported(*SMALL, *words)
    assert {word for word in found.words if word.startswith(("precision=", "precision.matmuls"))} == precision
    assert any("largest magnitude now" in note for note in found.notes)
    assert not any("experts" in note for note in found.notes)
    with_experts = imported(*SMALL, *words, "num_experts=8").words
    are_left_out = any("{match: */mlp/*_X*, forward: null, gradients: null}" in word for word in with_experts)
    assert are_left_out == ("fp8_full" not in words[0])


@pytest.mark.parametrize(
    ("kind", "precision"), [("te_fp8_currentscaling", "precision=fp8"), ("te_mxfp8", "precision=mxfp8")]
)
def test_scales_from_the_largest_magnitude_now_are_as_they_are_there(kind, precision):
    found = imported(*SMALL, f"quantization={kind}")
    assert precision in found.words
    assert not any("largest magnitude now" in note for note in found.notes)


def test_delayed_scaling_of_transformer_engine_has_its_history():
    """Of 1,024 steps by default; stages here hand on no magnitudes."""
    delayed = "quantization=te_fp8_delayedscaling"
    found = imported(*SMALL, delayed)
    rule = "{match: null, forward: fp8, gradients: fp8_e5m2, history: 1024}"
    assert f"precision.matmuls=[{rule}]" in found.words
    assert not any("largest magnitude now" in note for note in found.notes)
    staged = imported(*SMALL, delayed, "ici_pipeline_parallelism=4", "num_pipeline_microbatches=8")
    assert "precision=fp8" in staged.words
    assert any("largest magnitude now" in note for note in staged.notes)


def test_few_bits_want_a_run_in_bfloat16():
    found = problems(*SMALL, "quantization=fp8", "dtype=float32")
    assert "compute in bfloat16" in found["quantization"]
