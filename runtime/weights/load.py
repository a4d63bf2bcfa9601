"""Loads weights into the state of a new run: its steps, its optimizer and its schedule begin anew.

weights: hf:models/llama: 291 tensors of 12.6 GiB
read in 9.1 s, 1.4 GiB/s
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.format import human_bytes
from meshloom.compiler.core.trees import leaves_by_path, like, nested_dict, pick
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.plan import Plan
from meshloom.models.adapter import only_adapters

from ..checkpoint.adapters import check_base, read_base, with_base
from ..checkpoint.find import Checkpoint
from ..checkpoint.orbax_context import context_for
from ..checkpoint.parameters import READ_AT_ONCE_BYTES, load_parameters
from ..data.progress import TextProgress
from ..processes.process_log import announce
from .find import PublishedWeights, SavedWeights, StoredWeights, describe_weights, find_weights
from .read import ArraysByPath, read_into


def with_weights(
    state: dict[str, Any], weights: StoredWeights, plan: Plan[RunSpec], console: Console
) -> dict[str, Any]:
    """Replaces the random weights of a fresh state; their buffers are donated. The optimizer begins from the weights,
    as it does in a run that draws them."""
    params, masters = leaves_by_path(state["params"]), leaves_by_path(state.get("master", {}))
    arrays = {path: (x, masters[path]) if path in masters else (x,) for path, x in params.items()}
    del params, masters
    arrays = _read(arrays, weights, _mesh_of(state), console)
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
    specs, abstract = plan.specs["params"], leaves_by_path(plan.abstract["params"])
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    fresh = weights.fresh if weights else tuple(abstract)

    def draw() -> Any:  # zeros where weights are read
        drawn = leaves_by_path(plan.model.init(jax.random.key(plan.spec.seed))) if fresh else {}
        made = {
            path: drawn[path].astype(x.dtype) if path in fresh else jnp.zeros(x.shape, x.dtype)
            for path, x in abstract.items()
        }
        return like(plan.abstract["params"], made)

    with jax.set_mesh(mesh):
        params = jax.jit(draw, out_shardings=shardings)()
    if weights is None:
        return params
    arrays = _read({path: (x,) for path, x in leaves_by_path(params).items()}, weights, mesh, console)
    return like(params, {path: x for path, (x,) in arrays.items()})


def load_adapted(plan: Plan[RunSpec], mesh: Mesh, start: Checkpoint, console: Console) -> Any:
    """Returns the parameters of a checkpoint that holds an adapter alone, with those of its base, which is loaded from
    its place, or drawn. Raises ConfigError if it is not the base that the adapter was trained on."""
    base = read_base(start)
    weights = None if base["place"] is None else find_weights(plan, base["place"])
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


def _read(arrays: ArraysByPath, weights: StoredWeights, mesh: Mesh, console: Console) -> ArraysByPath:
    """Returns the arrays with the weights, and says how long it took."""
    began = time.perf_counter()
    with TextProgress(console, "reading weights", total=weights.num_bytes) as progress:
        if isinstance(weights, PublishedWeights):
            arrays = read_into(arrays, weights.matched, mesh, progress.advance)
        else:
            arrays = arrays | _restored(arrays, weights)
            progress.advance(weights.num_bytes)
        jax.block_until_ready(arrays)
    seconds = time.perf_counter() - began
    announce(console, f"read in {seconds:.1f} s, {human_bytes(int(weights.num_bytes / max(seconds, 1e-3)))}/s")
    return arrays


def _restored(arrays: ArraysByPath, weights: SavedWeights) -> ArraysByPath:
    """Returns the arrays that a checkpoint has, in the layouts and types of those here, which are freed first."""
    wanted = {path: arrays[path][-1] for path in weights.taken}  # the master weights, where there are some
    layouts = {path: [(x.dtype, x.sharding) for x in arrays[path]] for path in weights.taken}
    abstract = {path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for path, x in wanted.items()}
    for path in weights.taken:
        for x in arrays[path]:
            x.delete()
    tree = {"params": nested_dict({path: x for path, x in abstract.items() if path not in weights.masters})}
    tree["master"] = nested_dict({path: x for path, x in abstract.items() if path in weights.masters})
    tree = {name: part for name, part in tree.items() if part}
    context = ocp.Context(context_for(weights.start.path))
    context.pytree.loading.partial_load = True
    context.memory.read_concurrent_bytes = READ_AT_ONCE_BYTES
    with context:
        content = ocp.load_checkpointables(str(weights.start.path), {"state": tree})["state"]
    read = {path: x for part in content.values() for path, x in leaves_by_path(part).items()}
    return {path: tuple(_laid_out(read[path], *each) for each in layouts[path]) for path in weights.taken}


def _laid_out(x: Array, dtype: Any, sharding: Any) -> Array:
    if x.dtype == dtype and x.sharding == sharding:
        return x
    return jax.jit(lambda x: x.astype(dtype), out_shardings=sharding)(x)
