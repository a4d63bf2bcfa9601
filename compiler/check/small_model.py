"""Cuts the numbers of a model: widths, heads, layers, experts, vocabulary, positions.

What a number may become depends on what splits it: heads on the devices of tensor and context, layers on the parts of a
pipeline, windows on the length. A user's class whose fields have the names of ours is cut by the same rules.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from meshloom.models.config import ModelConfig

from ..core.errors import ConfigError, Problem

_WIDTH = 32  # of the residual stream, and of other dimensions that are split
_HEAD_DIM = 8
_VOCAB = 128
WIDE_STDDEV = 0.2  # of initial weights: the products of narrow matrices would vanish beside the residual stream
_LARGE = 64  # a whole number of a model that has a name of its own is cut from here on
DRAWN = "each device draws for its own tokens"

Cuts = dict[str, tuple[Any, str]]  # by key, the value and the reason


@dataclass(frozen=True)
class Room:
    """The room that a mesh and a pipeline leave to the numbers of a small model.

    axes: the mesh axes of several devices. declared_sizes: of the declared mesh. parts: of the layers, one after the
    other, in a pipeline; 1 without one. is_even: each part has as many layers. stage_layers: those that are declared
    for each part. least_rounds: iterations that the loop over layers needs, each of one period of windows. length,
    declared_length: tokens of a sequence. block: numbers along what matmuls sum that share a scale; 1: none do.
    """

    axes: tuple[str, ...]
    declared_sizes: Mapping[str, int]
    parts: int
    is_even: bool
    stage_layers: tuple[int, ...] | None
    least_rounds: int
    length: int
    declared_length: int
    block: int = 1

    @property
    def head_dim(self) -> int:
        """Returns the dimension of a head: a multiple of the block, so that blocks divide any number of heads."""
        return math.lcm(_HEAD_DIM, self.block)

    def shards(self, *names: str) -> int:
        """Returns how many devices these axes have in the small mesh."""
        return 2 ** len(set(names) & set(self.axes))


def small_layers(layers: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Returns as many parts, with 2 layers each, and 1 where the declaration has fewest: (4, 4, 4, 3) -> (2, 1)."""
    least = min(layers)
    if least == max(layers):
        return (2,) * parts
    chosen = [1 if count == least else 2 for count in layers]
    if len(set(chosen[:parts])) == 1:  # the others are at the end
        chosen = [*chosen[: parts - 1], chosen[-1]]
    return tuple(chosen[:parts]) if len(chosen) >= parts else (2,) * parts


def small_model(model: ModelConfig, room: Room) -> tuple[ModelConfig, Cuts]:
    """Returns the model with smaller numbers, and the cuts. Numbers of a user's class that have names of their own are
    cut if the model can still be built."""
    known = _known_cuts(model, room)
    cuts = {key: cut for key, cut in known.items() if hasattr(model, key) and getattr(model, key) is not None}
    small = _rebuilt(model, cuts)
    for key, value in model:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if key in known or not is_number or value <= _LARGE:
            continue
        smaller = _WIDTH if value % _WIDTH == 0 else value % _WIDTH or 1
        more = {**cuts, key: (smaller, "a number of the model's own")}
        try:
            _rebuilt(model, more).build().abstract()
        except Exception:  # the model is the user's, and says so in its own way
            continue
        cuts = more
    return (small if cuts == known else _rebuilt(model, cuts)), cuts


def _rebuilt(model: ModelConfig, cuts: Cuts) -> ModelConfig:
    values = model.model_dump() | {key: value for key, (value, _) in cuts.items()}
    try:
        return type(model).model_validate(values)
    except ValidationError as error:
        (first, *_) = error.errors()
        where = ".".join(["model", *map(str, first["loc"])])
        what = f"the small model of the check is not valid: {first['msg']}"
        fix = "declare model.num_layers, widths and heads for which smaller ones exist (docs/check.md)"
        raise ConfigError([Problem(where, what, fix)]) from error


def _known_cuts(model: Any, room: Room) -> Cuts:
    """Returns the numbers of our models, and of others with fields of the same names."""
    get = lambda key, default=None: getattr(model, key, default)  # noqa: E731
    why = "the least that the mesh splits"
    cuts: Cuts = {}
    vocab_shards = math.prod(room.declared_sizes.values())
    vocab = _VOCAB if model.vocab_size % min(vocab_shards, 8) == 0 else _VOCAB + model.vocab_size % 8
    cuts["vocab_size"] = (min(model.vocab_size, vocab), "a batch has some of all tokens")
    cuts["embed_dim"] = (max(_WIDTH, 4 * room.shards("fsdp", "context", "expert", "data", "tensor")), why)
    cuts["mlp_dim"] = (2 * _WIDTH, why)
    cuts["dense_mlp_dim"] = (3 * _WIDTH, why)
    if get("num_heads") and get("num_kv_heads"):
        cuts |= _heads(model, room)
    of_head = "pairs of dimensions are turned" if room.block == 1 else f"blocks of {room.block} divide it"
    cuts["head_dim"] = (room.head_dim, of_head)
    if latent := get("latent_attention"):
        small = {"query_dim": latent.query_dim and _WIDTH, "kv_dim": math.lcm(_WIDTH // 2, room.block)}
        small |= {"rope_head_dim": math.lcm(4, room.block), "value_head_dim": room.head_dim}
        cuts["latent_attention"] = (latent.model_copy(update=small), why)
    if get("num_positions"):
        cuts["num_positions"] = (room.length, "as many as the sequence has tokens")
    if get("attention_windows"):
        cuts["attention_windows"] = (_windows(model.attention_windows, room.declared_length, room.length),
                                     "of the length as before")  # fmt: skip
    if get("num_experts"):
        cuts |= _experts(model)
    if get("num_layers"):
        cuts["num_layers"] = _layers(model, room)
    for key in ("dropout_rate", "router_jitter"):
        if get(key):
            cuts[key] = (0.0, DRAWN)
    if get("initializer_stddev"):
        cuts["initializer_stddev"] = (WIDE_STDDEV, "the products of narrow matrices would vanish")
    return {key: (value, why) for key, (value, why) in cuts.items()}


def _heads(model: Any, room: Room) -> Cuts:
    """Returns heads that as many devices split. Fewer heads of keys than devices stay fewer."""
    shards = room.shards("tensor", "context")
    declared_shards = math.prod(room.declared_sizes.get(axis, 1) for axis in ("tensor", "context"))
    is_split = model.num_kv_heads % declared_shards == 0
    kv_heads = max(shards, min(2, model.num_kv_heads)) if is_split else 1 if model.num_kv_heads == 1 else 2
    kv_heads = 1 if model.num_kv_heads == 1 else kv_heads
    groups = min(2, model.num_heads // model.num_kv_heads)
    heads = max(kv_heads * groups, shards * (2 if model.num_heads >= 2 * declared_shards else 1))
    if model.num_heads == model.num_kv_heads:
        kv_heads = heads
    why = f"a multiple of the {shards} devices that may split heads" if shards > 1 else "a few"
    return {"num_heads": (heads, why), "num_kv_heads": (kv_heads, "groups of heads as before, of two or fewer")}


def _windows(windows: Sequence[int | None], declared: int, length: int) -> tuple[int | None, ...]:
    """Returns windows that hide a part of the sequence exactly if the declared ones do."""

    def small(window: int | None) -> int | None:
        if window is None:
            return None
        return length if window >= declared else min(length - 1, max(length // 4, window * length // declared))

    return tuple(map(small, windows))


def _experts(model: Any) -> Cuts:
    each = min(2, getattr(model, "num_experts_per_token", 1))
    groups = min(2, getattr(model, "num_expert_groups", 1))
    experts = 4 if groups == 1 else 8
    cuts: Cuts = {
        "num_experts": (min(model.num_experts, experts), "a multiple of the two devices that split experts"),
        "num_experts_per_token": (each, "a token has several experts if it had several"),
    }
    if hasattr(model, "num_expert_groups"):
        chosen = groups if model.num_groups_per_token == model.num_expert_groups else 1
        cuts |= {"num_expert_groups": (groups, "a few"), "num_groups_per_token": (chosen, "not all, if it was not all")}
    if getattr(model, "num_shared_experts", 0):
        cuts["num_shared_experts"] = (1, "one, if there were some")
    if getattr(model, "num_dense_layers", 0):
        cuts["num_dense_layers"] = (1, "one, if there were some")
    return cuts


def _layers(model: Any, room: Room) -> tuple[int, str]:
    """Returns a number of layers with a whole period of their kinds, of which each part of a pipeline has some."""
    period = len(getattr(model, "attention_windows", None) or (None,))
    if room.parts > 1 and room.stage_layers is not None:
        return sum(small_layers(room.stage_layers, room.parts)), "as the small pipeline.layers"
    if room.parts > 1:
        step = math.lcm(room.parts, period)
        count = step * (2 if step < 4 else 1)
        return count + (0 if room.is_even or period > 1 else 1), "some for each part of the pipeline"
    declared_dense = getattr(model, "num_dense_layers", 0)  # they have a loop of their own
    dense = min(1, declared_dense)
    rounds = max(-(-(3 - dense) // period), room.least_rounds)
    count = dense + rounds * period + (model.num_layers - declared_dense) % period
    why = "whole periods of the kinds of layers" if period > 1 else "a first, a middle, a last"
    return min(count, model.num_layers), why
