"""Orbax as all checkpoints are read and written with it.

Importing it takes long, so find.py imports this when there is a checkpoint to read.
"""

from typing import Any

from orbax.checkpoint import v1 as ocp

from ..core.files import Folder, absolute
from .s3 import SCHEME, teach_orbax_s3

# The kinds of the items are given here, so that no file of the checkpoint without a hash decides them.
CONTEXT = ocp.Context()
CONTEXT.checkpointables.registry = ocp.handlers.local_registry().add(
    ocp.handlers.JsonHandler, checkpointable_name="data"
)


def context_for(folder: Folder) -> ocp.Context:
    """Returns Orbax's context for a folder. On s3:// nothing can be renamed, so a save is finished by one more file;
    Orbax does so by itself only for gs://."""
    if not str(folder).startswith(SCHEME):
        return CONTEXT
    teach_orbax_s3()
    context = ocp.Context(CONTEXT)
    context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
    return context


def read_metadata(path: Folder) -> Any:
    """Returns what Orbax knows of the items of a checkpoint: of arrays the shape, type and sharding."""
    with context_for(path):
        return ocp.checkpointables_metadata(str(absolute(path))).metadata
