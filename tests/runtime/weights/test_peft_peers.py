"""An adapter that PEFT made and saved is merged as PEFT merges it."""

import numpy as np
import pytest

from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.runtime.weights.folder import open_folder
from meshloom.runtime.weights.peft_folder import merged_folder

torch = pytest.importorskip("torch", reason="pip install -e '.[peers]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[peers]'")
peft = pytest.importorskip("peft", reason="pip install -e '.[peers]'")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

LLAMA = transformers.LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip
GPT2 = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=3, n_head=4)
SOME = {"r": 3, "lora_alpha": 7, "rank_pattern": {"layers.1.mlp.up_proj": 5}, "alpha_pattern": {"q_proj": 2}}
CASES = {
    "llama": (
        LLAMA,
        {"target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"], **SOME, "layers_to_transform": [1, 2]},
    ),
    "llama, rslora and the head": (LLAMA, {"target_modules": ["q_proj", "lm_head"], "use_rslora": True, "r": 4}),
    "gpt2": (GPT2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "r": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_saved_adapter_is_merged_as_by_peft(case, tmp_path):
    config, lora = CASES[case]
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(config)
    base.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(**lora))
    for name, x in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(x, std=0.3)
    adapted.save_pretrained(tmp_path / "peft")
    words = ("model=from_hf", f"model.path={tmp_path / 'base'}")
    model = read_spec(Request(words), then=lambda spec: spec.model)
    folder = open_folder(tmp_path / "peft", f"hf:{tmp_path / 'base'}")
    ours = merged_folder(folder, model).tensors
    expected = adapted.merge_and_unload().state_dict()
    changed = 0
    for name, tensor in ours.items():
        np.testing.assert_allclose(tensor.values(), expected[name].numpy(), atol=2e-6, err_msg=name)
        changed += not np.array_equal(tensor.values(), folder.tensors[name].values())
    assert changed == sum("lora_A" in name for name in folder.adapter_tensors)
