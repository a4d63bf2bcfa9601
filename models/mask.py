"""The mask of attention as a value: which keys a query sees.

A layer makes its mask once, of its config (decoder.py), and hands it to `Context.attend`. Kernels, exchanges and
estimates ask it; none of them works out a mask by itself. A new kind of mask is a field of `Mask`, its part in each
method here, and the key of a config that sets it. What a query sees has to follow from its distance to the keys: for
chunks that do not see each other, the methods would also take the place of the first key. A kernel that cannot compute
a mask refuses it (compiler/parallel/attention/attention.py).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import Array


@dataclass(frozen=True)
class Mask:
    """A causal mask: a query sees the key of its own token, and the keys before it.

    window: how many keys it sees at most, its own included; None: any number.
    A distance is the place of a query less the place of a key, in tokens: of single tokens, or of the first ones of a
    block of queries and a block of keys.
    """

    window: int | None = None

    @property
    def sees_all_before(self) -> bool:
        """Returns True if a query sees every key before its own."""
        return self.window is None

    def within(self, length: int) -> "Mask":
        """Returns the same mask of sequences of this length, without a window that hides nothing of them."""
        return Mask() if self.window is not None and self.window >= length else self

    def sees(self, distance: Any) -> Any:
        """Returns True where a query sees a key at this distance."""
        return distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)

    def __call__(self, queries: Any, keys: Any) -> Any:
        """Returns True where a query sees a key, by their places: `sees` in the form that a Pallas kernel takes."""
        is_before = queries >= keys
        return is_before if self.window is None else (queries - (self.window - 1) <= keys) & is_before

    def sees_any(self, distance: Any, num_queries: int, num_keys: int) -> Any:
        """Returns True where a query of a block sees a key of another block."""
        is_before = distance + num_queries > 0
        return is_before if self.window is None else is_before & (distance - num_keys + 1 < self.window)

    def sees_all(self, distance: Any, num_queries: int, num_keys: int) -> Any:
        """Returns True where every query of a block sees every key of another block."""
        is_before = distance >= num_keys - 1
        return is_before if self.window is None else is_before & (distance + num_queries <= self.window)

    def reach(self, block: int, num_blocks: int) -> int:
        """Returns how many blocks of keys before its own a block of queries sees, if only in part."""
        return num_blocks - 1 if self.window is None else min(num_blocks - 1, (self.window + block - 2) // block)

    def num_keys(self, places: np.ndarray) -> np.ndarray:
        """Returns how many keys the queries at some places of a sequence see."""
        return places + 1 if self.window is None else np.minimum(places + 1, self.window)

    def num_pairs(self, length: int) -> int:
        """Returns the pairs of a query and a key that it sees in a sequence: the area that is computed of the square
        of all scores."""
        width = length if self.window is None else min(self.window, length)
        return width * (width + 1) // 2 + (length - width) * width


OWN_KEY = Mask(window=1)  # the least that a query sees, whatever documents there are


def is_same_document(ids_BT: Array, ids_BS: Array) -> Array:
    """Returns (batch, queries, keys): True where query and key are of the same document, which is all that a query
    sees where sequences hold several."""
    return ids_BT[:, :, None] == ids_BS[:, None, :]
