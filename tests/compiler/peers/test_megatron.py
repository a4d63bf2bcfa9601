"""Megatron's arguments, compared with overrides that were written by hand from its documentation."""

from pathlib import Path

import pytest
import yaml

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.peers import megatron
from meshloom.compiler.peers.importing import import_declaration
from meshloom.compiler.peers.reading import Imported, peer_of

SCRIPT = """\
GPUS=8
MODEL=(
    --num-layers 32 # of the 8B model
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000
    --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0 --vocab-size 128256
)
torchrun --nproc_per_node $GPUS --nnodes 2 pretrain_gpt.py ${MODEL[@]} \\
    --micro-batch-size 1 --global-batch-size 128 --train-iters 100 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine \\
    --bf16 --use-distributed-optimizer --save $1 --adam-beta2 0.95 --weight-decay 0.1
"""
LLAMA3_8B = {
    "model=llama2_7b", "model.embed_dim=4096", "model.num_layers=32", "model.num_heads=32", "model.num_kv_heads=8",
    "model.head_dim=128", "model.mlp_dim=14336", "model.mlp=gated", "model.mlp_activation=silu", "model.norm=rms",
    "model.norm_epsilon=1e-05", "model.biases=none", "model.embeddings=separate", "model.rope_theta=500000",
    "model.dropout_rate=0", "model.vocab_size=128256",
}  # fmt: skip
OTHERS = {
    "target=h100-16", "sequence_length=8192", "global_batch_size=128", "num_microbatches=8", "remat=none",
    "data=synthetic", "sharding=zero1", "sharding.mesh_axes=[replica,data]",
    "sharding.parameters=[{logical: [experts], mesh: [expert]}, {logical: [vocab, mlp, heads, kv_heads], "
    "mesh: [tensor]}, {logical: [embed, layers, head_dim], mesh: []}]",
    "sharding.optimizer=[{logical: [embed], mesh: [data]}]", "sharding.on_replicated=allow",
    "precision=bfloat16_params", "precision.gradients=float32", "precision.gradient_reduction=float32",
    "optimizer.learning_rate=0.0001", "num_steps=100", "schedule=cosine", "schedule.num_warmup_steps=0",
    "schedule.final_learning_rate_fraction=0.1",
}  # fmt: skip


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    return str(path)


def imported(*words: str, target: str | None = "h100-16") -> Imported:
    return import_declaration("megatron", words, target, lambda place: Path(place).read_text())


def test_script_is_the_declaration_of_a_reading_by_hand(script):
    found = imported(script)
    assert set(found.words) == LLAMA3_8B | OTHERS
    assert found.without_effect["paths, logs and profiles"] == ("save",)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
         {"remat=full"}),
        (("--recompute-activations",), set()),
        (("--tensor-model-parallel-size", "8", "--sequence-parallel"),
         {"mesh.tensor=8", "num_microbatches=64", "sharding.mesh_axes=[replica,data,tensor]",
          "model.vocab_size=129024"}),  # 126 times 1,024
        (("--pipeline-model-parallel-size", "4"), {"mesh.stage=4", "num_microbatches=32"}),
        (("--pipeline-model-parallel-size=4", "--num-layers-per-virtual-pipeline-stage=2"),
         {"mesh.stage=4", "num_microbatches=32", "pipeline=interleaved_1f1b", "pipeline.num_chunks=4"}),
        (("--context-parallel-size", "2"),
         {"mesh.context=2", "num_microbatches=16", "parallel.context=ring",
          "sharding.mesh_axes=[replica,data,context]",
          "sharding.optimizer=[{logical: [embed], mesh: [data, context]}]"}),
        (("--grad-reduce-in-bf16",), set()),
        (("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"), {"sharding=fsdp"}),
        (("--data-parallel-sharding-strategy=optim_grads",), {"sharding=zero2"}),
        (("--exp-avg-dtype", "bf16"), {"optimizer.first_moment_dtype=bfloat16"}),
        (("--exp-avg-dtype", "fp8"), {"optimizer.first_moment_dtype=float8"}),
        (("--clip-grad", "0"), {"optimizer.max_grad_norm=null"}),
    ],
)  # fmt: skip
def test_argument_is_the_override_of_a_reading_by_hand(words, expected, script):
    assert set(imported(script, *words).words) - LLAMA3_8B - OTHERS == expected


@pytest.mark.parametrize(
    ("words", "expected", "says"),
    [
        ((), {"model.load_balancing_weight=0", "model.router_z_loss_weight=0"}, ""),
        (("--moe-aux-loss-coeff", "0.01", "--moe-z-loss-coeff", "1e-3"),
         {"model.load_balancing_weight=0.01", "model.router_z_loss_weight=0.001"}, ""),
        (("--moe-router-load-balancing-type", "global_aux_loss", "--moe-aux-loss-coeff", "0.01"),
         {"model.load_balancing_weight=0.01", "model.load_balancing_counts=global", "model.router_z_loss_weight=0"},
         "the whole global batch before"),
        (("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "0.01"),
         {"model.load_balancing_weight=0.01", "model.router_z_loss_weight=0"}, "of a sequence there"),
        (("--moe-router-load-balancing-type", "none", "--moe-aux-loss-coeff", "0.01"),
         {"model.load_balancing_weight=0", "model.router_z_loss_weight=0"}, ""),
    ],
)  # fmt: skip
def test_losses_of_routers_are_those_that_are_given(words, expected, says, script):
    found = imported(script, "--num-experts", "8", *words)
    losses = {word for word in found.words if word.startswith(("model.load_balancing", "model.router"))}
    assert losses == expected
    notes = [note for note in found.notes if "load_balancing" in note]
    assert len(notes) == bool(says)
    assert says in "".join(notes)


def test_gradients_reduced_in_bfloat16_are_so_here(script):
    words = imported(script, "--grad-reduce-in-bf16").words
    assert not any(word.startswith("precision.") for word in words)  # bfloat16_params reduces in bfloat16


def test_recipe_of_bridge_names_model_and_gpus():
    command = "python scripts/performance/setup_experiment.py --gpu h100 -m llama -mr llama3_70b -ng 64 -tp 4 -pp 4 "
    command += "-mb 1 -gb 128 -c bf16"
    words = set(imported(command, target=None).words)
    assert {"model=llama3_70b", "target=h100-64", "sequence_length=8192", "mesh.tensor=4", "mesh.stage=4",
            "num_microbatches=32", "precision=bfloat16_params"} < words  # fmt: skip
    same = command.replace("-tp 4", "model.tensor_model_parallel_size=4")
    assert set(imported(same, target=None).words) == words


def test_all_problems_are_reported_at_once(script):
    words = ("--fp4-format", "e2m1", "--micro-batch-sise", "1", "--recompute-granularity", "full",
             "--recompute-method", "block", "--mtp-num-layers", "1")  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        imported(script, *words, target=None)
    found = {each.where.removeprefix("train.sh").removeprefix(": "): each for each in caught.value.problems}
    assert found.keys() == {"fp4_format", "micro_batch_sise", "recompute_method", "mtp_num_layers", ""}
    assert "it starts 16" in found[""].what
    assert "did you mean 'micro_batch_size'" in found["micro_batch_sise"].fix


def test_each_key_that_decides_is_read():
    text = Path(megatron.__file__).read_text()
    assert {key for key in peer_of("megatron").defaults if f'"{key}"' not in text} == set()


def _yaml_of(script: str) -> dict[str, object]:
    """Returns the words of the script above as keys, as a test of Megatron-LM has them."""
    found: dict[str, object] = {}
    for word in script.replace("\\\n", " ").partition("MODEL=(")[2].replace(")", " ").split():
        if word.startswith("--"):
            found[word] = True
        elif found and not word.startswith(("#", "torchrun", "$")):
            last = next(reversed(found))
            found[last] = word if found[last] is True else found[last]
    return {key: value for key, value in found.items() if key not in ("--nproc_per_node", "--nnodes", "--save")}


def test_yaml_of_arguments_is_what_their_words_are(tmp_path):
    keys = _yaml_of(SCRIPT)
    (tmp_path / "a.yaml").write_text(
        yaml.safe_dump({"ENV_VARS": {"CUDA_DEVICE_MAX_CONNECTIONS": 1}, "MODEL_ARGS": keys})
    )
    assert set(imported(str(tmp_path / "a.yaml")).words) == LLAMA3_8B | OTHERS
    plain = {key.removeprefix("--").replace("-", "_"): value for key, value in keys.items()}
    steps = {"train_iters": plain.pop("train_iters")}
    (tmp_path / "b.yaml").write_text(yaml.safe_dump({"model": plain, "train": steps}))
    assert set(imported(str(tmp_path / "b.yaml")).words) == LLAMA3_8B | OTHERS
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(plain | {"trainer": {"devices": 8}}))
    with pytest.raises(ConfigError, match=r"c.yaml: trainer.devices"):
        imported(str(tmp_path / "c.yaml"))


def test_words_of_other_sections_are_not_dropped(script):
    with pytest.raises(ConfigError, match=r"recipe\.train\.micro_batch_size=3.*declares nothing"):
        imported(script, "recipe.train.micro_batch_size=3")


@pytest.mark.parametrize(("words", "expected"), [
    (("--moe-router-score-function", "sigmoid", "--moe-router-topk-scaling-factor", "2.5",
      "--moe-router-num-groups", "4", "--moe-router-group-topk", "2"),
     {"model.router_scores=sigmoid", "model.router_scale=2.5", "model.num_expert_groups=4",
      "model.num_groups_per_token=2"}),
    (("--moe-router-pre-softmax",), {"model.router_weights=scores"}),
    (("--moe-router-enable-expert-bias",), {"model.router_bias_update_rate=0.001"}),
    (("--init-method-std", "0.008"), {"model.initializer_stddev=0.008"}),
])  # fmt: skip
def test_routers_and_first_weights_are_overrides(words, expected, script):
    experts = ("--num-experts", "8", "--moe-router-topk", "2")
    assert set(imported(script, *experts, *words).words) - set(imported(script, *experts).words) == expected


def test_what_changes_the_schedule_is_said(script):
    assert imported(script, "--lr-decay-iters", "100").notes == imported(script).notes
    assert any("lr_decay_iters=50" in note for note in imported(script, "--lr-decay-iters", "50").notes)
    with pytest.raises(ConfigError, match="a weight decay that does not change"):
        imported(script, "--weight-decay-incr-style", "linear")


def test_moments_on_the_host_are_so_here(script):
    found = imported(script, "--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d", target="v5p-16")
    assert set(found.words) - set(imported(script, target="v5p-16").words) == {"optimizer.moments_on=host"}
    assert found.without_effect["what overlaps"] == ("overlap_cpu_optimizer_d2h_h2d",)
    assert [note for note in found.notes if "offload" in note] == [
        "optimizer_cpu_offload: the moments of layers lie on the host here; the update and all else of the state stay "
        "on the device"
    ]
    half = imported(script, "--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5", target="v5p-16")
    assert half.words == found.words
    assert any(note.startswith("optimizer_offload_fraction=0.5: all layers") for note in half.notes)
    none = imported(script, "--optimizer-cpu-offload", "--optimizer-offload-fraction", "0")
    assert set(none.words) == LLAMA3_8B | OTHERS
    with pytest.raises(ConfigError, match="of TPUs alone here, and the target is h100-16"):
        imported(script, "--optimizer-cpu-offload")


@pytest.mark.parametrize(
    ("words", "history", "note"),
    [
        (("--fp8-format", "hybrid"), 1, ""),  # its recipe is delayed, with the magnitude of the step before
        (("--fp8-format", "hybrid", "--fp8-amax-history-len", "16", "--fp8-amax-compute-algo", "max"), 16, ""),
        (("--fp8-format", "hybrid", "--fp8-amax-history-len", "16"), 1, ""),
        (("--fp8-format", "hybrid", "--fp8-margin", "2"), 1, "fp8_margin=2: scales have no margin here"),
        (("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"), None, ""),
        (("--compute-dtype", "fp8_ds"), 1024, ""),
        (("--compute-dtype", "fp8_cs"), None, ""),
        (("--fp8-format", "hybrid", "--pipeline-model-parallel-size", "2"), None, "as stages hand on none"),
    ],
)
def test_scales_from_earlier_steps_are_those_of_the_recipe(words, history, note, script):
    found = imported(script, "--bf16", *words)
    (rules,) = (word for word in found.words if word.startswith("precision.matmuls"))
    more = "" if history is None else f", history: {history}"
    assert rules == f"precision.matmuls=[{{match: null, forward: fp8, gradients: fp8_e5m2{more}}}]"
    assert any(note in each for each in found.notes) == bool(note)


def test_fp8_is_imported(script):
    words = set(imported(script, "--bf16", "--fp8-format", "hybrid", "--fp8-param-gather").words)
    rule = "{match: null, forward: fp8, gradients: fp8_e5m2, gather: fp8, history: 1}"
    assert f"precision.matmuls=[{rule}]" in words
    e4m3 = set(imported(script, "--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "tensorwise").words)
    assert "precision.matmuls=[{match: null, forward: fp8, gradients: fp8}]" in e4m3
    words = ("--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8", "--fp8-param-gather")
    blocks = imported(script, *words)
    assert "precision.matmuls=[{match: null, forward: mxfp8, gradients: mxfp8}]" in blocks.words
    assert "fp8_param_gather: weights are gathered in bfloat16 here" in blocks.notes
    assert not any("earlier steps" in note for note in blocks.notes)
    tiles = imported(script, "--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "blockwise")
    both = "forward: fp8_blockwise_ue8m0, gradients: fp8_blockwise_ue8m0"
    assert f"precision.matmuls=[{{match: null, {both}}}]" in tiles.words
    assert any("scales are powers of two" in note for note in tiles.notes)
    with pytest.raises(ConfigError, match="with a scale for each tensor, and mxfp8 and blockwise in e4m3"):
        imported(script, "--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "mxfp8")
