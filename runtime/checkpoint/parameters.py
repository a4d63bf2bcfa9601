"""Reads the parameters of a checkpoint alone, without its optimizer state, laid out for any mesh.

Orbax reads the arrays that are asked for, each process its own shards. On a run of 134 M parameters under AdamW that is
a third of the bytes of the checkpoint.
"""

from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from meshloom.compiler.core.errors import ConfigError, Problem

from ..core.files import check_bucket, folder_at
from .differences import listed, tree_differences
from .find import Checkpoint, check_is_there, newest_good, saved_tree
from .orbax_context import context_for

READ_AT_ONCE_BYTES = 2**31  # of a process: what is read and not yet on the devices


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
