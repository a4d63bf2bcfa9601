"""Gemma 1, 2 and 3.

1 is a Llama with scaled embeddings. 2 has norms around attention and MLP, windows in every other layer, and soft caps
of scores and logits. 3 has norms of queries and keys instead of caps, windows in five of six layers, and a rotary base
of its own there.

Their norms hold scale - 1, in the files as here (rms_zero_centered). In 2 and 3, the norm that Llama has before the MLP
is named pre_feedforward_layernorm, and post_attention_layernorm stands after attention.
"""

from functools import partial
from typing import Any

from .config_json import Reader, layer_types, windows
from .contract import SOME, Family, Row
from .layouts import same
from .llama import ATTENTION, ENDS, LLAMA, MLP, UNUSED, read_llama, write_llama
from .llama import NORMS as LLAMA_NORMS
from .qwen import one_window
from .rope import read_rope_by_layer, write_rope_by_layer

NORMS = (
    Row("model.layers.{layer}.input_layernorm.weight", ("attention_norm/scale_E",), same),
    Row("model.layers.{layer}.post_attention_layernorm.weight", ("attention_out_norm/scale_E",), same),
    Row("model.layers.{layer}.pre_feedforward_layernorm.weight", ("mlp_norm/scale_E",), same),
    Row("model.layers.{layer}.post_feedforward_layernorm.weight", ("mlp_out_norm/scale_E",), same),
)
_NORMED = {"norm": "rms_zero_centered", "embedding_scale": "sqrt_embed_dim"}
GEMMA1 = LLAMA | {key: (value,) for key, value in _NORMED.items()} | {"embeddings": ("tied",)}
GEMMA2 = {key: values for key, values in LLAMA.items() if key not in
          ("attention_windows", "attention_scale", "attention_soft_cap", "logit_soft_cap")} | {
    "norm": ("rms_zero_centered",), "norm_placement": ("before_and_after",), "embedding_scale": ("sqrt_embed_dim",),
    "embeddings": ("tied",),
}  # fmt: skip
GEMMA3 = GEMMA2 | {"qk_norm": ("rms_zero_centered",), "window_rope_theta": (SOME,)}


def read_gemma(reader: Reader) -> dict[str, Any]:
    """Returns the keys of our config for Gemma 1. Its first files say gelu, and mean the approximation by tanh."""
    read = read_llama(reader, tied=True, activation=("hidden_act", "gelu_pytorch_tanh"), kv_heads=16)
    reader.asked.add("hidden_activation")  # in published files; transformers does not read it
    activation = "gelu_tanh" if read["mlp_activation"] == "gelu" else read["mlp_activation"]
    return read | _NORMED | {"mlp_activation": activation, "head_dim": reader.number("head_dim", otherwise=256)}


def read_gemma2(reader: Reader) -> dict[str, Any]:
    """Returns the keys of our config for Gemma 2."""
    read = read_llama(reader, tied=True, activation=("hidden_activation", "gelu_pytorch_tanh"), kv_heads=4)
    return read | _read_both(reader, read["num_layers"], period=2, caps=(50.0, 30.0))


def read_gemma3(reader: Reader) -> dict[str, Any]:
    """Returns the keys of our config for Gemma 3's text model."""
    rope = partial(read_rope_by_layer, theta=1000000.0, window_theta=10000.0)
    read = read_llama(reader, tied=True, activation=("hidden_activation", "gelu_pytorch_tanh"), kv_heads=4, rope=rope)
    period = reader.count("sliding_window_pattern", "_sliding_window_pattern", otherwise=6)
    both = _read_both(reader, read["num_layers"], period=period, caps=(None, None))
    return read | both | {"qk_norm": "rms_zero_centered"}


def _read_both(
    reader: Reader, num_layers: int, *, period: int, caps: tuple[float | None, float | None]
) -> dict[str, Any]:
    """Returns what 2 and 3 have beside a Llama, where the file names nothing: the last layer of each period has no
    window; caps: of scores and logits."""
    reader.asked |= {"hidden_act", "sliding_window_size"}  # in published files; transformers does not read them
    head_dim = reader.number("head_dim", otherwise=256)
    kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)]
    window = reader.optional("sliding_window", 4096)
    return _NORMED | {
        "norm_placement": "before_and_after",
        "head_dim": head_dim,
        "attention_scale": read_scale(reader, head_dim),
        "attention_windows": windows(reader, num_layers, reader.items("layer_types", otherwise=kinds), window),
        "attention_soft_cap": reader.optional("attn_logit_softcapping", caps[0]),
        "logit_soft_cap": reader.optional("final_logit_softcapping", caps[1]),
    }


def read_gemma3_of_images(reader: Reader) -> dict[str, Any]:
    """Returns the keys of the text model of a Gemma 3 that also reads images. Published files leave out what is the
    default of transformers."""
    of_images = {"vision_config", "boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image"}
    reader.asked |= of_images | {"initializer_range"}
    text = reader.node("text_config", otherwise={})
    own = Reader({**_GEMMA3_SIZES, **text})
    read = read_gemma3(own)
    own.finish()
    return read


_GEMMA3_SIZES = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8,
}  # fmt: skip


def read_scale(reader: Reader, head_dim: int) -> float | None:
    """Returns the factor of scores; None where it is 1 / sqrt(head_dim), as in all sizes but 27B."""
    scalar = reader.number("query_pre_attn_scalar", otherwise=256)
    return None if scalar == head_dim or not scalar else scalar**-0.5


def write_gemma2(config: Any) -> dict[str, Any]:
    """Returns the keys of config.json for Gemma 2."""
    written = write_llama(config)
    scalar = config.attention_scale**-2 if config.attention_scale else config.head_dim
    return written | {
        "attention_bias": False,
        "hidden_activation": written["hidden_act"],
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar,
        "sliding_window": next((window for window in config.attention_windows if window), None),
        "layer_types": layer_types(config.attention_windows, config.num_layers),
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
    }


FAMILIES = (
    Family(
        "GemmaForCausalLM", "gemma", rows=lambda config: ENDS + LLAMA_NORMS + ATTENTION + MLP, read=read_gemma,
        write=lambda config: write_llama(config) | {"attention_bias": False}, fits=GEMMA1, unused=UNUSED,
    ),
    Family(
        "Gemma2ForCausalLM", "gemma2", rows=lambda config: ENDS + NORMS + ATTENTION + MLP, read=read_gemma2,
        write=write_gemma2, fits=GEMMA2, check=one_window, unused=UNUSED,
    ),
    Family(
        "Gemma3ForCausalLM", "gemma3_text", rows=lambda config: ENDS + NORMS + ATTENTION + MLP, read=read_gemma3,
        write=lambda config: write_gemma2(config) | write_rope_by_layer(config), fits=GEMMA3, check=one_window,
        unused=(*UNUSED, r"(vision_tower|multi_modal_projector)\..*"), before="language_model.",
    ),
    Family(  # of images and text: only its text model is read
        "Gemma3ForConditionalGeneration", "gemma3", rows=lambda config: (), read=read_gemma3_of_images,
        write=write_gemma2, fits=GEMMA3 | {"family": ()},
    ),
)  # fmt: skip
