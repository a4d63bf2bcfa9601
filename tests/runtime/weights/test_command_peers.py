"""From the command line: a folder of transformers is tuned on real text, and goes back to transformers and PEFT."""

import ast
import json
import textwrap
from pathlib import Path

import pytest

from support.chats import CHATML, write_folder, write_lines
from support.commands import run_in_process

torch = pytest.importorskip("torch", reason="pip install -e '.[peers]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[peers]'")
peft = pytest.importorskip("peft", reason="pip install -e '.[peers]'")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
CONFIGS = {
    "llama": lambda **shared: transformers.LlamaConfig(
        **shared, **LAYERS, num_key_value_heads=2, max_position_embeddings=256
    ),
    "qwen3_moe": lambda **shared: transformers.Qwen3MoeConfig(
        **shared, **LAYERS, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24, norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=256,
    ),
    "gpt2": lambda **shared: transformers.GPT2Config(**shared, n_positions=256, n_embd=32, n_layer=2, n_head=4),
}  # fmt: skip
TRAINED = (
    "adapter=lora", "num_steps=12", "schedule.num_warmup_steps=0", "optimizer.learning_rate=0.02", "target=cpu-8",
    "precision=float32", "sequence_length=256", "global_batch_size=8", "data.held_out_fraction=0",
    "sharding.on_replicated=allow", "hydra.run.dir=run",
)  # fmt: skip


def _questions() -> list[dict[str, str]]:
    """Returns what functions of the standard library do, by their docstrings."""
    tree = ast.parse(Path(textwrap.__file__).with_name("pathlib.py").read_text())
    named = [(node.name, ast.get_docstring(node)) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [{"prompt": f"What does {name} do?\n", "completion": text[:120]} for name, text in named if text][:48]


def _loss(model, tokenizer) -> float:
    """Returns the mean loss of the answers' tokens and their ends, one question at a time."""
    total, count = 0.0, 0
    for question in _questions():
        text = question["prompt"] + question["completion"]
        encoded = tokenizer(text, return_offsets_mapping=True)
        ids = torch.tensor([[*encoded["input_ids"], tokenizer.eos_token_id]])
        is_answer = [end > len(question["prompt"]) for _, end in encoded["offset_mapping"]] + [True]
        labels = torch.where(torch.tensor([is_answer]), ids, -100)
        with torch.no_grad():
            number = sum(is_answer)
            total, count = total + float(model(ids, labels=labels).loss) * number, count + number
    return total / count


def _of_command(*words: str, cwd: Path) -> str:
    done = run_in_process(*words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("family", CONFIGS)
def test_a_tuned_folder_has_our_loss_in_transformers_and_in_peft(family, tmp_path):
    theirs = write_folder(tmp_path / "theirs", "chatml", CHATML)
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs)
    torch.manual_seed(0)
    config = CONFIGS[family](vocab_size=8 * (len(tokenizer) // 8 + 1))
    base = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in base.parameters():  # its own initialisation is too weak to show a wrong layout
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    base.save_pretrained(theirs)
    write_lines(tmp_path / "answers.jsonl", *_questions())
    data = ("data=chats", "data.source.paths=[answers.jsonl]")
    _of_command("train", "model=from_hf", "model.path=theirs", *data, *TRAINED, cwd=tmp_path)
    evaluated = ("split=all", "num_batches=100", "--json")
    ours = json.loads(_of_command("evaluate", "run", *evaluated, cwd=tmp_path))["losses"][0]["loss"]
    _of_command("export", "run", "format=huggingface", "directory=merged", "dtype=float32", cwd=tmp_path)
    _of_command("export", "run", "format=peft", "directory=adapter", cwd=tmp_path)
    loaded = {"dtype": torch.float32, "attn_implementation": "eager"}
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", **loaded).eval()
    fresh = transformers.AutoModelForCausalLM.from_pretrained(theirs, **loaded).eval()
    untuned = _loss(fresh, tokenizer)
    adapted = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    assert ours < untuned - 0.1
    assert abs(_loss(merged, tokenizer) - ours) < 1e-3
    assert abs(_loss(adapted, tokenizer) - ours) < 1e-3
    tokens = torch.arange(64)[None] + 50
    with torch.no_grad():
        of_merged, of_adapted = merged(tokens).logits, adapted(tokens).logits
    assert float((of_merged - of_adapted).abs().max() / of_merged.abs().max()) < 1e-5
    words = (*data, "sequence_length=256", "global_batch_size=8", "precision=float32", *evaluated)
    again = json.loads(_of_command("evaluate", "merged", *words, cwd=tmp_path))["losses"][0]["loss"]
    assert abs(again - ours) < 1e-5
