"""The global batch: which arrays it has, and its split over microbatches and data shards."""

import re

from meshloom.models import Model
from meshloom.models.numbers import divisors

from ..core.errors import Problem, raise_if_any
from ..core.format import be, counted
from ..spec.spec import RunSpec
from ..target.mesh import MeshPlan, nearest
from .roles import AxisRoles


def batch_arrays(spec: RunSpec) -> tuple[str, ...]:
    """Returns the names of the arrays of a batch, each int32 (global_batch_size, sequence_length).

    targets: IGNORED_TARGET (models/contract.py) where there is no loss, PADDING_TARGET where there is no token.
    positions: of each token in its document, from 0. segment_ids: of the documents of a sequence, from 1; 0 for
    padding.
    """
    documents = ("positions", "segment_ids") if spec.data.isolate_documents else ()
    return ("inputs", "targets", *documents)


def sequences_of_device(spec: RunSpec, mesh: MeshPlan, roles: AxisRoles) -> int:
    """Returns the sequences of one microbatch on a device."""
    return spec.global_batch_size // spec.num_microbatches // mesh.num_shards(roles.sequence)


def check_batch(spec: RunSpec, mesh: MeshPlan, roles: AxisRoles) -> None:
    """Raises ConfigError if microbatches times data shards do not divide the global batch, or the parts of a layer do
    not divide a device's share of it."""
    axes = roles.sequence
    shards, microbatches = mesh.num_shards(axes), spec.num_microbatches
    size, parts = spec.global_batch_size, shards * microbatches
    if size % parts == 0:
        _check_parts(spec.overlap.layers.batch_split, size // parts)
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


def check_length(spec: RunSpec, model: Model) -> None:
    """Raises ConfigError if sequences are longer than the model supports."""
    if model.max_length is not None and spec.sequence_length > model.max_length:
        what = f"{spec.sequence_length} tokens are more than the model's maximum of {model.max_length}"
        keys = [key for key, value in spec.model if value == model.max_length and re.search("length|position", key)]
        larger = f", or model.{keys[0]}={spec.sequence_length}" if len(keys) == 1 else ""
        fix = f"use {model.max_length} or less{larger}"
        raise_if_any([Problem("sequence_length", what, fix)])
