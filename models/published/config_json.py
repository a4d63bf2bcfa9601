"""Reads a config.json key by key: what is left at the end, and is not known to be harmless, is refused by name."""

import json
import math
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from .contract import Mistake, NotUnderstood, Values

# Keys that no logit and no gradient depends on: what made the file, how text is generated, what a trainer may want.
UNUSED = frozenset((
    "_name_or_path", "_model_name_or_path", "_attn_implementation_autoset", "attn_implementation", "architectures",
    "auto_map", "_commit_hash", "base_model_tp_plan", "cache_implementation", "dtype", "ep_size",
    "gradient_checkpointing",
    "is_llama_config", "keys_to_ignore_at_inference", "loss_type", "model_type", "neftune_noise_alpha", "torch_dtype",
    "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version", "use_cache",
    # tokens
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "tokenizer_class",
    "unk_token_id", "prefix",
    # generation
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
    "suppress_tokens", "task_specific_params", "temperature", "top_k", "top_p", "typical_p",
    # what a call of the module returns, and heads of other tasks
    "chunk_size_feed_forward", "finetuning_task", "id2label", "label2id", "num_labels", "output_attentions",
    "output_hidden_states", "output_router_logits", "problem_type", "return_dict", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "tf_legacy_loss",
    "torchscript",
    # the length that the model was trained for, which the declaration chooses; how a product is split
    "max_position_embeddings", "max_sequence_length", "model_max_length", "pretraining_tp",
    # losses of routers in training, which the declaration chooses
    "aux_loss_alpha", "router_aux_loss_coef", "seq_aux",
))  # fmt: skip

# Keys of any family that must have one of these values, if they are there: everything else is not implemented.
ONLY: dict[str, Sequence[Any]] = {
    "add_cross_attention": (False,), "attention_dropout": (0, 0.0, None), "cross_attention_hidden_size": (None,),
    "is_decoder": (False, True), "is_encoder_decoder": (False,), "pruned_heads": (None, {}),
    "quantization_config": (None,), "rope_interleaved": (False,), "tie_encoder_decoder": (False,),
    "use_bfloat16": (False,), "use_bidirectional_attention": (None, False), "use_mrope": (False,),
}  # fmt: skip
MISSING: Any = object()
MOST_LAYERS = 100_000


class Reader:
    """Gives out the values of a config.json, and remembers which keys were asked for, and what is wrong."""

    def __init__(self, values: Values):
        self.values, self.asked, self.mistakes = values, set[str](), list[Mistake]()

    def get(self, *keys: str, otherwise: Any = MISSING) -> Any:
        """Returns the value of the first of these keys that is there. otherwise: what transformers takes for a missing
        key or null; without it, the key must be there."""
        self.asked.update(keys)
        for key in keys:
            if self.values.get(key) is not None:
                return self.values[key]
        if otherwise is MISSING:
            self.refuse(keys[0], "is missing", "take the config.json that was published with these weights")
            return None
        return otherwise

    def number(self, *keys: str, otherwise: Any = MISSING) -> Any:
        """Returns a number in the same way. One that is refused, as a missing one, reads as 1, so that reading goes on
        and finds all mistakes."""
        value = self.get(*keys, otherwise=otherwise)
        if value is None:
            return 1 if otherwise is MISSING else None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and 0 <= value < math.inf:
            return value
        self.refuse(keys[0], f"{_shown(value)} is not a positive number", "give a number")
        return 1

    def count(self, *keys: str, otherwise: Any = MISSING) -> int:
        """Returns a number of layers in the same way."""
        value = self.number(*keys, otherwise=otherwise)
        if isinstance(value, int) and 0 < value <= MOST_LAYERS:
            return value
        self.refuse(keys[0], f"{_shown(value)} is not a number of layers", f"give a whole number up to {MOST_LAYERS:,}")
        return 1

    def flag(self, key: str, *, otherwise: bool) -> bool:
        """Returns true or false in the same way."""
        return self._typed(key, bool, "true or false", otherwise)

    def text(self, *keys: str, otherwise: str) -> str:
        """Returns text in the same way."""
        key = next((key for key in keys if self.values.get(key) is not None), keys[0])
        return self._typed(key, str, "text", otherwise)

    def items(self, key: str, *, otherwise: list[Any]) -> list[Any]:
        """Returns a list in the same way."""
        return self._typed(key, list, "a list", otherwise)

    def node(self, key: str, *, otherwise: dict[str, Any]) -> dict[str, Any]:
        """Returns an object in the same way."""
        return self._typed(key, dict, "an object with keys", otherwise)

    def _typed(self, key: str, kind: type, name: str, otherwise: Any) -> Any:
        value = self.get(key, otherwise=otherwise)
        if isinstance(value, kind):
            return value
        self.refuse(key, f"{_shown(value)} is not {name}", f"give {name}")
        return otherwise

    def only(self, key: str, *allowed: Any, otherwise: Any, fix: str = "") -> Any:
        """Returns the value of a key. Refuses all but the allowed ones: they are not implemented."""
        value = self.get(key, otherwise=otherwise)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            fix = fix or f"this architecture is implemented with {' or '.join(dict.fromkeys(map(_shown, allowed)))}"
            self.refuse(key, f"{_shown(value)} is not implemented", fix)
        return value

    def optional(self, key: str, missing: float | None) -> Any:
        """Returns a number or None. missing: what transformers takes for a key that is not there: null says None."""
        return self.number(key, otherwise=None if key in self.values else missing)

    def refuse(self, key: str, what: str, fix: str) -> None:
        """Notes a mistake, to be raised with all others."""
        self.mistakes.append(Mistake(key, what, fix))

    def finish(self) -> None:
        """Raises NotUnderstood for all mistakes, with the keys that nothing has asked for."""
        for key, allowed in ONLY.items():
            if key in self.values and key not in self.asked:
                self.only(key, *allowed, otherwise=allowed[0], fix=_FIXES.get(key, ""))
        known = self.asked | UNUSED | ONLY.keys()
        for key, value in self.values.items():
            if key not in known and value is not None:
                near = get_close_matches(key, sorted(known), n=1, cutoff=0.8)
                hint = f"did you mean '{near[0]}'? " if near else ""
                what = f"{_shown(value)}: this key is not known, and may change what the model computes"
                self.refuse(key, what, f"{hint}remove it from config.json if it does not")
        if self.mistakes:
            raise NotUnderstood(dict.fromkeys(self.mistakes))


_FIXES = {
    "quantization_config": "convert the weights to bfloat16 and remove the key: quantised weights are not read",
    "attention_dropout": "set it to 0: attention weights are not dropped",
}


def windows(reader: Reader, num_layers: int, kinds: Sequence[str], window: int | None) -> list[int | None]:
    """Returns the shortest list of windows that repeats over the layers. kinds: the layer_types of a config.json."""
    if any(mistake.key in ("num_hidden_layers", "layer_types") for mistake in reader.mistakes):
        return [None]
    for index, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            reader.refuse(
                "layer_types", f"layer {index} is '{kind}'", "use a model of full_attention, sliding_attention"
            )
            return [None]
    if len(kinds) != num_layers:
        reader.refuse("layer_types", f"has {len(kinds)} entries for {num_layers} layers", "give one for each layer")
        return [None]
    if "sliding_attention" in kinds and window is None:
        reader.refuse(
            "sliding_window", "is missing, and layer_types has sliding_attention", "give the window in tokens"
        )
    of_layers = [window if kind == "sliding_attention" else None for kind in kinds]
    periods = (of_layers[:n] for n in range(1, num_layers + 1))
    return next(found for found in periods if (found * num_layers)[:num_layers] == of_layers)


def layer_types(windows: Iterable[int | None], num_layers: int) -> list[str]:
    """Returns the layer_types of a config.json for windows that repeat."""
    of_layers = list(windows) * num_layers
    return ["full_attention" if window is None else "sliding_attention" for window in of_layers[:num_layers]]


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
