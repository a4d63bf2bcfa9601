"""In which order the sequences of a global batch lie on the devices that split it: microbatches as on any other mesh.

    8 sequences, 2 microbatches, 2 devices    device 0: 0 1 | 4 5    device 1: 2 3 | 6 7

A device's microbatch is a part of its own rows. If these were neighbours in the global batch, the sequences of a
microbatch would depend on the mesh, and with them whatever is no sum over tokens, such as a loss of balance. So the
host puts the rows of a batch in this order; nothing but what follows the number of a sequence looks at it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..spec.spec import RunSpec
from ..target.mesh import MeshPlan
from .roles import AxisRoles


@dataclass(frozen=True)
class RowOrder:
    """num_rows: of the global batch. num_shards: devices that split its sequences."""

    num_rows: int
    num_shards: int
    num_microbatches: int

    def rows_at(self, places: Any) -> Any:
        """Returns the numbers of the sequences that lie at some places of the batch on the devices: an array of
        integers, of NumPy or JAX."""
        of_both = self.num_rows // (self.num_shards * self.num_microbatches)  # of a microbatch on a device
        shard, microbatch = places // (of_both * self.num_microbatches), places // of_both % self.num_microbatches
        return (microbatch * self.num_shards + shard) * of_both + places % of_both

    def rows(self) -> np.ndarray:
        """Returns the number of the sequence at each place."""
        return self.rows_at(np.arange(self.num_rows))


def plan_row_order(spec: RunSpec, mesh: MeshPlan, roles: AxisRoles) -> RowOrder:
    """Returns the order in which the declaration lays out sequences on this mesh."""
    return RowOrder(spec.global_batch_size, mesh.num_shards(roles.sequence), spec.num_microbatches)
