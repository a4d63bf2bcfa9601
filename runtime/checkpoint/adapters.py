"""Reads the parameters of a checkpoint alone, without its optimizer state, and adds the base to those of adapters.

Orbax reads the arrays that are asked for, each process its own shards. On a run of 134 M parameters under AdamW that is
a third of the bytes of the checkpoint. Checkpoints of adapters hold what is trained, and their base by reference: its
place, and a digest of its bits.

state   step, the parameters of adapters alone, the optimizer: megabytes where the base has gigabytes
data    ..., base: {place: hf:models/llama, digest: 5f0c...}

A base is loaded or drawn again at each start, and has to have the digest that the adapter was trained with.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.places import PUBLISHED, is_published, is_url
from meshloom.compiler.core.trees import combined, leaves_by_path
from meshloom.models.adapter import only_adapters, without_adapters
from meshloom.models.config import BaseConfig

from ..core.files import check_bucket, folder_at
from .find import Checkpoint, check_is_there, newest_good, saved_tree
from .orbax_context import context_for
from .restore_plan import listed, tree_differences

Base = Mapping[str, Any]  # place, of weights; null: drawn by the seed. digest: of its bits
READ_AT_ONCE_BYTES = 2**31  # of a process: what is read and not yet on the devices


def with_base(restored: Any, base: Any) -> Any:
    """Returns a tree of parameters: the adapters of one and the base of the other."""
    return combined(without_adapters(base), only_adapters(restored))


def base_of(place: str | None, params: Any, stored: BaseConfig | None = None) -> Base:
    """Returns the reference to the base of these parameters. place: that it was loaded from; None: it was drawn.
    stored: how it is encoded; None: it is not."""
    if place is not None and is_published(place):
        place = f"{PUBLISHED}{Path(place.removeprefix(PUBLISHED)).absolute()}"
    elif place is not None and not is_url(place):
        place = str(Path(place).absolute())
    encoding = None if stored is None else stored.model_dump(mode="json")
    return {"place": place, "digest": digest_of(without_adapters(params)), "encoding": encoding}


def check_adapter(start: Checkpoint, declared: BaseConfig | None) -> None:
    """Raises ConfigError if a checkpoint holds no adapter, or one over a base that was encoded otherwise."""
    check_encoding(start, read_base(start), declared)


def check_encoding(start: Checkpoint, there: Base, declared: BaseConfig | None) -> None:
    """Raises ConfigError if the base of a checkpoint's adapter was encoded otherwise than it is declared."""
    before, here = there.get("encoding"), None if declared is None else declared.model_dump(mode="json")
    if before != here:
        what = f"{start.path} holds an adapter that was trained over a base stored as {_words(before)}"
        what += f", and {_words(here)} is declared: an adapter makes up for what the rounding of its own base lost"
        raise ConfigError([Problem("adapter.base", what, f"set 'adapter.base={_words(before)}'")])


def _words(encoding: Mapping[str, Any] | None) -> str:
    """Returns an encoding as a declaration writes it: {element: nf4, block: 64, scales_block: 256}."""
    if encoding is None:
        return "null"
    values = (f"{key}: {'null' if value is None else value}" for key, value in encoding.items())
    return f"{{{', '.join(values)}}}"


def check_base(start: Checkpoint, params: Any, there: Base) -> None:
    """Raises ConfigError if the base among the parameters is not the one that a checkpoint's adapter belongs to."""
    if digest_of(without_adapters(params)) == there["digest"]:
        return
    what = f"{start.path} holds an adapter of another base: the weights here do not have the bits of that one"
    fix = "declare the same model, seed and precision.frozen; its base was drawn"
    if there["place"] is not None:
        fix = f"load the weights that {there['place']} held when it was trained, with precision.frozen as it was"
    raise ConfigError([Problem("checkpoint.weights_from", what, fix)])


def read_base(start: Checkpoint) -> Base:
    """Returns the reference to the base of a checkpoint's adapter. Raises ConfigError for a checkpoint without one."""
    with context_for(start.path):
        base = ocp.load_checkpointables(str(start.path), {"data": None})["data"].get("base")
    if base is None:
        what = f"{start.path} holds a whole model, and adapter= declares an adapter"
        raise ConfigError([Problem("adapter", what, f"start from it: checkpoint.weights_from={start.path}")])
    return base


def digest_of(params: Any) -> str:
    """Returns a digest of the bits of parameters in float32. It is the same however they are laid out, and in whichever
    type that holds their values."""
    leaves = leaves_by_path(params)
    sharding = next(iter(leaves.values())).sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    sums = jax.jit(lambda leaves: {path: _sums(x) for path, x in leaves.items()}, out_shardings=whole)(leaves)
    content = [[path, list(x.shape), [int(each) for each in sums[path]]] for path, x in sorted(leaves.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _sums(x: Array) -> Array:
    """Returns two sums of an array's bits, each multiplied by a number of its place: modulo 2^32, in any order."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for dimension in range(x.ndim):
        stride = math.prod(x.shape[dimension + 1 :]) % 2**32
        place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, dimension) * jnp.uint32(stride)
    sums = []
    for factor, shift in ((0x9E3779B1, 15), (0x85EBCA6B, 13)):
        mixed = (place + 1) * jnp.uint32(factor)
        mixed ^= mixed >> shift
        own = bits * jnp.uint32(factor)
        sums.append(jnp.sum((own ^ (own >> 16)) * (mixed | 1), dtype=jnp.uint32))
    return jnp.stack(sums)


def find_saved(place: str, key: str) -> Checkpoint:
    """Returns the checkpoint at RUN_DIR or RUN_DIR/checkpoints/STEP: without a step, the newest one that is as it was
    saved. Reads every byte of it. key: the place of mistakes.

    Raises ConfigError if there is no such checkpoint, RunFailed if all are damaged.
    """
    check_bucket(folder_at(place), key)
    return newest_good(*check_is_there(place, key), is_own=False)


def load_parameters(start: Checkpoint, params: Any) -> Any:
    """Returns the parameters of a checkpoint. params: a tree of sharded ShapeDtypeStructs, in whose type and layout
    they come; another type than the saved one is converted.

    Raises ConfigError with the arrays that the checkpoint lacks, has besides, or holds in other shapes.
    """
    saved = saved_tree(start.path)["params"]
    untyped = [
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "float32"), {"params": tree}) for tree in (saved, params)
    ]
    if differences := tree_differences(*untyped):
        what = f"{start.path} holds the parameters of another model:{listed(differences)}"
        raise ConfigError([Problem("model", what, "choose the model that was saved, or another checkpoint")])
    context = ocp.Context(context_for(start.path))
    context.pytree.loading.partial_load = True
    context.memory.read_concurrent_bytes = READ_AT_ONCE_BYTES
    with context:
        loaded = ocp.load_checkpointables(str(start.path), {"state": {"params": params}})
    return loaded["state"]["params"]
