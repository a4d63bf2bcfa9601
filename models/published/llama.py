"""Llama 2 and 3, and Mistral, which is Llama with a window. Their names are those of most families since."""

from collections.abc import Callable
from typing import Any

from .contract import Mistake, Row, flat, linear, same
from .family import Entry, Family, Reader, Table, changed, choice, flag, key, layer_types, only, ours, windows
from .rope import rope

ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
               "relu": "relu"}  # fmt: skip

ENDS = (
    Row("model.embed_tokens.weight", ("embed/table_VE",), same),
    Row("model.norm.weight", ("head/norm/scale_E",), same),
    Row("lm_head.weight", ("head/kernel_EV",), linear()),  # tied: not in the file, nor among our parameters
)
NORMS = (
    Row("model.layers.{layer}.input_layernorm.weight", ("attention_norm/scale_E",), same),
    Row("model.layers.{layer}.post_attention_layernorm.weight", ("mlp_norm/scale_E",), same),
)
ATTENTION = (
    Row("model.layers.{layer}.self_attn.q_proj.weight", ("attention/query_EHD",), linear()),
    Row("model.layers.{layer}.self_attn.k_proj.weight", ("attention/key_EKD",), linear()),
    Row("model.layers.{layer}.self_attn.v_proj.weight", ("attention/value_EKD",), linear()),
    Row("model.layers.{layer}.self_attn.o_proj.weight", ("attention/out_HDE",), linear(2)),
    Row("model.layers.{layer}.self_attn.q_proj.bias", ("attention/query_bias_HD",), flat),
    Row("model.layers.{layer}.self_attn.k_proj.bias", ("attention/key_bias_KD",), flat),
    Row("model.layers.{layer}.self_attn.v_proj.bias", ("attention/value_bias_KD",), flat),
    Row("model.layers.{layer}.self_attn.q_norm.weight", ("attention/query_norm/scale_E",), same),
    Row("model.layers.{layer}.self_attn.k_norm.weight", ("attention/key_norm/scale_E",), same),
)
MLP = (
    Row("model.layers.{layer}.mlp.gate_proj.weight", ("mlp/gate_EM",), linear()),
    Row("model.layers.{layer}.mlp.up_proj.weight", ("mlp/up_EM",), linear()),
    Row("model.layers.{layer}.mlp.down_proj.weight", ("mlp/down_ME",), linear()),
)


# What a decoder has in all of these families, unless its family says otherwise.
PLAIN: Table = ours(
    family="decoder", mlp="gated", positions="rope", num_positions=None, norm="rms", norm_placement="before",
    qk_norm="none", attention_scale=None, attention_windows=(None,), attention_soft_cap=None, attention_sinks=False,
    logit_soft_cap=None, biases="none", embedding_scale="one",
)  # fmt: skip


def decoder(
    *, theta: float = 10000.0, epsilon: float = 1e-6, kv_heads: int | None = None,
    head_dim: int | None = None, writes_bias: bool = True,
) -> Table:  # fmt: skip
    """Returns the config.json of a decoder like Llama. theta, epsilon, kv_heads (None: as many as heads), head_dim
    (None: the width of a head): what transformers takes where a file does not say. writes_bias: whether the family has
    the key `attention_bias`."""
    no_biases = "use a model without biases, or Qwen 2's, of q, k and v"
    return (
        *PLAIN,
        only("attention_bias", False, fix=no_biases, is_written=writes_bias),
        only("mlp_bias", False),
        key("vocab_size", "vocab_size"),
        key("hidden_size", "embed_dim"),
        key("num_hidden_layers", "num_layers", kind="count"),
        key("num_attention_heads", "num_heads"),
        key(
            "num_key_value_heads",
            "num_kv_heads",
            missing=kv_heads,
            kind="optional",
            to_ours=lambda num, read: num or read["num_heads"],
        ),
        key("head_dim", "head_dim", missing=head_dim or width_of_head),
        key("intermediate_size", "mlp_dim"),
        choice("hidden_act", "mlp_activation", ACTIVATIONS, missing="silu"),
        key("rms_norm_eps", "norm_epsilon", missing=epsilon),
        flag("tie_word_embeddings", "embeddings", "tied", "separate", missing=False),
        key("initializer_range", "initializer_stddev", missing=0.02),
        rope(theta=theta),
    )


def width_of_head(read: Any) -> int:
    """Returns the width of a head where heads share the width of the model."""
    return read["embed_dim"] // read["num_heads"] if read["num_heads"] else 1


def window_of_all(*, missing: int | None) -> Entry:
    """Returns the entry of a window that all layers have."""
    return key(
        "sliding_window",
        "attention_windows",
        missing=missing,
        kind="optional",
        to_ours=lambda window, read: [window],
        to_published=lambda config: config.attention_windows[0],
    )


def windows_by_layer(*, missing: int, kinds: Callable[[Reader, int], list[str]], names: tuple[str, ...] = ()) -> Entry:
    """Returns the entry of a window that some layers have. kinds: the layer_types of so many layers where the file
    names none. names: other keys that it reads."""

    def read(reader: Reader, before: Any) -> dict[str, Any]:
        num_layers = before["num_layers"]
        window = reader.optional("sliding_window", missing)
        types = reader.items("layer_types", otherwise=kinds(reader, num_layers))
        return {"attention_windows": windows(reader, num_layers, types, window)}

    def write(config: Any) -> dict[str, Any]:
        window = next((window for window in config.attention_windows if window), None)
        return {"sliding_window": window, "layer_types": layer_types(config.attention_windows, config.num_layers)}

    return Entry(("sliding_window", "layer_types", *names), ("attention_windows",), read, write)


def one_window(config: Any) -> tuple[Mistake, ...]:
    """Returns what keeps windows that differ between layers from a config.json that has one `sliding_window`."""
    if len({window for window in config.attention_windows if window}) < 2:
        return ()
    windows = ", ".join(map(str, config.attention_windows))
    return (Mistake("model.attention_windows", f"[{windows}] are several windows", "use one window, and null"),)


def same_window(config: Any) -> tuple[Mistake, ...]:
    """Returns what keeps windows from a config.json in which all layers have the same."""
    if len(set(config.attention_windows)) < 2:
        return ()
    windows = ", ".join(map(str, config.attention_windows))
    return (Mistake("model.attention_windows", f"[{windows}] differ between layers", "use the same in all layers"),)


FAMILIES = (
    Family(
        "LlamaForCausalLM", "llama", rows=lambda config: ENDS + NORMS + ATTENTION + MLP,
        table=changed(decoder(), only("mlp_bias", False, is_written=True)),
    ),
    Family(
        "MistralForCausalLM", "mistral", rows=lambda config: ENDS + NORMS + ATTENTION + MLP,
        table=changed(decoder(kv_heads=8, writes_bias=False), window_of_all(missing=4096)), check=same_window,
    ),
)  # fmt: skip
