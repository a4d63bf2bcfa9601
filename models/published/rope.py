"""Rotary positions in config.json: rope_parameters as transformers 5 writes it, and the older rope_theta and
rope_scaling."""

from collections.abc import Callable
from typing import Any

from ..parts import RopeScaling
from .config_json import Reader


def read_rope(reader: Reader, *, theta: float = 10000.0) -> dict[str, Any]:
    """Returns rope_theta and rope_scaling of ours. theta: the base where the file names none."""
    parameters = reader.get("rope_parameters", otherwise={})
    scaling = reader.get("rope_scaling", otherwise=None) or parameters  # transformers takes them in this order
    theta = reader.number("rope_theta", otherwise=theta)
    reader.only("partial_rotary_factor", 1.0, None, otherwise=None)
    key = "rope_parameters" if scaling is parameters else "rope_scaling"
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        reader.refuse(key, "is not one set of numbers for all layers", "use a model with the same for all layers")
        return {"rope_theta": theta, "rope_scaling": None}
    nested = Reader(scaling)
    theta = nested.number("rope_theta", otherwise=theta)
    nested.only("partial_rotary_factor", 1.0, None, otherwise=None)
    kind = nested.get("rope_type", "type", otherwise="default")
    if kind not in SCALINGS:
        reader.refuse(f"{key}.rope_type", f"'{kind}' is not implemented", f"use a model with {' or '.join(SCALINGS)}")
        return {"rope_theta": theta, "rope_scaling": None}
    read = SCALINGS[kind](nested, reader)
    for name in scaling.keys() - nested.asked:
        nested.refuse(name, f"is not known for rope_type '{kind}'", "remove it if it changes nothing")
    for mistake in nested.mistakes:
        reader.refuse(f"{key}.{mistake.key}", mistake.what, mistake.fix)
    return {"rope_theta": theta, "rope_scaling": read}


def write_rope(config: Any) -> dict[str, Any]:
    """Returns both forms: releases of transformers before 5 do not read rope_parameters."""
    scaling = None if config.rope_scaling is None else _written(config.rope_scaling)
    parameters = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling, "rope_parameters": parameters}


def _read_llama3(nested: Reader, reader: Reader) -> dict[str, Any]:
    length = reader.values.get("original_max_position_embeddings") or reader.values.get("max_position_embeddings")
    reader.asked.add("original_max_position_embeddings")
    return {
        "factor": nested.number("factor"),
        "low_frequency_factor": nested.number("low_freq_factor"),
        "high_frequency_factor": nested.number("high_freq_factor"),
        "original_length": nested.number("original_max_position_embeddings", otherwise=length),
    }


def _written(scaling: RopeScaling) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
        "original_max_position_embeddings": scaling.original_length,
    }


# What reads the keys of each rope_type: (those of the scaling, those of the whole file) -> our rope_scaling.
SCALINGS: dict[str, Callable[[Reader, Reader], dict[str, Any] | None]] = {
    "default": lambda nested, reader: None,
    "llama3": _read_llama3,
}
