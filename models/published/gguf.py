"""Models in files of GGUF, of llama.cpp: its metadata as a config.json, and its tensors under published names. Pure.

    llama.block_count 32    blk.7.attn_q.weight
      -> num_hidden_layers: 32    model.layers.7.self_attn.q_proj.weight, with its rows in the order of transformers

llama.cpp turns neighbours by rotary positions in models of Llama and Mixtral, and stores Gemma's norms as scales,
GPT-2's matrices as (outputs, inputs), and the experts of a layer as one tensor.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .contract import Mistake, NotUnderstood, Values

Turn = Callable[[np.ndarray], np.ndarray]

LAYER = r"blk\.(\d+)\."
STACKED = "_exps"  # at the end of a name: one tensor for all experts of a layer, with the experts as first dimension
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
OF_LAYERS = ATTENTION | {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
NORMS_AROUND = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
OF_MIXTRAL = ATTENTION | {
    "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3", "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}  # fmt: skip
OF_QWEN3_MOE = ATTENTION | {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj", "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}  # fmt: skip
OF_GPT2 = {
    "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip
# The stretches of Llama 3.1 and 3.2, of which a file has the factors alone, as a tensor: factor, lowest and highest
# frequency, length.
LLAMA3 = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (16.0, 1.0, 1.0, 8192))
FREQUENCIES = "rope_freqs.weight"

# Keys of config.json by the ends of those of GGUF, which follow the name of the architecture.
KEYS = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "context_length": "max_position_embeddings", "rope.freq_base": "rope_theta",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.sliding_window": "sliding_window",
}  # fmt: skip
OF_EXPERTS = KEYS | {"expert_used_count": "num_experts_per_tok"}
CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
KEYS_OF_GPT2 = {
    "block_count": "n_layer", "embedding_length": "n_embd", "feed_forward_length": "n_inner",
    "attention.head_count": "n_head", "context_length": "n_positions",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}  # fmt: skip
# Ends of keys that are read by `_scaling` and `_check_widths`, or change nothing that the model computes.
SCALING = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")
WIDTHS = ("rope.dimension_count", "attention.value_length", "attention.key_length_swa", "attention.value_length_swa",
          "rope.dimension_count_swa")  # fmt: skip
UNUSED = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.causal", "pooling_type")
DTYPES = {0: "float32", 1: "float16", 32: "bfloat16"}  # by general.file_type; of types of few bits none is given
AS_HERE = {
    "expert_gating_func": 1,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
}  # what the models here compute; 1 is softmax


@dataclass(frozen=True)
class Architecture:
    """A value of general.architecture. family: its name in config.json. layers, ends: published names by those of GGUF,
    of the layers below `above`. keys: of config.json by those of GGUF. always: keys of config.json that a file does not
    say. turned: whether rows of queries and keys have rotary pairs as neighbours. zero_centered: whether the published
    norms hold scale - 1, and the file's the scale. says_head_dim: whether config.json says the width of a
    head."""

    family: tuple[str, str]
    layers: Mapping[str, str]
    ends: Mapping[str, str] = field(default_factory=lambda: ENDS)
    above: str = "model.layers"
    keys: Mapping[str, str] = field(default_factory=lambda: KEYS)
    always: Mapping[str, Any] = field(default_factory=dict)
    turned: bool = False
    zero_centered: bool = False
    says_head_dim: bool = True


EXPERTS = " with experts"  # of an architecture that is another family with them
TIED = {"tie_word_embeddings": True}
KNOWN = {
    "llama": Architecture(("LlamaForCausalLM", "llama"), OF_LAYERS, turned=True),
    f"llama{EXPERTS}": Architecture(
        ("MixtralForCausalLM", "mixtral"), OF_MIXTRAL, turned=True,
        keys=OF_EXPERTS | {"expert_count": "num_local_experts"},
    ),
    "qwen2": Architecture(("Qwen2ForCausalLM", "qwen2"), OF_LAYERS, says_head_dim=False),
    "qwen3": Architecture(("Qwen3ForCausalLM", "qwen3"), OF_LAYERS),
    "qwen3moe": Architecture(
        ("Qwen3MoeForCausalLM", "qwen3_moe"), OF_QWEN3_MOE,
        keys=OF_EXPERTS | {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
        always={"norm_topk_prob": True},  # as llama.cpp computes it for every file
    ),
    "gemma": Architecture(("GemmaForCausalLM", "gemma"), OF_LAYERS, always=TIED, zero_centered=True),
    "gemma2": Architecture(
        ("Gemma2ForCausalLM", "gemma2"), OF_LAYERS | NORMS_AROUND, keys=KEYS | CAPS, always=TIED, zero_centered=True
    ),
    "gemma3": Architecture(
        ("Gemma3ForCausalLM", "gemma3_text"), OF_LAYERS | NORMS_AROUND, zero_centered=True,
        keys=KEYS | CAPS | {"rope.freq_base_swa": "rope_local_base_freq",
                            "attention.sliding_window_pattern": "sliding_window_pattern"},
    ),
    "phi3": Architecture(
        ("Phi3ForCausalLM", "phi3"), OF_LAYERS | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        says_head_dim=False,
    ),
    "gpt2": Architecture(
        ("GPT2LMHeadModel", "gpt2"), OF_GPT2,
        {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
         "output": "lm_head"},
        above="transformer.h", keys=KEYS_OF_GPT2, always=TIED, says_head_dim=False,
    ),
}  # fmt: skip
# The numbers of layers of the largest models. Their scores are scaled by width / heads, which files do not say.
LARGEST = {"gemma2": 46, "gemma3": 62}


def architecture_of(said: Values) -> Architecture:
    """Returns how a file names what it holds. Raises NotUnderstood for an architecture that is not read."""
    named = said.get("general.architecture")
    if said.get("general.type", "model") != "model":
        what = f"is '{said['general.type']}', and the file of a whole model is read"
        raise NotUnderstood([Mistake("general.type", what, _USE)])
    if said.get("split.count", 1) > 1:
        what = f"is {said['split.count']}: the model is in so many files"
        raise NotUnderstood([Mistake("split.count", what, "join them: llama-gguf-split --merge FIRST.gguf ALL.gguf")])
    if said.get(f"{named}.expert_count") and f"{named}{EXPERTS}" in KNOWN:
        return KNOWN[f"{named}{EXPERTS}"]
    if named in KNOWN:
        return KNOWN[named]
    fix = f"{_USE}; read are {', '.join(KNOWN)}"
    raise NotUnderstood([Mistake("general.architecture", f"'{named}' is not read from GGUF", fix)])


def config_of_gguf(
    said: Values, shapes: Mapping[str, tuple[int, ...]], frequencies: Callable[[], np.ndarray]
) -> dict[str, Any]:
    """Returns the config.json of a file's model. shapes: of its tensors, by their names there. frequencies: returns the
    factors of rotary frequencies, if there are some. Raises NotUnderstood for keys that are not read, and may change
    what the model computes."""
    known, named = architecture_of(said), said["general.architecture"]
    own = {key.removeprefix(f"{named}."): value for key, value in said.items() if key.startswith(f"{named}.")}
    foreign = own.keys() - {*known.keys, *SCALING, *WIDTHS, *UNUSED, "attention.key_length"}
    if foreign := sorted(key for key in foreign if own[key] and own[key] != AS_HERE.get(key)):
        what = "this key is not known, and may change what the model computes"
        raise NotUnderstood(Mistake(f"{named}.{key}", f"{own[key]}: {what}", _USE) for key in foreign)
    config: dict[str, Any] = {"architectures": [known.family[0]], "model_type": known.family[1]}
    config |= {name: own[key] for key, name in known.keys.items() if own.get(key) is not None}
    _check_widths(own, named, known, config)
    if known.family[1] == "llama" and config.get("sliding_window"):
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    if isinstance(pattern := config.get("sliding_window_pattern"), list):  # whether each layer has a window
        kinds = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]
        config |= {"sliding_window_pattern": None, "layer_types": kinds}
    config["vocab_size"] = shapes.get("token_embd.weight", (0,))[0]
    config |= {"tie_word_embeddings": "output.weight" not in shapes} | dict(known.always)
    if named in LARGEST:
        width = config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1)
        is_largest = config.get("num_hidden_layers") == LARGEST[named]
        config["query_pre_attn_scalar"] = width if is_largest else config.get("head_dim", 256)
    if dtype := DTYPES.get(said.get("general.file_type", -1)):
        config["dtype"] = dtype
    for key in ("bos", "eos"):
        if (token := said.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{key}_token_id"] = token
    scaling = _scaling(said, named, shapes, frequencies, config)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _check_widths(own: Values, named: str, known: Architecture, config: dict[str, Any]) -> None:
    """Puts the width of a head into a config.json that says it. Raises NotUnderstood where heads are not of one width,
    or rotary positions turn a part of them."""
    width = config.get("hidden_size", config.get("n_embd", 0)) // (
        config.get("num_attention_heads", config.get("n_head")) or 1
    )
    head_dim = own.get("attention.key_length") or width
    mistakes = [
        Mistake(f"{named}.{key}", f"is {own[key]}, and a head of queries and keys has {head_dim}: not read", _USE)
        for key in WIDTHS
        if own.get(key) not in (None, head_dim)
    ]
    config["head_dim"] = head_dim
    if not known.says_head_dim:
        del config["head_dim"]
        if head_dim != width:
            what = f"is {head_dim}, and the width of the model has {width} for each head: not read"
            mistakes.append(Mistake(f"{named}.attention.key_length", what, _USE))
    if mistakes:
        raise NotUnderstood(mistakes)


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


@dataclass(frozen=True)
class Named:
    """A tensor of a file under its published name. turn: what turns its values into the published ones. expert: which
    of its first dimension it is, where the file stacks experts."""

    name: str
    published: str
    turn: Turn
    expert: int | None = None


def published_names(said: Values, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Named]:
    """Yields the published tensors of a file. shapes: of its tensors, by their names there. Raises NotUnderstood for
    tensors that have no published name."""
    known, named = architecture_of(said), said["general.architecture"]
    heads = said.get(f"{named}.attention.head_count", 1)
    kv_heads = said.get(f"{named}.attention.head_count_kv") or heads
    foreign = list[Mistake]()
    for name, shape in shapes.items():
        if name == FREQUENCIES:
            continue
        base, _, kind = name.rpartition(".")
        found = re.match(LAYER, base)
        part, of_one = _without_expert(base[found.end() :] if found else base)
        theirs = known.layers.get(part) if found else known.ends.get(part)
        if theirs is None:
            foreign.append(Mistake(name, f"is not known in a model of '{named}'", _USE))
            continue
        above = f"{known.above}.{found[1]}." if found else ""
        published = f"{above}{theirs}.{kind}"
        turn: Turn = _same
        if known.turned and part in ("attn_q", "attn_k"):
            turn = _by_halves(heads if part == "attn_q" else kv_heads)
        elif known.zero_centered and part.endswith("norm"):
            turn = _zero_centered
        elif named == "gpt2" and kind == "weight" and found and not part.endswith("norm"):
            turn = np.transpose
        if of_one is not None:
            yield Named(name, published.format(expert=of_one), turn)
        elif part.endswith(STACKED):
            for expert in range(shape[0] if shape else 0):
                yield Named(name, published.format(expert=expert), turn, expert)
        else:
            yield Named(name, published, turn)
    if foreign:
        raise NotUnderstood(foreign)


def _without_expert(part: str) -> tuple[str, str | None]:
    """Returns the name of a stack for one expert of it, which older files have apart, and the number of the expert."""
    found = re.fullmatch(r"(ffn_(?:gate|up|down))\.(\d+)", part)
    return (f"{found[1]}{STACKED}", found[2]) if found else (part, None)


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _zero_centered(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) - 1


def _by_halves(heads: int) -> Turn:
    """Returns what puts the rows of each head in the order of transformers, which turns i with i + half."""
    return lambda x: x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
