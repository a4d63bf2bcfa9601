"""Loads weights into the state of a new run: its steps, its optimizer and its schedule begin anew.

weights: hf:models/llama: 291 tensors of 12.6 GiB
read in 9.1 s, 1.4 GiB/s

A tensor becomes a sharded array in the layout of its file, of which each process reads its slice alone. One program
then lays it out as ours and puts it into its place of the stack, which is donated. So the memory of the host holds
slices of few tensors at a time, and the transposition runs on the devices.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.format import human_bytes
from meshloom.compiler.core.trees import leaves_by_path, nested_dict, node_at, pick
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.formats.block import ELEMENTS, BlockFormat
from meshloom.compiler.formats.layout import encode_layers, of_part
from meshloom.compiler.jax_private import taking_packed
from meshloom.compiler.plan import Plan
from meshloom.compiler.sharding.sharding import ShardingPlan
from meshloom.models.adapter import only_adapters

from ..checkpoint.adapters import READ_AT_ONCE_BYTES, check_base, check_encoding, load_parameters, read_base, with_base
from ..checkpoint.find import Checkpoint
from ..checkpoint.orbax_context import context_for
from ..core.stderr_capture import captured_native_stderr
from ..data.progress import TextProgress
from ..processes.process_log import announce
from .find import PublishedWeights, SavedWeights, StoredWeights, base_place, describe_weights, find_weights
from .folder import Matched, MatchedTensor

BYTES_IN_FLIGHT = 2**26  # of tensors that are read while the devices still put others into their places

ArraysByPath = dict[str, tuple[Any, ...]]  # by the path of the parameter: it, and perhaps its master weights


def with_weights(
    state: dict[str, Any], weights: StoredWeights, plan: Plan[RunSpec], console: Console
) -> dict[str, Any]:
    """Replaces the random weights of a fresh state; their buffers are donated. The optimizer begins from the weights,
    as it does in a run that draws them."""
    masters = leaves_by_path(state.get("master", {}))
    arrays: ArraysByPath = {}
    for path in leaves_by_path(plan.weights):
        x = node_at(state["params"], path)
        arrays[path] = (x, masters[path]) if path in masters else (x,)
        del x
    del masters
    arrays = _read(arrays, weights, _mesh_of(state), _formats(plan.sharding), console)
    state = state | {"params": nested_dict({path: each[0] for path, each in arrays.items()})}
    if "master" in state:
        state["master"] = nested_dict({path: each[1] for path, each in arrays.items() if len(each) > 1})
    layouts = jax.tree.map(lambda x: x.sharding, state["optimizer"])
    for x in jax.tree.leaves(state["optimizer"]):
        x.delete()
    trained = state.get("master") or pick(state["params"], plan.sharding.trained)

    def fresh_optimizer(params: Any) -> Any:
        return plan.optimizer.init(jax.tree.map(lambda x: x.astype("float32"), params))

    with jax.set_mesh(_mesh_of(trained)):
        return state | {"optimizer": jax.jit(fresh_optimizer, out_shardings=layouts)(trained)}


def load_params(plan: Plan[RunSpec], mesh: Mesh, weights: StoredWeights | None, console: Console) -> Any:
    """Returns the parameters alone, laid out on a mesh by the plan. What no weights are read for is drawn."""
    specs, encodings = plan.specs["params"], {path: x.encoding for path, x in leaves_by_path(plan.weights).items()}
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    fresh = weights.fresh if weights else tuple(encodings)

    def draw() -> Any:  # zeros where weights are read
        drawn = leaves_by_path(plan.model.init(jax.random.key(plan.spec.seed))) if fresh else {}
        shapes = {path: x.shape for path, x in leaves_by_path(plan.model.abstract()).items()}
        made = {
            path: each.store_of(drawn[path]) if path in fresh else each.zeros(shapes[path])
            for path, each in encodings.items()
        }
        return nested_dict(made)

    with jax.set_mesh(mesh):
        params = jax.jit(draw, out_shardings=shardings)()
    if weights is None:
        return params
    arrays = _read(
        {path: (node_at(params, path),) for path in encodings}, weights, mesh, _formats(plan.sharding), console
    )
    return nested_dict({path: x for path, (x,) in arrays.items()})


def _formats(sharding: ShardingPlan) -> dict[str, BlockFormat]:
    """Returns the formats of the parameters that are encoded, by path."""
    return {each.array.path: each.array.format for each in sharding.parameters if each.array.format is not None}


def load_adapted(plan: Plan[RunSpec], mesh: Mesh, start: Checkpoint, console: Console) -> Any:
    """Returns the parameters of a checkpoint that holds an adapter alone, with those of its base, which is loaded from
    its place, or drawn. Raises ConfigError if it is not the base that the adapter was trained on."""
    base = read_base(start)
    assert plan.spec.adapter is not None
    check_encoding(start, base, plan.spec.adapter.base)
    place = base_place(plan.spec.checkpoint.base_from, base["place"])
    weights = find_weights(plan, place) if place else None
    for line in describe_weights(weights) if weights else ():
        announce(console, f"base {line}")
    params = load_params(plan, mesh, weights, console)
    adapters = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), only_adapters(params)
    )
    params = with_base(load_parameters(start, adapters), params)
    check_base(start, params, base)
    return params


def _mesh_of(state: Any) -> Mesh:
    sharding = jax.tree.leaves(state)[0].sharding
    assert isinstance(sharding, NamedSharding)
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh


def _read(
    arrays: ArraysByPath, weights: StoredWeights, mesh: Mesh, formats: Mapping[str, BlockFormat], console: Console
) -> ArraysByPath:
    """Returns the arrays with the weights, and says how long it took. formats: of those that are encoded."""
    began = time.perf_counter()
    with TextProgress(console, "reading weights", total=weights.num_bytes) as progress:
        if isinstance(weights, PublishedWeights):
            arrays = read_into(arrays, weights.matched, mesh, progress.advance, formats)
            arrays |= _adapters(arrays, weights.adapter)
        else:
            plain = replace(weights, taken=tuple(path for path in weights.taken if path not in formats))
            arrays = arrays | _restored(arrays, plain)
            for path in weights.taken:
                if path in formats:  # one at a time: in float32 it is eight times as large
                    arrays[path] = (_restored_encoded(arrays[path][0], path, weights, formats[path], mesh),)
            progress.advance(weights.num_bytes)
        jax.block_until_ready(arrays)
    seconds = time.perf_counter() - began
    announce(console, f"read in {seconds:.1f} s, {human_bytes(int(weights.num_bytes / max(seconds, 1e-3)))}/s")
    return arrays


def _adapters(arrays: ArraysByPath, read: Mapping[str, np.ndarray]) -> ArraysByPath:
    """Returns the arrays of adapters that were read on the host, in the types and layouts of those here."""
    return {
        path: tuple(
            jax.make_array_from_callback(each.shape, each.sharding, lambda i, x=x, t=each.dtype: x[i].astype(t))
            for each in arrays[path]
        )
        for path, x in read.items()
    }


def _restored(arrays: ArraysByPath, weights: SavedWeights) -> ArraysByPath:
    """Returns the arrays that a checkpoint has, in the layouts and types of those here, which are freed first."""
    if not weights.taken:
        return {}
    wanted = {path: arrays[path][-1] for path in weights.taken}  # the master weights, where there are some
    layouts = {path: [(x.dtype, x.sharding) for x in arrays[path]] for path in weights.taken}
    abstract = {path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for path, x in wanted.items()}
    for path in weights.taken:
        for x in arrays[path]:
            x.delete()
    read = _loaded(abstract, weights)
    return {path: tuple(_laid_out(read[path], *each) for each in layouts[path]) for path in weights.taken}


def _restored_encoded(stored: Any, path: str, weights: SavedWeights, format: BlockFormat, mesh: Mesh) -> Any:
    """Returns one parameter that a checkpoint has, encoded, in the layout of the one here, which is freed first."""
    layouts, elements = jax.tree.map(lambda x: x.sharding, stored), stored[ELEMENTS]
    whole = jax.ShapeDtypeStruct(elements.shape, jnp.float32, sharding=elements.sharding)
    for x in jax.tree.leaves(stored):
        x.delete()
    with jax.set_mesh(mesh):
        encode = jax.jit(partial(encode_layers, format), out_shardings=layouts)
        return encode(_loaded({path: whole}, weights)[path])


def _loaded(abstract: Mapping[str, Any], weights: SavedWeights) -> dict[str, Array]:
    """Returns arrays of a checkpoint by path. abstract: sharded, in the type in which they come."""
    tree = {"params": nested_dict({path: x for path, x in abstract.items() if path not in weights.masters})}
    tree["master"] = nested_dict({path: x for path, x in abstract.items() if path in weights.masters})
    tree = {name: part for name, part in tree.items() if part}
    context = ocp.Context(context_for(weights.start.path))
    context.pytree.loading.partial_load = True
    context.memory.read_concurrent_bytes = READ_AT_ONCE_BYTES
    with context:
        content = ocp.load_checkpointables(str(weights.start.path), {"state": tree})["state"]
    return {path: x for part in content.values() for path, x in leaves_by_path(part).items()}


def _laid_out(x: Array, dtype: Any, sharding: Any) -> Array:
    if x.dtype == dtype and x.sharding == sharding:
        return x
    return jax.jit(lambda x: x.astype(dtype), out_shardings=sharding)(x)


def read_into(
    arrays: ArraysByPath,
    matched: Matched,
    mesh: Mesh,
    advance: Callable[[int], None],
    formats: Mapping[str, BlockFormat] = MappingProxyType({}),
) -> ArraysByPath:
    """Returns the arrays with the weights that were matched. The given ones are donated. advance: takes the bytes of
    each tensor that is done. formats: of the arrays that are encoded, each layer when its tensor is read."""
    arrays, waiting = dict(arrays), deque[tuple[Any, int]]()
    for taken in matched.taken:
        made = _read_one(arrays, taken, mesh, formats)
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


def _read_one(arrays: ArraysByPath, taken: MatchedTensor, mesh: Mesh, formats: Mapping[str, BlockFormat]) -> Any:
    """Puts a tensor into its places. Returns what is ready once the tensor has been read."""
    values = taken.file.values()
    read = jax.make_array_from_callback(values.shape, file_sharding(values.shape, mesh), lambda index: values[index])
    slots = [taken.tensor.slots[n] for n in taken.slots]
    stacks = tuple(arrays[slot.path] for slot in slots)
    starts = tuple(np.asarray(slot.index, np.int32) for slot in slots)
    operands, structure = jax.tree.flatten(jax.tree.map(_abstract, (stacks, read, starts)))
    own = tuple(formats.get(slot.path) for slot in slots)
    put = _put(taken.tensor.to_ours, taken.slots, own, structure, *operands)
    done, stacks = put(stacks, read, starts)
    for slot, stack in zip(slots, stacks, strict=True):
        arrays[slot.path] = stack
    return done


def _abstract(x: Array | np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if isinstance(x, Array) else None)


@cache
def _put(
    to_ours: Callable[[Array], tuple[Array, ...]],
    taken: tuple[int, ...],
    formats: tuple[BlockFormat | None, ...],
    structure: Any,
    *leaves: Any,
) -> Any:
    """Returns a compiled program: (arrays by slot, a file's tensor, the starts of its slots) -> (a scalar, the arrays).
    formats: of each slot. structure, leaves: what it takes, without values."""
    operands = structure.unflatten(leaves)

    def put(stacks: tuple[tuple[Any, ...], ...], x: Array, starts: tuple[Array, ...]) -> Any:
        parts = to_ours(x.astype(jnp.float32))  # exact for all types of files; what is computed does not round
        made = tuple(
            tuple(_placed(array, parts[n], start, format) for array in stack)
            for n, stack, start, format in zip(taken, stacks, starts, formats, strict=True)
        )
        return jnp.zeros((), jnp.int8), made

    layouts = jax.tree.map(lambda x: x.sharding, operands[0])
    mesh = jax.tree.leaves(layouts)[0].mesh
    program = jax.jit(put, donate_argnums=0, out_shardings=(NamedSharding(mesh, PartitionSpec()), layouts))
    with captured_native_stderr():  # the partitioner warns of each tensor that it replicates on the way: one at a time
        return taking_packed(program.lower(*operands).compile())


def _placed(array: Any, part: Array, start: Array, format: BlockFormat | None) -> Any:
    """Returns a parameter with a part, such as a layer or an expert, in its place; encoded if the parameter is."""
    if format is None:
        return _written(array, part, start)
    encoded = of_part(format, part.ndim).encode(part)
    return jax.tree.map(lambda x, own: _written(x, own, start), array, encoded)


def _written(array: Array, part: Array, start: Array) -> Array:
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
