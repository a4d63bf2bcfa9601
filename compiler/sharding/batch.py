"""The global batch: its arrays, its split over microbatches and devices, and the order of its rows and tokens on them.

Row order: microbatches as on any other mesh.

    8 sequences, 2 microbatches, 2 devices    device 0: 0 1 | 4 5    device 1: 2 3 | 6 7

A device's microbatch is a part of its own rows. If these were neighbours in the global batch, the sequences of a
microbatch would depend on the mesh, and so would anything that is not a sum over tokens, such as a loss of balance.

Token order: the tokens of a sequence on the devices that split its length.

    8 tokens on 4 devices    contiguous  01 23 45 67      zigzag  07 16 25 34

Under a causal mask the last chunk of a sequence sees all of it and the first one only itself. In zig-zag order device i
of n has the chunks i and 2n-1-i of 2n, so that all devices have the same work (Zhu et al., ring-flash-attention; Llama
3, arXiv:2407.21783, section 3.3.2).

The host puts a batch in both orders once. Positions, targets and segment ids follow; nothing but attention looks at the
order of tokens, and nothing but the number of a sequence depends on that of rows.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshloom.models import Model
from meshloom.models.config import divisors

from ..core.errors import ConfigError, Problem, raise_if_any
from ..core.format import be, counted
from ..jaxpr.program import LANES
from ..spec.plan_spec import PlanSpec
from ..spec.step_spec import StepSpec, TokenOrderName
from ..target.mesh import MeshPlan, nearest, plan_mesh
from ..target.target import TargetPlan
from .roles import AxisRoles, plan_roles


def batch_arrays(spec: StepSpec) -> tuple[str, ...]:
    """Returns the names of the arrays of a batch, each int32 (global_batch_size, sequence_length).

    targets: IGNORED_TARGET (models/contract.py) where there is no loss, PADDING_TARGET at padding.
    positions: the place of each token in its document, from 0. segment_ids: the documents of a sequence, from 1; 0 for
    padding.
    """
    documents = ("positions", "segment_ids") if spec.data.isolate_documents else ()
    return ("inputs", "targets", *documents)


REFERENCE = "reference"  # float32 (global_batch_size,): each sequence's log-probability by the reference of a DPO


def check_batch(spec: StepSpec, mesh: MeshPlan, roles: AxisRoles) -> None:
    """Raises ConfigError if microbatches times data shards do not divide the global batch, or the parts of a layer do
    not divide a device's share of it."""
    axes = roles.sequence
    shards, microbatches = mesh.num_shards(axes), spec.num_microbatches
    size, parts = spec.global_batch_size, shards * microbatches
    if size % parts == 0:
        _check_parts(spec.overlap.layers.batch_split, size // parts)
        _check_pairs(spec, size // parts)
        return
    split = " x ".join(f"{axis}={mesh.sizes[axis]}" for axis in axes)
    by = f"{counted(shards, 'data shard')} ({split})" if axes else "1 data shard"
    by += f" x {microbatches} microbatches" if microbatches > 1 else ""
    multiples = [n for n in (size // parts * parts, (size // parts + 1) * parts) if n]
    fix = f"use global_batch_size={' or '.join(map(str, multiples))}"
    if microbatches > 1 and size % shards == 0:
        fitting = divisors(size // shards)
        fix += f", or num_microbatches={nearest(microbatches, fitting)}"
    what = f"{counted(size, 'sequence')} {be(size)} not divisible by {by}"
    raise_if_any([Problem("global_batch_size", what, fix)])


def _check_parts(num_parts: int, num_sequences: int) -> None:
    if num_sequences % num_parts:
        what = f"{counted(num_sequences, 'sequence')} of a device {be(num_sequences)} not divisible by {num_parts}"
        fix = f"use {nearest(num_parts, divisors(num_sequences))}"
        raise_if_any([Problem("overlap.layers.batch_split", what, fix)])


def _check_pairs(spec: StepSpec, num_sequences: int) -> None:
    if spec.has_pairs and num_sequences % 2:
        what = f"{counted(num_sequences, 'sequence')} of a device and microbatch {be(num_sequences)} no whole pairs"
        fix = f"use global_batch_size={2 * spec.global_batch_size}, or fewer microbatches: objective={spec.objective.kind} compares two neighbouring sequences"  # noqa: E501
        raise_if_any([Problem("global_batch_size", what, fix)])


def check_length(spec: StepSpec, model: Model) -> None:
    """Raises ConfigError if sequences are longer than the model supports."""
    if model.max_length is not None and spec.sequence_length > model.max_length:
        what = f"{spec.sequence_length} tokens are more than the model's maximum of {model.max_length}"
        keys = [key for key, value in spec.model if value == model.max_length and re.search("length|position", key)]
        larger = f", or model.{keys[0]}={spec.sequence_length}" if len(keys) == 1 else ""
        fix = f"use {model.max_length} or less{larger}"
        raise_if_any([Problem("sequence_length", what, fix)])


@dataclass(frozen=True)
class RowOrder:
    """The order of the rows of a batch. num_rows: the rows of the global batch. num_shards: the devices that split its
    sequences."""

    num_rows: int
    num_shards: int
    num_microbatches: int

    def rows_at(self, places: Any) -> Any:
        """Returns the numbers of the sequences that lie at some places of the batch on the devices: an array of
        integers, of NumPy or JAX."""
        of_both = self.num_rows // (self.num_shards * self.num_microbatches)  # the rows of a microbatch on a device
        shard, microbatch = places // (of_both * self.num_microbatches), places // of_both % self.num_microbatches
        return (microbatch * self.num_shards + shard) * of_both + places % of_both

    def rows(self) -> np.ndarray:
        """Returns the number of the sequence at each place."""
        return self.rows_at(np.arange(self.num_rows))


@dataclass(frozen=True)
class TokenOrder:
    """The order of the tokens of a sequence. num_shards: the devices that split its length. On one device both orders
    are that of the sequence."""

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
        """Returns the place in the sequence of each token of a shard. length: the tokens of a shard."""
        chunk = length // self.chunks_per_shard
        return (jnp.asarray(self.chunks(), jnp.int32)[shard][:, None] * chunk + jnp.arange(chunk)).reshape(-1)


@dataclass(frozen=True)
class BatchPlan:
    """The global batch on the devices of a mesh.

    shapes: the shape and the layout of each array, by name. row_order: the order in which sequences lie on the devices
    that split the batch. token_order: the order in which the tokens of a sequence lie on the devices that split its
    length. sequences_of_device: the sequences of one microbatch on a device. length_of_device: the tokens of a
    sequence on a device. bytes_of_device: the bytes of the arrays of tokens on a device.
    """

    shapes: Mapping[str, tuple[jax.ShapeDtypeStruct, PartitionSpec]]
    row_order: RowOrder
    token_order: TokenOrder
    sequences_of_device: int
    length_of_device: int
    bytes_of_device: int

    @property
    def tokens_of_device(self) -> int:
        """Returns the tokens of one microbatch on a device."""
        return self.sequences_of_device * self.length_of_device


def plan_batch(spec: StepSpec, mesh: MeshPlan, roles: AxisRoles) -> BatchPlan:
    """Returns how a mesh splits the global batch, which `check_batch` and `check_token_order` accept."""
    size, length, num_shards = spec.global_batch_size, spec.sequence_length, mesh.num_shards(roles.sequence)
    tokens = jax.ShapeDtypeStruct((size, length), jnp.int32)
    shapes = dict.fromkeys(batch_arrays(spec), (tokens, roles.tokens_spec))
    num_bytes = len(shapes) * spec.tokens_per_step * tokens.dtype.itemsize // mesh.num_shards(roles.tokens)
    if spec.objective.kind == "dpo":
        shapes[REFERENCE] = (jax.ShapeDtypeStruct((size,), jnp.float32), roles.rows_spec)
    return BatchPlan(
        shapes,
        RowOrder(size, num_shards, spec.num_microbatches),
        _token_order(spec, mesh, roles),
        sequences_of_device=size // spec.num_microbatches // num_shards,
        length_of_device=length // mesh.num_shards(roles.length),
        bytes_of_device=num_bytes,
    )


def _token_order(spec: StepSpec, mesh: MeshPlan, roles: AxisRoles) -> TokenOrder:
    return TokenOrder(spec.token_order, mesh.num_shards(roles.length))


def check_token_order(spec: PlanSpec, mesh: MeshPlan, roles: AxisRoles, target: TargetPlan) -> None:
    """Raises ConfigError where the length cannot be cut in equal chunks, with the nearest that can."""
    axes, order = roles.length, _token_order(spec, mesh, roles)
    length, num_chunks = spec.sequence_length, order.num_chunks
    if length % num_chunks == 0:
        return
    over = " x ".join(f"{axis}={mesh.sizes[axis]}" for axis in axes)
    of_each = f", {order.chunks_per_shard} chunks for each shard" if order.chunks_per_shard > 1 else ""
    what = f"{length} tokens cannot be cut in {order.name} order over {over}: they are not divisible by {num_chunks}"
    step = num_chunks * LANES if target.platform == "tpu" else num_chunks
    below = spec.sequence_length // step * step
    lengths = " or ".join(str(length) for length in (below, below + step) if length)
    fixes = [f"use sequence_length={lengths}"]
    if order.chunks_per_shard > 1 and length % order.num_shards == 0:
        fixes.append("token_order=contiguous")
    if len(axes) == 1 and (sizes := _mesh_sizes(spec, mesh, target, axes[0])):
        fixes.append(f"mesh.{axes[0]}={nearest(order.num_shards, sizes)}")
    raise_if_any([Problem("sequence_length", what + of_each, ", or ".join(fixes))])


def _mesh_sizes(spec: PlanSpec, mesh: MeshPlan, target: TargetPlan, axis: str) -> list[int]:
    """Returns the sizes of the axis with which the length can be cut. Another axis has to take the rest of the
    devices."""
    free = next((name for name, size in spec.mesh if size == -1 and name != axis), None)
    if free is None:
        return []
    return [size for size in divisors(mesh.sizes[free] * mesh.sizes[axis]) if _works(spec, target, axis, size)]


def _works(spec: PlanSpec, target: TargetPlan, axis: str, size: int) -> bool:
    other = spec.model_copy(update={"mesh": spec.mesh.model_copy(update={axis: size})})
    try:
        mesh = plan_mesh(other.mesh, target, other.device_order)
        roles = plan_roles(other.sharding, mesh.sizes)
        check_batch(other, mesh, roles)
    except ConfigError:
        return False
    return spec.sequence_length % _token_order(other, mesh, roles).num_chunks == 0
