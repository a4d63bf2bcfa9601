"""Reads the parameters of a checkpoint in pieces, with bounded memory and without devices.

TensorStore reads whole chunks, and a chunk holds all layers of what one device had. So a stack is read for as many
layers at once as fit into `BLOCK_BYTES`, and a larger one several times.
"""

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import tensorstore

from meshloom.compiler.core.trees import leaves_by_path

from ..checkpoint.find import saved_tree
from ..checkpoint.s3 import SCHEME, s3_kvstore
from ..core.files import Folder, is_remote

BLOCK_BYTES = 2**30
NUM_BLOCKS = 4  # at once: a published tensor may be made of several parameters


class SavedParams:
    """The parameters of a checkpoint, in float32 where it has master weights for them."""

    def __init__(self, path: Folder):
        tree = saved_tree(path)
        masters = leaves_by_path(tree.get("master", {}))
        self.arrays: dict[str, Any] = leaves_by_path(tree["params"]) | masters
        self._names = {
            path: f"{'master' if path in masters else 'params'}.{path.replace('/', '.')}" for path in self.arrays
        }
        self._base = _kvstore(path / "state")
        self._context = tensorstore.Context({"data_copy_concurrency": {"limit": 2}})
        self._blocks: OrderedDict[str, tuple[int, np.ndarray]] = OrderedDict()

    def read(self, path: str, index: tuple[int, ...]) -> np.ndarray:
        """Returns a parameter without the leading dimensions that the index picks."""
        if not index:
            return self._open(path).read().result()
        first, block = self._blocks.get(path, (0, np.empty(0)))
        if not first <= index[0] < first + len(block):
            self._blocks.pop(path, None)
            while len(self._blocks) >= NUM_BLOCKS:
                self._blocks.popitem(last=False)
            first, block = index[0], self._open(path)[index[0] : self._end(path, index[0])].read().result()
            self._blocks[path] = (first, block)
        self._blocks.move_to_end(path)
        return block[(index[0] - first, *index[1:])]

    def _end(self, path: str, first: int) -> int:
        """Returns the end of a block that begins at an index of the first dimension."""
        shape, dtype = self.arrays[path].shape, self.arrays[path].dtype
        num_bytes = math.prod(shape[1:]) * np.dtype(dtype).itemsize
        return min(shape[0], first + max(1, BLOCK_BYTES // max(num_bytes, 1)))

    def _open(self, path: str) -> Any:
        kvstore = {"driver": "ocdbt", "base": self._base, "path": f"{self._names[path]}/"}
        store = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True, open=True, context=self._context)
        return store.result()


def _kvstore(folder: Folder) -> Any:
    """Returns TensorStore's spec of a folder."""
    if str(folder).startswith(SCHEME):
        return s3_kvstore(f"{folder}/")
    return f"{folder}/" if is_remote(folder) else {"driver": "file", "path": f"{folder}/"}
