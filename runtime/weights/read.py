"""Reads the tensors of published files into the sharded parameters of a run.

A tensor becomes a sharded array in the layout of its file, of which each process reads its slice alone. One program
then lays it out as ours and puts it into its place of the stack, which is donated. So the memory of the host holds
slices of few tensors at a time, and the transposition runs on the devices.
"""

from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core.stderr_capture import captured_native_stderr
from .match import Matched, MatchedTensor

BYTES_IN_FLIGHT = 2**26  # of tensors that are read while the devices still put others into their places

ArraysByPath = dict[str, tuple[Array, ...]]  # by the path of the parameter: it, and perhaps its master weights


def read_into(arrays: ArraysByPath, matched: Matched, mesh: Mesh, advance: Callable[[int], None]) -> ArraysByPath:
    """Returns the arrays with the weights that were matched. The given ones are donated. advance: takes the bytes of
    each tensor that is done."""
    arrays, waiting = dict(arrays), deque[tuple[Any, int]]()
    for taken in matched.taken:
        made = _read_one(arrays, taken, mesh)
        waiting.append((made, taken.file.num_bytes))
        while len(waiting) > 1 and sum(size for _, size in waiting) > BYTES_IN_FLIGHT:
            _finish(waiting, advance)
    while waiting:
        _finish(waiting, advance)
    return arrays


def _finish(waiting: deque[tuple[Any, int]], advance: Callable[[int], None]) -> None:
    read, num_bytes = waiting.popleft()
    jax.block_until_ready(read)
    advance(num_bytes)


def _read_one(arrays: ArraysByPath, taken: MatchedTensor, mesh: Mesh) -> Any:
    """Puts a tensor into its places. Returns what is ready once the tensor has been read."""
    values = taken.file.values()
    read = jax.make_array_from_callback(values.shape, file_sharding(values.shape, mesh), lambda index: values[index])
    slots = [taken.tensor.slots[n] for n in taken.slots]
    stacks = tuple(arrays[slot.path] for slot in slots)
    starts = tuple(np.asarray(slot.index, np.int32) for slot in slots)
    put = _put(taken.tensor.to_ours, taken.slots, *jax.tree.map(_abstract, (stacks, read, starts)))
    done, stacks = put(stacks, read, starts)
    for slot, stack in zip(slots, stacks, strict=True):
        arrays[slot.path] = stack
    return done


def _abstract(x: Array | np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if isinstance(x, Array) else None)


@cache
def _put(to_ours: Callable[[Array], tuple[Array, ...]], taken: tuple[int, ...], *operands: Any) -> Any:
    """Returns a compiled program: (arrays by slot, a file's tensor, the starts of its slots) -> (a scalar, the arrays).
    operands: what it takes, without values."""

    def put(stacks: tuple[tuple[Array, ...], ...], x: Array, starts: tuple[Array, ...]) -> Any:
        parts = to_ours(x.astype(jnp.float32))  # exact for all types of files; what is computed does not round
        made = tuple(
            tuple(_placed(array, parts[n], start) for array in stack)
            for n, stack, start in zip(taken, stacks, starts, strict=True)
        )
        return jnp.zeros((), jnp.int8), made

    layouts = jax.tree.map(lambda x: x.sharding, operands[0])
    mesh = jax.tree.leaves(layouts)[0].mesh
    program = jax.jit(put, donate_argnums=0, out_shardings=(NamedSharding(mesh, PartitionSpec()), layouts))
    with captured_native_stderr():  # the partitioner warns of each tensor that it replicates on the way: one at a time
        return program.lower(*operands).compile()


def _placed(array: Array, part: Array, start: Array) -> Array:
    part = part.astype(array.dtype)[(None,) * start.shape[0]]
    zeros = [jnp.zeros((), start.dtype)] * (array.ndim - start.shape[0])
    return jax.lax.dynamic_update_slice(array, part, [*start, *zeros])


def file_sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Returns a layout in which each device reads other bytes of a tensor, as far as its dimensions divide: each mesh
    axis, the largest first, splits the first dimension that it still divides."""
    place, shards = dict[str, int](), [1] * len(shape)
    for axis, size in sorted(mesh.shape.items(), key=lambda item: -item[1]):
        fitting = next((n for n, length in enumerate(shape) if length and length % (shards[n] * size) == 0), None)
        if size > 1 and fitting is not None:
            place[axis] = fitting
            shards[fitting] *= size
    axes = (tuple(axis for axis in mesh.shape if place.get(axis) == n) or None for n in range(len(shape)))
    return NamedSharding(mesh, PartitionSpec(*axes))
