"""A family of published models: two tables, one of the tensors in its files, and one of its config.json.

A config.json is read key by key: what is left at the end, and is not known to be harmless, is refused by name. Each
entry of its table is a key, or a few that belong together, and says how it is read, how it is written, and which of our
models can be written so.

    key("num_key_value_heads", "num_kv_heads", missing=8)    a number; transformers takes 8 where the file does not say
    flag("tie_word_embeddings", "embeddings", "tied", "separate", missing=False)
    choice("hidden_act", "mlp_activation", {"silu": "silu"}, missing="silu")
    only("mlp_bias", False)                                  anything else is not implemented
    ours(norm="rms")                                         no key says so: the family has it
    unread("sliding_window_size")                            transformers does not read it
    Entry(("n_group", "topk_group"), (..), read, write)      what needs functions
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from operator import attrgetter
from typing import Any, Literal

from ..config import ModelConfig
from .contract import SOME, Fits, Mistake, NotUnderstood, Row, Values

# Keys that no logit and no gradient depends on: what made the file, how text is generated, what a trainer may want.
UNUSED = frozenset((
    "_name_or_path", "_model_name_or_path", "_attn_implementation_autoset", "attn_implementation", "architectures",
    "auto_map", "_commit_hash", "base_model_tp_plan", "cache_implementation", "dtype", "ep_size",
    "gradient_checkpointing",
    "is_llama_config", "keys_to_ignore_at_inference", "loss_type", "model_name", "model_type",
    "neftune_noise_alpha", "torch_dtype",
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
    "torchscript", "n_special", "predict_special_tokens", "output_past", "xla_device",
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
            # A first underscore is of attributes that transformers keeps beside the config.
            if key not in known and value is not None and not key.startswith("_"):
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


@dataclass(frozen=True)
class Entry:
    """An entry of a table.

    names: keys of config.json. ours: keys of our config. read: takes the reader and what the entries before it have
    read, and returns values of ours. write: takes our config, and returns values of config.json. fits: the values of
    ours with which a config can be written, SOME for any but null; keys that it does not name are free.
    """

    names: tuple[str, ...]
    ours: tuple[str, ...]
    read: Callable[[Reader, Values], Values]
    write: Callable[[Any], Values] = lambda config: {}
    fits: Fits = field(default_factory=dict)


Table = tuple[Entry, ...]


def key(
    name: str,
    our: str,
    *,
    missing: Any = MISSING,
    kind: Literal["number", "count", "optional"] = "number",
    aliases: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
    to_ours: Callable[[Any, Values], Any] = lambda value, read: value,
    to_published: Callable[[Any], Any] | None = None,
) -> Entry:
    """Returns the entry of a number.

    our: key; below another one with a dot. missing: what transformers takes for a missing key or null, perhaps by what
    was read before; without it the key has to be there. "optional": null is None. aliases: names that are read where
    the file does not have `name`. also: other names under which it is written, too.
    """
    above, _, below = our.partition(".")

    def read(reader: Reader, before: Values) -> Values:
        otherwise: Any = missing(before) if callable(missing) else missing
        if kind == "optional":
            value = reader.optional(name, otherwise)
        else:
            value = getattr(reader, kind)(name, *aliases, otherwise=otherwise)
        value = to_ours(value, before)
        return {above: {**before.get(above, {}), below: value}} if below else {above: value}

    def write(config: Any) -> Values:
        return dict.fromkeys((name, *also), (to_published or attrgetter(our))(config))

    names = tuple(dict.fromkeys((name, *aliases, *also)))
    return Entry(names, (above,), read, write, {above: (SOME,)} if below else {})


def flag(name: str, our: str, yes: str, no: str, *, missing: bool) -> Entry:
    """Returns the entry of a key that is true or false for two values of ours."""

    def read(reader: Reader, _before: Values) -> Values:
        return {our: yes if reader.flag(name, otherwise=missing) else no}

    return Entry((name,), (our,), read, lambda config: {name: getattr(config, our) == yes}, {our: (yes, no)})


def choice(name: str, our: str, values: Mapping[str, str], *, missing: str, also: tuple[str, ...] = ()) -> Entry:
    """Returns the entry of a name. values: ours by theirs; of several for the same, the first is written."""

    def read(reader: Reader, _before: Values) -> Values:
        named = reader.text(name, otherwise=missing)
        if named not in values:
            reader.refuse(name, f"'{named}' is not implemented", f"use a model with {', '.join(values)}")
        return {our: values.get(named)}

    def write(config: Any) -> Values:
        theirs = next(theirs for theirs, value in values.items() if value == getattr(config, our))
        return dict.fromkeys((name, *also), theirs)

    return Entry((name, *also), (our,), read, write, {our: tuple(dict.fromkeys(values.values()))})


def only(name: str, *allowed: Any, fix: str = "", is_written: bool = False) -> Entry:
    """Returns the entry of a key that has to have one of these values: the first where it is missing, or written."""

    def read(reader: Reader, _before: Values) -> Values:
        reader.only(name, *allowed, otherwise=allowed[0], fix=fix)
        return {}

    return Entry((name,), (), read, lambda config: {name: allowed[0]} if is_written else {})


def ours(**values: Any) -> Table:
    """Returns entries of our keys that are the same in all models of a family, and in no key of config.json."""
    return tuple(
        Entry((), (our,), lambda reader, before, our=our, value=value: {our: value}, fits={our: (value,)})
        for our, value in values.items()
    )


def unread(*names: str, written: Callable[[Any], Values] = lambda config: {}) -> Entry:
    """Returns the entry of keys that transformers does not read. written: the keys that are written for others."""
    return Entry(names, (), lambda reader, before: {}, written)


def changed(table: Table, *entries: Entry) -> Table:
    """Returns a table in which these entries replace entries of the same keys."""
    names = {name for entry in entries for name in entry.names}
    keys = {our for entry in entries for our in entry.ours}
    return tuple(entry for entry in table if names.isdisjoint(entry.names) and keys.isdisjoint(entry.ours)) + entries


def fits_of(table: Table) -> dict[str, tuple[Any, ...]]:
    """Returns the values of our keys with which a config can be written by a table."""
    return {our: allowed for entry in table for our, allowed in entry.fits.items()}


def read_table(table: Table, reader: Reader) -> dict[str, Any]:
    """Returns the keys of our config that a config.json says."""
    read: dict[str, Any] = {}
    for entry in table:
        reader.asked.update(entry.names)
        read |= entry.read(reader, read)
    return read


def write_table(table: Table, config: Any) -> dict[str, Any]:
    """Returns the keys of config.json for one of our configs."""
    return {name: value for entry in table for name, value in entry.write(config).items()}


@dataclass(frozen=True)
class Family:
    """A family of published models.

    architecture, model_type: as config.json names it. rows: the table of tensors for one of our configs. table: of
    config.json. check: what else keeps a config from being written as this family. prefix: the beginning of names that
    some files leave out; before: what some files have before it. harmless, left_out: patterns of names, after that, of
    tensors that some files hold and that no parameter needs: buffers that are computed from config.json, and parts that
    the model here does not have; {num_layers} is ours. defaults: the values of our keys that config.json does not say,
    of training alone; those of our own families are in conf/model.
    """

    architecture: str
    model_type: str
    rows: Callable[[Any], tuple[Row, ...]]
    table: Table
    check: Callable[[Any], tuple[Mistake, ...]] = lambda config: ()
    prefix: str = "model."
    before: str = ""
    harmless: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def differs(self, config: ModelConfig) -> tuple[Mistake, ...]:
        """Returns the keys by which a config cannot be written as this family."""
        mistakes = []
        for key, allowed in fits_of(self.table).items():
            value = getattr(config, key, None)
            if value not in allowed and not (SOME in allowed and value is not None):
                expected = " or ".join("a value" if one is SOME else str(one) for one in allowed)
                mistakes.append(Mistake(f"model.{key}", f"is {value}", f"{self.architecture} has {expected}"))
        return tuple(mistakes) or self.check(config)
