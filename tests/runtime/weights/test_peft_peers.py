"""An adapter that PEFT made and saved is merged as PEFT merges it."""

import numpy as np
import pytest

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.models.published import tensors_in
from meshloom.models.published.peft import write_peft
from meshloom.runtime.weights.folder import match_folder, open_folder
from meshloom.runtime.weights.peft_folder import adapter_arrays, merged_folder

torch = pytest.importorskip("torch", reason="pip install -e '.[peers]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[peers]'")
peft = pytest.importorskip("peft", reason="pip install -e '.[peers]'")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

LLAMA = transformers.LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip
QWEN2 = transformers.Qwen2Config(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
GPT2 = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=3, n_head=4)
SOME = {"r": 3, "lora_alpha": 7, "rank_pattern": {"layers.1.mlp.up_proj": 5}, "alpha_pattern": {"q_proj": 2}}
CASES = {
    "llama": (
        LLAMA,
        {"target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"], **SOME, "layers_to_transform": [1, 2]},
    ),
    "llama, rslora and the head": (LLAMA, {"target_modules": ["q_proj", "lm_head"], "use_rslora": True, "r": 4}),
    "llama, dora": (LLAMA, {"target_modules": "all-linear", "use_dora": True, "use_rslora": True, "r": 3}),
    "gpt2, dora": (GPT2, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "use_dora": True}),
    "the table": (LLAMA, {"target_modules": ["embed_tokens", "v_proj"], "lora_alpha": 5}),
    "the head in whole": (LLAMA, {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "qwen 2, biases": (QWEN2, {"target_modules": ["q_proj", "v_proj"], "bias": "all"}),
    "gpt2, biases": (GPT2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "lora_only"}),
    "a flag that PEFT sets back": (LLAMA, {"target_modules": ["q_proj"], "fan_in_fan_out": True}),
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
        if x.requires_grad:
            torch.nn.init.normal_(x, std=0.3)
        if "magnitude" in name:
            torch.nn.init.uniform_(x, 0.5, 2.0)
    adapted.save_pretrained(tmp_path / "peft")
    words = ("model=from_hf", f"model.path={tmp_path / 'base'}")
    model = read_spec(Request(words), then=lambda spec: spec.model)
    folder = open_folder(tmp_path / "peft", f"hf:{tmp_path / 'base'}")
    ours = merged_folder(folder, model).tensors
    expected = adapted.merge_and_unload().state_dict()
    changed, expected_to = set[str](), set[str]()
    for name, tensor in ours.items():
        np.testing.assert_allclose(tensor.values(), expected[name].numpy(), atol=5e-6, err_msg=name)
        of_base = folder.tensors[name].values()
        changed |= {name} if not np.array_equal(tensor.values(), of_base) else set()
        expected_to |= {name} if not np.allclose(expected[name].numpy(), of_base, atol=1e-4) else set()
    assert changed == expected_to != set()


def test_an_adapter_of_a_tied_head_leaves_the_table(tmp_path):
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(QWEN2)
    base.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "peft")
    words = ["model=from_hf", f"model.path={tmp_path / 'base'}"]
    folder = open_folder(tmp_path / "peft", f"hf:{tmp_path / 'base'}")

    def matched(*more: str):
        model = read_spec(Request((*words, *more)), then=lambda spec: spec.model)
        merged = merged_folder(folder, model)
        match_folder(merged, tensors_in(model, merged.tensors, "qwen2"), (), ())
        return model, merged

    with pytest.raises(ConfigError, match=r"keep it apart: model\.embeddings=separate"):
        matched()
    tokens = torch.arange(12)[None]
    _, merged = matched("model.embeddings=separate")
    hidden = base.model(tokens).last_hidden_state.detach().numpy()
    theirs = adapted(tokens).logits.detach().numpy()
    np.testing.assert_allclose(hidden @ merged.tensors["lm_head.weight"].values().T, theirs, atol=1e-5)
    assert merged.tensors["model.embed_tokens.weight"] is folder.tensors["model.embed_tokens.weight"]


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_of_peft_goes_on(kind, tmp_path):
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(GPT2 if kind == "lora" else LLAMA)
    base.save_pretrained(tmp_path / "base")
    names = ["c_fc"] if kind == "lora" else ["q_proj", "down_proj"]
    lora = peft.LoraConfig(
        target_modules=names, r=4, lora_alpha=6, use_dora=kind == "dora", fan_in_fan_out=kind == "lora"
    )
    adapted = peft.get_peft_model(base, lora)
    for name, x in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.uniform_(x, 0.5, 2.0)
    adapted.save_pretrained(tmp_path / "peft")
    paths = ["layers/mlp/up_EM"] if kind == "lora" else ["layers/attention/query_EHD", "layers/mlp/down_ME"]
    words = ("model=from_hf", f"model.path={tmp_path / 'base'}", f"adapter={kind}", "adapter.rank=4",
             "adapter.alpha=6", f"adapter.targets=[{','.join(paths)}]", "target=cpu-1",
             "sequence_length=16")  # fmt: skip
    plan = read_spec(Request(words), then=plan_run)
    folder = open_folder(tmp_path / "peft", f"hf:{tmp_path / 'base'}")
    read = adapter_arrays(folder, plan.spec.model, plan.model)
    written, said = write_peft(plan.spec.model, plan.model, read | _matrices(folder, plan), base="base")
    theirs = {name: tensor.values() for name, tensor in folder.adapter_tensors.items()}
    assert written.keys() == theirs.keys()
    for name, x in theirs.items():
        np.testing.assert_allclose(written[name], x, atol=1e-5, err_msg=name)
    assert said["use_dora"] == (kind == "dora")


def _matrices(folder, plan) -> dict[str, np.ndarray]:
    """Returns the base's parameters by path, with the layers of a stack along a first dimension."""
    found = dict[str, dict[int, np.ndarray]]()
    for tensor in tensors_in(plan.spec.model, folder.tensors, folder.model_type).tensors:
        ours = tensor.to_ours(folder.tensors[tensor.name].values())
        for slot, x in zip(tensor.slots, ours, strict=True):
            found.setdefault(slot.path, {})[slot.index[0] if slot.index else 0] = np.asarray(x)
    return {path: np.stack([each[n] for n in sorted(each)]) for path, each in found.items()}
