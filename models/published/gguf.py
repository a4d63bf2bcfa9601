"""Models in files of GGUF, of llama.cpp: its metadata as a config.json, and its tensors under published names. Pure.

    llama.block_count 32    blk.7.attn_q.weight
      -> num_hidden_layers: 32    model.layers.7.self_attn.q_proj.weight, with its rows in the order of transformers

llama.cpp turns neighbours by rotary positions in models of Llama, and stores Gemma's norms as scales and GPT-2's
matrices as (outputs, inputs).
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .contract import Mistake, NotUnderstood, Values

Turn = Callable[[np.ndarray], np.ndarray]

LAYER = r"blk\.(\d+)\."
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
OF_LAYERS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
NORMS_AROUND = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
OF_GPT2 = {
    "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip
# The stretches of Llama 3.1 and 3.2, of which a file has the factors alone, as a tensor: factor, lowest and highest
# frequency, length.
LLAMA3 = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (16.0, 1.0, 1.0, 8192))
FREQUENCIES = "rope_freqs.weight"


@dataclass(frozen=True)
class Architecture:
    """A value of general.architecture. family: its name in config.json. layers, ends: published names by those of GGUF,
    of the layers below `above`. turned: whether rows of queries and keys have rotary pairs as neighbours."""

    family: tuple[str, str]
    layers: Mapping[str, str]
    ends: Mapping[str, str]
    above: str = "model.layers"
    turned: bool = False


KNOWN = {
    "llama": Architecture(("LlamaForCausalLM", "llama"), OF_LAYERS, ENDS, turned=True),
    "qwen2": Architecture(("Qwen2ForCausalLM", "qwen2"), OF_LAYERS, ENDS),
    "qwen3": Architecture(("Qwen3ForCausalLM", "qwen3"), OF_LAYERS, ENDS),
    "gemma2": Architecture(("Gemma2ForCausalLM", "gemma2"), OF_LAYERS | NORMS_AROUND, ENDS),
    "phi3": Architecture(
        ("Phi3ForCausalLM", "phi3"), OF_LAYERS | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, ENDS
    ),
    "gpt2": Architecture(
        ("GPT2LMHeadModel", "gpt2"), OF_GPT2,
        {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
         "output": "lm_head"},
        above="transformer.h",
    ),
}  # fmt: skip


def architecture_of(said: Values) -> Architecture:
    """Returns how a file names what it holds. Raises NotUnderstood for an architecture that is not read."""
    named = said.get("general.architecture")
    if named in KNOWN and not said.get(f"{named}.expert_count"):
        return KNOWN[named]
    what = f"'{named}' is not read from GGUF" if named not in KNOWN else "experts are not read from GGUF"
    fix = f"use the folder that was published for transformers; read are {', '.join(KNOWN)}"
    raise NotUnderstood([Mistake("general.architecture", what, fix)])


def config_of_gguf(
    said: Values, shapes: Mapping[str, tuple[int, ...]], frequencies: Callable[[], np.ndarray]
) -> dict[str, Any]:
    """Returns the config.json of a file's model. shapes: of its tensors, by their names there. frequencies: returns the
    factors of rotary frequencies, if there are some."""
    known, named = architecture_of(said), said["general.architecture"]
    keys = {
        "block_count": ("num_hidden_layers", "n_layer"), "embedding_length": ("hidden_size", "n_embd"),
        "feed_forward_length": ("intermediate_size", "n_inner"),
        "attention.head_count": ("num_attention_heads", "n_head"),
        "attention.head_count_kv": ("num_key_value_heads", None), "attention.key_length": ("head_dim", None),
        "context_length": ("max_position_embeddings", "n_positions"), "rope.freq_base": ("rope_theta", None),
        "attention.layer_norm_rms_epsilon": ("rms_norm_eps", None),
        "attention.layer_norm_epsilon": (None, "layer_norm_epsilon"),
        "attention.sliding_window": ("sliding_window", None),
        "attn_logit_softcapping": ("attn_logit_softcapping", None),
        "final_logit_softcapping": ("final_logit_softcapping", None),
    }  # fmt: skip
    is_gpt2 = named == "gpt2"
    config: dict[str, Any] = {"architectures": [known.family[0]], "model_type": known.family[1]}
    for key, names in keys.items():
        value, name = said.get(f"{named}.{key}"), names[is_gpt2]
        if value is not None and name is not None:
            config[name] = value
    if named in ("qwen2", "phi3", "gpt2"):
        config.pop("head_dim", None)
    if named == "llama" and config.get("sliding_window"):
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    config["vocab_size"] = shapes.get("token_embd.weight", (0,))[0]
    config["tie_word_embeddings"] = is_gpt2 or named == "gemma2" or "output.weight" not in shapes
    if named == "gemma2":  # of 27B alone, whose file does not say it
        config["query_pre_attn_scalar"] = 144 if config.get("num_hidden_layers") == 46 else config.get("head_dim", 256)
    for key in ("bos", "eos"):
        if (token := said.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{key}_token_id"] = token
    scaling = _scaling(said, named, shapes, frequencies, config)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _scaling(
    said: Values, named: str, shapes: Mapping[str, Any], frequencies: Callable[[], np.ndarray], config: Values
) -> dict[str, Any] | None:
    kind = said.get(f"{named}.rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise NotUnderstood([Mistake(f"{named}.rope.scaling.type", f"'{kind}' is not read", _USE)])
    if FREQUENCIES in shapes:
        return _llama3(frequencies(), config)
    if odd := [name for name in shapes if name.startswith("rope_factors")]:
        raise NotUnderstood([Mistake(odd[0], "factors of long positions are not read", _USE)])
    if kind == "none" or not said.get(f"{named}.rope.scaling.factor"):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": said[f"{named}.rope.scaling.factor"]}
    if length := said.get(f"{named}.rope.scaling.original_context_length"):
        scaling |= {"original_max_position_embeddings": length} if kind == "yarn" else {}
    return scaling


_USE = "use the folder that was published for transformers"


def _llama3(factors: np.ndarray, config: Values) -> dict[str, Any]:
    """Returns the stretch of positions by which these factors come about."""
    dim, theta = 2 * len(factors), config.get("rope_theta", 10000.0)
    turns = theta ** -(np.arange(0, dim, 2) / dim)
    for factor, low, high, length in LLAMA3:
        wavelengths = 2 * math.pi / turns
        smooth = (length / wavelengths - low) / (high - low) if high != low else (wavelengths < length / low) * 1.0
        smooth = np.clip(smooth, 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if np.allclose(factors, expected, rtol=1e-3):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }  # fmt: skip
    raise NotUnderstood([Mistake(FREQUENCIES, "are the factors of no known stretch of positions", _USE)])


def published_names(said: Values, names: Mapping[str, Any]) -> Iterator[tuple[str, str, Turn]]:
    """Yields each tensor of a file, its published name, and what turns its values into the published ones. Raises
    NotUnderstood for tensors that have none."""
    known, named = architecture_of(said), said["general.architecture"]
    heads = said.get(f"{named}.attention.head_count", 1)
    kv_heads = said.get(f"{named}.attention.head_count_kv") or heads
    foreign = list[Mistake]()
    for name in names:
        if name == FREQUENCIES:
            continue
        base, _, kind = name.rpartition(".")
        found = re.match(LAYER, base)
        part = base[found.end() :] if found else base
        theirs = known.layers.get(part) if found else known.ends.get(part)
        if theirs is None:
            foreign.append(Mistake(name, f"is not known in a model of '{named}'", _USE))
            continue
        above = f"{known.above}.{found[1]}." if found else ""
        turn: Turn = _same
        if known.turned and part in ("attn_q", "attn_k"):
            turn = _by_halves(heads if part == "attn_q" else kv_heads)
        elif named == "gemma2" and part.endswith("norm"):
            turn = _zero_centered
        elif named == "gpt2" and kind == "weight" and found and not part.endswith("norm"):
            turn = np.transpose
        yield name, f"{above}{theirs}.{kind}", turn
    if foreign:
        raise NotUnderstood(foreign)


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _zero_centered(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) - 1


def _by_halves(heads: int) -> Turn:
    """Returns what puts the rows of each head in the order of transformers, which turns i with i + half."""
    return lambda x: x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
