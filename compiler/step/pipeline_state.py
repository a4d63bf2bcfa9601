"""The state of a pipeline's loop over ticks: how a stage runs one of several functions of it, or none, and its buffers.

A function of the state runs in one of two ways:

cond             by XLA's conditional: TPUs and CPUs write the state in place
loops            by a loop of one trip or none for each function: so does XLA's GPU compiler, which copies what a
                 conditional takes and gives, on all stages, whether they run anything or not

Buffers are stacked arrays, read and written in place. Most hold what operations leave to later ones:

(slot, ...)           inputs of chunks, gradients of their results
(slot, layer, ...)    what layers save for their backward pass, in the memory of the device or of the host
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint

from ..core.scopes import at_most_once_scope, buffer_scope

Changes = Callable[[Any], tuple[Any, Any]]
"""A function of a state: it returns the state, and what else it makes."""


@dataclass(frozen=True)
class SlotBranches:
    """by_loops: functions run in loops (`CompilerTraits.copies_conditionals`)."""

    by_loops: bool

    def run(self, branch: Array, runs: Sequence[Changes], state: Any, nothing: Any) -> tuple[Any, Any]:
        """Returns what function number `branch`, counted from 1, makes of the state. For 0, an empty
        slot, returns the state as it is and `nothing`."""
        if self.by_loops:
            for number, run in enumerate(runs, start=1):
                state, nothing = _at_most_once(branch == number, run, state, nothing)
            return state, nothing
        ended = [_ended(run) for run in [lambda state: (state, nothing), *runs]]
        if len(ended) == 2:
            leave, run = ended
            return jax.lax.cond(branch > 0, run, leave, state)
        return jax.lax.switch(branch, ended, state)

    def run_if(self, is_on: Array, run: Changes, state: Any, nothing: Any) -> tuple[Any, Any]:
        """Returns what a function makes of the state, if it is on."""
        return self.run(is_on.astype(jnp.int32), [run], state, nothing)


def either(is_on: Array, run: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Returns what one of two functions gives, by a conditional: for small results."""
    return jax.lax.cond(is_on, _ended(run), _ended(otherwise))


def _at_most_once(is_on: Array, run: Changes, state: Any, nothing: Any) -> tuple[Any, Any]:
    def trip(carry: tuple[Array, tuple[Any, Any]]) -> tuple[Array, tuple[Any, Any]]:
        left, (state, _) = carry
        return left - 1, _ended(run)(state)

    with jax.named_scope(at_most_once_scope()):
        start = is_on.astype(jnp.int32), (state, nothing)
        return jax.lax.while_loop(lambda carry: carry[0] > 0, trip, start)[1]


def _ended(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with a barrier at its end: XLA fails where the partitioner's layouts of what branches return
    are declared and differ (jaxlib 0.10.2: `Inconsistent conditional sharding`)."""
    return lambda *operands: jax.lax.optimization_barrier(run(*operands))


@dataclass(frozen=True)
class Residual:
    """An array that a layer leaves to a later pass."""

    shape: tuple[int, ...]
    dtype: Any
    is_on_host: bool


def zeros_of(shapes: Any) -> Any:
    """Returns zeros of these shapes and types."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)


def empty_buffer(name: str, shapes: Any, *sizes: int) -> Any:
    """Returns a buffer of arrays of these shapes, with dimensions of these sizes before theirs. On the host it is made
    of a scalar there: zeros of the device would lie in its memory first."""

    def one(array: Any) -> Array:
        shape, zero = (*sizes, *array.shape), jnp.zeros((), array.dtype)
        if isinstance(array, Residual) and array.is_on_host:
            zero = jax.device_put(zero, jax.memory.Space.Host)
        with jax.named_scope(buffer_scope(name)):
            return jnp.broadcast_to(zero, shape)

    return jax.tree.map(one, shapes)


def read_slot(tree: Any, index: Array) -> Any:
    """Returns an entry along the first dimension."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def write_slot(tree: Any, value: Any, index: Array) -> Any:
    """Returns a buffer with an entry replaced along the first dimension."""
    return jax.tree.map(lambda x, v: jax.lax.dynamic_update_index_in_dim(x, v.astype(x.dtype), index, 0), tree, value)


def added_at(totals: Any, values: Any, index: Array) -> Any:
    """Returns totals with values added to an entry along the first dimension. No scatter: that has a kernel of its own,
    and a sum of slices is fused into what makes the values. The entry keeps its dimension, since XLA does not fuse the
    slice with its update where a reshape lies between them, and copies it."""

    def one(x: Array, value: Array) -> Array:
        entry = jax.lax.dynamic_index_in_dim(x, index, 0)
        return jax.lax.dynamic_update_index_in_dim(x, (entry + value[None]).astype(x.dtype), index, 0)

    return jax.tree.map(one, totals, values)


def read_layer(buffer: list[Array], slot: Array, layer: Array) -> list[Array]:
    """Returns what a layer wrote in a slot."""

    def one(x: Array) -> Array:
        found = jax.lax.dynamic_slice(x, (slot, layer, *(0,) * (x.ndim - 2)), (1, 1, *x.shape[2:]))
        # In the layout of the buffer: in that of a matmul, libtpu 0.0.42.1 copies all slots to the device, and back.
        if jax.typeof(x).memory_space == jax.memory.Space.Host:
            found = with_layout_constraint(found, Layout(tuple(range(x.ndim))))
        return found.reshape(x.shape[2:])

    return [one(x) for x in buffer]


def write_layer(buffer: list[Array], values: list[Array], slot: Array, layer: Array) -> list[Array]:
    """Returns a buffer with what a layer writes in a slot."""

    def one(x: Array, value: Array) -> Array:
        return jax.lax.dynamic_update_slice(x, value[None, None], (slot, layer, *(0,) * value.ndim))

    return [one(x, value) for x, value in zip(buffer, values, strict=True)]
