"""`meshloom evaluate`: the loss of a run's weights, alone, on any mesh and any data."""

import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer

import meshloom
from conftest import SMALL, plan_of
from meshloom.compiler.declare.compose import Request
from meshloom.compiler.xla.programs import build, lower
from meshloom.models import IGNORED_TARGET
from meshloom.runtime.inference import evaluate as module
from meshloom.runtime.inference.evaluate import Evaluation
from meshloom.runtime.inference.open_weights import OpenedWeights
from meshloom.runtime.rundir.folders import recorded_run
from support.commands import run_in_process
from support.reference import forward

RUN = (*SMALL, "num_steps=4", "evaluation.every_num_steps=2", "evaluation.num_batches=2",
       "checkpoint.every_num_steps=2", "checkpoint.keep=3", "sharding=fsdp_tensor", "logging.trackers=[]")  # fmt: skip

LOWER = module.lower
MULTIPLE_CHOICE = """\
task: ours_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choice.jsonl}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ROLLING = """\
task: ours_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rolling.jsonl}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
"""
TASKS = ("ours_choice", "ours_rolling")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    done = run_in_process("train", *RUN, "hydra.run.dir=run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def _eval_losses(run_dir) -> dict[int, float]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["eval_loss"] for row in rows if row["eval_loss"] is not None}


def _evaluated(place, *words) -> dict:
    done = run_in_process("evaluate", str(place), *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.ci
def test_the_loss_is_the_runs_own_and_only_its_parameters_and_one_program_are_needed(run_dir, monkeypatch):
    lowered = []
    monkeypatch.setattr(module, "lower", lambda plan, mesh, names: lowered.append(names) or LOWER(plan, mesh, names))
    of_run = _eval_losses(run_dir)
    for place, step in ((run_dir, 4), (run_dir / "checkpoints/2", 2)):
        found = _evaluated(place)
        assert found["losses"][0]["loss"] == of_run[step]
        assert found["weights"]["step"] == step
    assert lowered == [("evaluate",)] * 2


@pytest.mark.cases(plain=1, ci=2)
@pytest.mark.ci
@pytest.mark.parametrize("words", [
    ("sharding=ddp", "target=cpu-1"), ("sharding=fsdp", "num_microbatches=2"), ("sharding=fsdp_context",),
    ("optimizer=sgd",),  # whose state is another
], ids=" ".join)  # fmt: skip
def test_the_loss_is_the_same_on_every_mesh(run_dir, words):
    assert _evaluated(run_dir, *words)["losses"][0]["loss"] == pytest.approx(_eval_losses(run_dir)[4], rel=2e-3)


@pytest.mark.ci
def test_each_checkpoint_is_opened_by_the_words_it_was_trained_with(run_dir, tmp_path):
    again, losses = tmp_path / "run", _eval_losses(run_dir)
    shutil.copytree(run_dir, again)
    words = (*RUN, "model.rope_theta=20.0", "num_steps=5", f"hydra.run.dir={again}")
    done = run_in_process("train", *words)
    assert done.returncode == 0, done.stderr
    differs = "the weights of checkpoint 4 were trained as something else: model.rope_theta 10000.0 there, 20.0 here"
    before, _, after = done.stdout.partition(f"warning: {differs}")
    assert "compil" in after
    assert "compil" not in before
    assert _evaluated(f"{again}/checkpoints/4")["losses"][0]["loss"] == losses[4]
    with recorded_run(again, "train", Request((*RUN, "model.rope_theta=1e6", "model.num_layers=9"))):
        """Leaves the words of a run that was stopped before its first step."""
    for step, words in ((4, ()), (5, ("model.rope_theta=20.0",))):
        done = run_in_process("evaluate", f"{again}/checkpoints/{step}", *words)
        assert done.returncode == 0, done.stderr
        assert "something else" not in done.stdout
    done = run_in_process("evaluate", f"{again}/checkpoints/4", "model.rope_theta=20.0")
    assert differs in " ".join(done.stdout.split())


@pytest.mark.ci
def test_people_read_a_line_and_other_data_have_another_loss(run_dir):
    done = run_in_process("evaluate", str(run_dir), "data=synthetic", "evaluation.split=all", "sequence_length=100")
    assert done.returncode == 0, done.stderr
    assert f"weights: step 4 of {run_dir}/checkpoints" in done.stdout
    assert "all: loss " in done.stdout
    assert "bits per byte (" in done.stdout
    (found,) = _evaluated(run_dir, "data=synthetic", "evaluation.split=all", "sequence_length=100")["losses"]
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))


@pytest.mark.ci
def test_weights_of_another_model_are_listed_before_anything_is_compiled(run_dir):
    done = run_in_process("evaluate", str(run_dir), "model.mlp_dim=128")
    assert done.returncode == 2
    assert "holds the parameters of another model" in done.stderr
    assert "params/layers/mlp/up_EM is float32" in done.stderr


@pytest.mark.ci
def test_from_python_it_is_the_same(run_dir):
    found = meshloom.evaluate(run_dir, "evaluation.num_batches=2")
    assert isinstance(found, Evaluation)
    assert found.loss == _eval_losses(run_dir)[4]
    assert (found.step, found.split) == (4, "held_out")
    assert repr(found).startswith("<Evaluation: held_out: loss ")


@pytest.mark.ci
def test_weights_that_are_not_finite_end_with_the_exit_code_of_a_run_that_is(run_dir, monkeypatch):
    opened = module.open_weights
    broken = lambda *args: jax.tree.map(lambda x: x * jnp.nan, opened(*args).params)  # noqa: E731
    monkeypatch.setattr(module, "open_weights", lambda *args: OpenedWeights(broken(*args), "run", 4))
    done = run_in_process("evaluate", str(run_dir))
    assert done.returncode == 5
    assert "the loss of data is nan" in done.stderr


@pytest.mark.ci
@pytest.mark.parametrize("overrides", [
    ("sharding=fsdp_tensor", "num_microbatches=2", "loss.max_logits_bytes=4096", "loss.max_logits_share=0.0"),
    ("sharding=fsdp_context",),
], ids=" ".join)  # fmt: skip
def test_a_row_is_scored_by_its_own_targets_alone(overrides):
    """Log-probabilities, and the targets that are not the likeliest, against logits of one device."""
    plan = plan_of(*overrides)
    mesh = plan.mesh.of_devices(jax.devices()[:8])
    program = build(lower(plan, mesh, ("scores",)))
    params = jax.tree.map(np.asarray, plan.model.init(jax.random.key(0)))
    chance = np.random.default_rng(0)
    tokens = chance.integers(0, 256, (16, 17))
    logits = np.asarray(forward(plan.model, params, jnp.asarray(tokens[:, :-1])), np.float64)
    best = logits.argmax(-1)
    targets = np.where(chance.random((16, 16)) < 0.5, best, tokens[:, 1:])
    targets = np.where(np.arange(16) < chance.integers(0, 16, (16, 1)), IGNORED_TARGET, targets)
    targets[3] = np.where(targets[3] < 0, IGNORED_TARGET, best[3])  # a greedy row
    rows, order = plan.batch.row_order.rows(), plan.batch.token_order.of_sequence(16)
    host = {"inputs": tokens[:, :-1], "targets": targets}
    host = {name: (x if order is None else x[:, order])[rows].astype(np.int32) for name, x in host.items()}
    batch = {name: jax.device_put(x, program.batch[name].sharding) for name, x in host.items()}
    on_devices = jax.device_put(params, jax.tree.map(lambda x: x.sharding, program.state["params"]))
    log_probs, misses = np.asarray(program["scores"](on_devices, batch))
    of_all = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    counted = targets >= 0
    own = np.take_along_axis(of_all, np.maximum(targets, 0)[..., None], -1)[..., 0]
    np.testing.assert_allclose(log_probs, (own * counted).sum(-1), rtol=1e-4)
    np.testing.assert_array_equal(misses, ((targets != best) & counted).sum(-1))
    assert misses[3] == 0


@pytest.fixture
def tasks(tmp_path):
    """A folder with a task of each kind, on local files."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    choices = [{"q": f"{i} + {i} is", "choices": [f" {j}" for j in (i, 2 * i, 7)], "label": 1} for i in range(12)]
    texts = [{"text": f"The answer to question {i} is {i * i}.\n" * (i + 1)} for i in range(5)]
    for name, lines, task in (("choice", choices, MULTIPLE_CHOICE), ("rolling", texts, ROLLING)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / f"{name}.yaml").write_text(task.format(folder=folder))
    return folder


def _ours(place, tasks, *words):
    line = ("evaluate", str(place), f"tasks=[{','.join(TASKS)}]", f"tasks_path={tasks}", "--json", *words)
    done = run_in_process(*line, HF_DATASETS_CACHE=str(tasks / "cache"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _published_llama(folder):
    """A random Llama of transformers with a tokenizer of 300 tokens, saved; weights large enough that errors show."""
    torch = pytest.importorskip("torch", reason="pip install -e '.[peers]'")
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[peers]'")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["The answer to question 12 is 144.\n"] * 9, vocab_size=300, special_tokens=["<end>"])
    bpe.save(str(folder / "tokenizer.json"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<end>")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=64, bos_token_id=None, eos_token_id=0,
        attn_implementation="eager", initializer_range=0.3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.mark.peers
def test_two_tasks_give_the_numbers_of_transformers(tmp_path, tasks, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval", reason="pip install -e '.[peers]'")
    hf_model = pytest.importorskip("lm_eval.models.huggingface", reason="pip install -e '.[peers]'").HFLM
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tasks / "cache"))
    folder = tmp_path / "llama"
    folder.mkdir()
    model, tokenizer = _published_llama(folder)
    found = _ours(
        folder, tasks, "sequence_length=48", "precision=float32", "data/tokenizer=huggingface",
        f"data.tokenizer.path={folder}/tokenizer.json",
    )  # fmt: skip
    theirs = lm_eval.simple_evaluate(
        model=hf_model(pretrained=model, tokenizer=tokenizer, max_length=48, batch_size=4), tasks=list(TASKS),
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False), bootstrap_iters=0,
    )  # fmt: skip
    for task in TASKS:
        for metric, value in found["tasks"][task].items():
            if metric != "sample_len":
                assert value == pytest.approx(theirs["results"][task][f"{metric},none"], rel=1e-4), metric
