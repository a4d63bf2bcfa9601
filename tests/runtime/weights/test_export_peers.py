"""A folder that transformers wrote goes through a checkpoint of ours and back, and transformers computes the same."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.compiler.core.console import Console
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.runtime.checkpoint.checkpoints import Checkpoints
from meshloom.runtime.cli.weights import open_merged
from meshloom.runtime.weights.export import prepare_export, run_export
from meshloom.runtime.weights.find import find_weights
from meshloom.runtime.weights.folder import open_folder
from meshloom.runtime.weights.load import load_params
from support.loops import NoData
from support.reference import reference_loss

torch = pytest.importorskip("torch", reason="pip install -e '.[peers]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[peers]'")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

SHARED = {"vocab_size": 264, "max_position_embeddings": 64}
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SHARED, **LAYERS, num_key_value_heads=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SHARED, **LAYERS, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24, norm_topk_prob=True, decoder_sparse_step=1,
    ),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=264, n_positions=64, n_embd=32, n_layer=2, n_head=4),
}  # fmt: skip
OTHER = ("sequence_length=24", "global_batch_size=8", "num_steps=1", "data=synthetic", "precision=float32",
         "schedule.num_warmup_steps=0", "logging=quiet", "target=cpu-8", "sharding.on_replicated=allow")  # fmt: skip


def _losses(folder: Path, tokens: np.ndarray) -> float:
    """Returns the loss that transformers computes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return float(model.eval()(torch.tensor(tokens), labels=torch.tensor(tokens)).loss)


@pytest.mark.parametrize("family", CONFIGS)
def test_losses_are_equal_before_and_after(family, tmp_path):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]())
    for parameter in model.parameters():  # its own initialisation is too weak to show a wrong layout
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "theirs")
    tokens = np.random.default_rng(0).integers(0, 264, (2, 24))
    words = ("model=from_hf", f"model.path={tmp_path / 'theirs'}", *OTHER)
    spec = read_spec(Request(words), then=lambda spec: spec)
    plan = plan_run(spec)
    weights = find_weights(plan)
    assert weights is not None
    params = load_params(plan, plan.mesh.of_devices(jax.devices()[:8]), weights, Console(is_quiet=True))
    alone = jax.device_put(params, jax.devices()[0])
    with jax.default_matmul_precision("highest"):
        ours = reference_loss(plan.model, alone, jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:]))
    theirs = _losses(tmp_path / "theirs", tokens)
    assert abs(float(ours) - theirs) < 1e-3
    with Checkpoints(tmp_path / "run", spec) as checkpoints:
        checkpoints.save(1, {"step": jnp.int32(1), "params": params}, NoData(), num_tokens=0, eval_loss=None)
    places = (f"checkpoint.weights_from={tmp_path / 'run'}", f"export.directory={tmp_path / 'out'}")
    more = ("export.dtype=float32", "export.max_shard_bytes=30000")
    exported = read_spec(Request((*words, *places, *more)), then=lambda spec: prepare_export(spec, open_merged))
    run_export(exported, Console(is_quiet=True))
    assert _losses(tmp_path / "out", tokens) == theirs
    before, after = open_folder(tmp_path / "theirs").tensors, open_folder(tmp_path / "out").tensors
    assert all(np.array_equal(after[name].values(), before[name].values()) for name in after)
