"""In which order the tokens of a sequence lie on the devices that split its length.

    8 tokens on 4 devices    contiguous  01 23 45 67      zigzag  07 16 25 34

Under a causal mask the last chunk of a sequence sees all of it and the first one only itself. In zig-zag order device i
of n has the chunks i and 2n-1-i of 2n, so that all devices have the same work (Zhu et al., ring-flash-attention; Llama
3, arXiv:2407.21783, section 3.3.2). The host puts the tokens of a batch in this order once; positions, targets and
segment ids follow, and nothing but attention looks at the order.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from ..spec.spec import TokenOrderName
from ..target.mesh import MeshPlan
from .roles import AxisRoles


@dataclass(frozen=True)
class TokenOrder:
    """num_shards: devices that split the length of a sequence. On one device both orders are that of the sequence."""

    name: TokenOrderName
    num_shards: int

    @property
    def chunks_per_shard(self) -> int:
        return 2 if self.name == "zigzag" and self.num_shards > 1 else 1

    @property
    def num_chunks(self) -> int:
        return self.num_shards * self.chunks_per_shard

    def chunks(self) -> np.ndarray:
        """Returns the chunks of each shard, (shards, chunks_per_shard)."""
        shards = np.arange(self.num_shards)[:, None]
        return shards if self.chunks_per_shard == 1 else np.hstack([shards, self.num_chunks - 1 - shards])

    def of_sequence(self, length: int) -> np.ndarray | None:
        """Returns the place in the sequence of each token, as the shards have them; None where that is its own."""
        if self.chunks_per_shard == 1:
            return None
        return np.arange(length).reshape(self.num_chunks, -1)[self.chunks().reshape(-1)].reshape(-1)

    def of_shard(self, length: int, shard: jax.Array) -> jax.Array:
        """Returns the place in the sequence of each token of a shard. length: of the shard's part."""
        chunk = length // self.chunks_per_shard
        return (jnp.asarray(self.chunks(), jnp.int32)[shard][:, None] * chunk + jnp.arange(chunk)).reshape(-1)


def plan_token_order(name: TokenOrderName, mesh: MeshPlan, roles: AxisRoles) -> TokenOrder:
    """Returns the order of this name in which tokens lie on a mesh."""
    return TokenOrder(name, mesh.num_shards(roles.length))
