"""Phi 3 and 4: Llama, but queries, keys and values are one matrix in files, and the gate and the way up another."""

from .contract import Row, joined, linear
from .family import Family, changed, only, unread
from .llama import ENDS, NORMS, decoder, same_window, window_of_all

FUSED = (
    Row("model.layers.{layer}.self_attn.qkv_proj.weight",
        ("attention/query_EHD", "attention/key_EKD", "attention/value_EKD"), joined),
    Row("model.layers.{layer}.self_attn.o_proj.weight", ("attention/out_HDE",), linear(2)),
    Row("model.layers.{layer}.mlp.gate_up_proj.weight", ("mlp/gate_EM", "mlp/up_EM"), joined),
    Row("model.layers.{layer}.mlp.down_proj.weight", ("mlp/down_ME",), linear()),
)  # fmt: skip
PHI3 = changed(
    decoder(epsilon=1e-5, writes_bias=False),
    window_of_all(missing=None),
    only("resid_pdrop", 0, 0.0, fix="set it to 0, and model.dropout_rate instead"),
    only("embd_pdrop", 0, 0.0, fix="set it to 0, and model.dropout_rate instead"),
    unread("original_max_position_embeddings"),  # of a scaling that is refused
)

FAMILIES = (
    Family("Phi3ForCausalLM", "phi3", rows=lambda config: ENDS + NORMS + FUSED, table=PHI3, check=same_window),
)  # fmt: skip
