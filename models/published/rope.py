"""Rotary positions in config.json: rope_parameters as transformers 5 writes it, and the older rope_theta and
rope_scaling."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ..family_configs import Llama3Scaling, YarnScaling
from .contract import SOME, Mistake, NotUnderstood, Values
from .family import Entry, Reader

NAMES = ("rope_theta", "rope_scaling", "rope_parameters")
OURS = ("rope_theta", "rope_scaling", "window_rope_theta")


def read_rope(reader: Reader, _before: Values, *, theta: float) -> dict[str, Any]:
    """Returns rope_theta and rope_scaling of ours. theta: the base where the file names none."""
    parameters = reader.get("rope_parameters", otherwise={})
    scaling = reader.get("rope_scaling", otherwise=None) or parameters  # transformers takes them in this order
    theta = reader.number("rope_theta", otherwise=theta)
    reader.only("partial_rotary_factor", 1.0, None, otherwise=None)
    key = "rope_parameters" if scaling is parameters else "rope_scaling"
    return {**_read_set(reader, key, scaling, theta), "window_rope_theta": None}


def read_rope_by_layer(reader: Reader, _before: Values, *, theta: float, window_theta: float) -> dict[str, Any]:
    """Returns the same of a model whose layers with a window have a base of their own, and no scaling."""
    sets = reader.node("rope_parameters", otherwise={})
    theta = reader.number("rope_theta", otherwise=theta)
    window_theta = reader.number("rope_local_base_freq", otherwise=window_theta)
    if sets.keys() - {"full_attention", "sliding_attention"}:
        reader.refuse("rope_parameters", "is not one set for each of layer_types", "give both sets")
        return {"rope_theta": theta, "rope_scaling": None, "window_rope_theta": window_theta}
    nested = Reader(sets)
    of_full, of_windows = (nested.node(f"{kind}_attention", otherwise={}) for kind in ("full", "sliding"))
    for mistake in nested.mistakes:
        reader.refuse(f"rope_parameters.{mistake.key}", mistake.what, mistake.fix)
    scaling = of_full | reader.node("rope_scaling", otherwise={})
    read = _read_set(reader, "rope_parameters.full_attention", scaling, theta)
    windowed = _read_set(reader, "rope_parameters.sliding_attention", of_windows, window_theta)
    if windowed["rope_scaling"] is not None:
        what = "has a scaling, which is not implemented for layers with a window"
        reader.refuse("rope_parameters.sliding_attention.rope_type", what, "use a model with the default there")
    return read | {"window_rope_theta": windowed["rope_theta"]}


def _read_set(reader: Reader, key: str, scaling: Any, theta: float | None) -> dict[str, Any]:
    """Returns rope_theta and rope_scaling of one set of keys. theta: the base where it names none."""
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        reader.refuse(key, "is not one set of numbers for all layers", "use a model with the same for all layers")
        return {"rope_theta": theta, "rope_scaling": None}
    nested = Reader(scaling)
    theta = nested.number("rope_theta", otherwise=theta)
    nested.only("partial_rotary_factor", 1.0, None, otherwise=None)
    kind = nested.text("rope_type", "type", otherwise="default")
    nested.asked.update(("rope_type", "type"))  # transformers 4 writes both
    if kind not in SCALINGS:
        reader.refuse(f"{key}.rope_type", f"'{kind}' is not implemented", f"use a model with {' or '.join(SCALINGS)}")
        return {"rope_theta": theta, "rope_scaling": None}
    read = SCALINGS[kind](nested, reader)
    for name in {key for key, value in scaling.items() if value is not None} - nested.asked:
        nested.refuse(name, f"is not known for rope_type '{kind}'", "remove it if it changes nothing")
    for mistake in nested.mistakes:
        reader.refuse(f"{key}.{mistake.key}", mistake.what, mistake.fix)
    return {"rope_theta": theta, "rope_scaling": read}


def rope(*, theta: float) -> Entry:
    """Returns the entry of rotary positions that are the same in all layers. theta: the base where a file has none."""
    read = partial(read_rope, theta=theta)
    return Entry((*NAMES, "partial_rotary_factor"), OURS, read, write_rope, {"window_rope_theta": (None,)})


def rope_by_layer(*, theta: float, window_theta: float) -> Entry:
    """Returns the entry of rotary positions with another base in layers with a window."""
    read = partial(read_rope_by_layer, theta=theta, window_theta=window_theta)
    return Entry((*NAMES, "rope_local_base_freq"), OURS, read, write_rope_by_layer, {"window_rope_theta": (SOME,)})


def write_rope(config: Any) -> dict[str, Any]:
    """Returns both forms: releases of transformers before 5 do not read rope_parameters."""
    scaling = None if config.rope_scaling is None else _written(config)
    parameters = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling, "rope_parameters": parameters}


def write_rope_by_layer(config: Any) -> dict[str, Any]:
    """Returns both forms of what `read_rope_by_layer` reads."""
    written, theta = write_rope(config), config.window_rope_theta
    windowed = {"rope_theta": theta, "rope_type": "default"}
    sets = {"full_attention": written["rope_parameters"], "sliding_attention": windowed}
    return written | {"rope_local_base_freq": theta, "rope_parameters": sets}


def _read_llama3(nested: Reader, reader: Reader) -> dict[str, Any]:
    return {
        "kind": "llama3",
        "factor": nested.number("factor"),
        "low_frequency_factor": nested.number("low_freq_factor"),
        "high_frequency_factor": nested.number("high_freq_factor"),
        "original_length": _read_length(nested, reader),
    }


def _read_length(nested: Reader, reader: Reader) -> Any:
    length = reader.number("original_max_position_embeddings", "max_position_embeddings", otherwise=None)
    return nested.number("original_max_position_embeddings", otherwise=length)


def _read_yarn(nested: Reader, reader: Reader) -> dict[str, Any]:
    """Returns our keys. Only DeepSeek multiplies scores by a factor of mscale_all_dim; in others, all that both say is
    the factor of turned heads."""
    factor, length = nested.number("factor", otherwise=None), _read_length(nested, reader)
    longest = reader.number("max_position_embeddings", otherwise=None)
    factor = factor or (longest / length if longest and length else None)
    mscale, all_dim = (nested.number(key, otherwise=0.0) for key in ("mscale", "mscale_all_dim"))
    given = nested.number("attention_factor", otherwise=None)
    log = 0.1 * math.log(factor) if factor and factor > 1 else 1.0
    if given is None:
        given = (mscale * log + 1) / (all_dim * log + 1) if mscale and all_dim else log + 1
    if "kv_lora_rank" not in reader.values:
        mscale = all_dim = 0.0
    if not mscale or given != (mscale * log + 1) / (all_dim * log + 1):
        mscale = 1.0 if given == log + 1 and not all_dim else round((given * (all_dim * log + 1) - 1) / log, 9)
    return {
        "kind": "yarn",
        "factor": factor,
        "original_length": length,
        "beta_fast": nested.number("beta_fast", otherwise=32.0),
        "beta_slow": nested.number("beta_slow", otherwise=1.0),
        "truncate": nested.flag("truncate", otherwise=True),
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }


def _written(config: Any) -> dict[str, Any]:
    scaling = config.rope_scaling
    written: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if isinstance(scaling, Llama3Scaling):
        return written | {
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_length,
        }
    return written | _written_yarn(config, scaling) if isinstance(scaling, YarnScaling) else written


def _written_yarn(config: Any, scaling: YarnScaling) -> dict[str, Any]:
    written = {
        "original_max_position_embeddings": scaling.original_length,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
    }
    if scaling.mscale_all_dim and getattr(config, "latent_attention", None) is None:
        what = f"is {scaling.mscale_all_dim}, and only DeepSeek's models have a factor of scores"
        raise NotUnderstood([Mistake("model.rope_scaling.mscale_all_dim", what, "set it to 0")])
    if scaling.mscale and scaling.mscale_all_dim:
        return written | {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    if scaling.mscale_all_dim:
        written["mscale_all_dim"] = scaling.mscale_all_dim
    return written if scaling.mscale == 1 else written | {"attention_factor": scaling.factor_of_turned}


# What reads the keys of each rope_type: (those of the scaling, those of the whole file) -> our rope_scaling.
SCALINGS: dict[str, Callable[[Reader, Reader], Values | None]] = {
    "default": lambda nested, reader: None,
    "llama3": _read_llama3,
    "linear": lambda nested, reader: {"kind": "linear", "factor": nested.number("factor")},
    "yarn": _read_yarn,
}
