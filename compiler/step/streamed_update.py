"""Updates the layers of a stack one after the other, with their moments in the host's memory.

    for each layer:  its moments from the host -> clip, optimizer, new masters -> its moments back to the host

So the device holds the moments of one layer, and of all that are left on it (sharding/state.py says which). The loop
carries masters and moments, which are changed in place. The copies of one matrix run beside those of others and the
arithmetic; what the host's link does not hide is waited for (docs/optimizers.md).

Each part of the model has an optimizer of its own, of the same config: Adam's, Lion's and SGD's rules look at one
element at a time, so that a layer alone, or a part alone, is updated as within the whole.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from meshloom.models import Stack

from ..core.trees import leaves_by_path
from ..optim.contract import OptimizerConfig, Setting
from ..optim.moments import owner_of
from ..sharding.state import is_on_host

_Updated = tuple[Any, list[Any]]  # masters by part, and the nodes of the optimizer's state (`_nodes`)


@dataclass(frozen=True)
class UpdateScalars:
    """The numbers of an update that all arrays share. scale: of the loss, and so of gradients. norm: of all gradients,
    without it. limit: of the norm; None: any. rate: the learning rate, which a loop does not compute again. may: False
    where the update is skipped; None: it never is."""

    scale: Array | float
    norm: Array
    limit: float | None
    rate: ArrayLike
    may: Array | None

    def clipped(self, gradients: Any) -> Any:
        """Returns gradients in float32 and without the scale, at most of the largest norm, as
        `optax.clip_by_global_norm` has them."""
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32) / self.scale, gradients)
        if self.limit is None:
            return gradients
        fits, limit = self.norm < self.limit, self.limit
        return jax.tree.map(lambda g: jax.lax.select(fits, g, (g / self.norm) * limit), gradients)

    def kept(self, after: Any, before: Any) -> Any:
        """Returns arrays after an update, or before it where it is skipped."""
        if (may := self.may) is None:
            return after
        return jax.tree.map(lambda after, before: jnp.where(may, after, before), after, before)


@dataclass(frozen=True)
class Streaming:
    """The stacks whose layers are updated one by one, and the optimizer of all. kinds: the ParameterKind of each
    trained parameter, as a tree; layouts: the PartitionSpec in which it is updated; mesh: the size of each axis."""

    stacks: tuple[str, ...]
    optimizer: OptimizerConfig
    kinds: Any
    layouts: Any
    mesh: Mapping[str, int]

    def updated(self, of: UpdateScalars, gradients: Any, state: Any, masters: Any) -> tuple[Any, Any]:
        """Returns the masters and the state of the optimizer after an update. gradients: as they were accumulated.

        Where the update is skipped, what loops over layers update is left as it was; the rest is not.
        """
        (of_clipping, chosen), rest = state, [part for part in masters if part not in self.stacks]
        nodes, structure = _nodes(chosen, masters)
        done = list[_Updated]()
        if rest:
            parts = [_parts(tree, rest) for tree in (gradients, masters)]
            done.append(_at_once(self._optimizer_of(rest, of.rate), structure, of, nodes, *parts))
        for name in self.stacks:
            stack = _Stack(name, self._optimizer_of((name,), of.rate), structure, of, gradients[name])
            done.append(stack.updated(nodes, masters[name]))
        made: dict[str, Any] = {}
        for parts, _ in done:
            made |= parts
        joined = [_joined(each) for each in zip(*(new for _, new in done), strict=True)]
        return made, (of_clipping, structure.unflatten(joined))

    def has(self, path: str) -> bool:
        """Returns True for the path of an array of the state that is of a parameter of these stacks."""
        return owner_of(path, self._paths) is not None

    @cached_property
    def _paths(self) -> tuple[str, ...]:
        paths = leaves_by_path(self.layouts, is_leaf=lambda node: isinstance(node, PartitionSpec))
        return tuple(path for path in paths if path.split("/")[0] in self.stacks)

    def _optimizer_of(self, parts: Collection[str], rate: ArrayLike) -> optax.GradientTransformation:
        """Returns the optimizer of some parts of the model, without clipping. rate: its learning rate."""
        kinds, layouts = _parts(self.kinds, parts), _parts(self.layouts, parts)
        return self.optimizer.build(Setting(lambda _: rate, kinds, layouts, self.mesh))


def streamed_stacks(stacks: Iterable[Stack], on_host: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of the stacks that have moments on the host. on_host: paths of arrays of the state."""
    paths = tuple(on_host)
    return tuple(stack.name for stack in stacks if any(f"/{stack.name}/" in path for path in paths))


@dataclass(frozen=True)
class _Stack:
    """A stack whose layers are updated in a loop. optimizer: of this part of the model. structure: that of the state of
    the optimizer. gradients: as they were accumulated."""

    name: str
    optimizer: optax.GradientTransformation
    structure: Any
    of: UpdateScalars
    gradients: Any

    def updated(self, nodes: Sequence[Any], masters: Any) -> _Updated:
        """Returns the masters and the nodes of the state after an update. nodes: of the whole model."""
        own = [node[self.name] if isinstance(node, dict) else node for node in nodes]
        num_layers = jax.tree.leaves(masters)[0].shape[0]
        masters, own = jax.lax.fori_loop(0, num_layers, partial(self._layer, own), (masters, own))
        pairs = zip(nodes, own, strict=True)
        return {self.name: masters}, [{self.name: new} if isinstance(node, dict) else new for node, new in pairs]

    def _layer(self, before: Sequence[Any], layer: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        """Updates one layer. before: the nodes before the update, whose scalars every layer reads."""
        masters, nodes = carry
        at = partial(_layer_of, layer)
        old = [at(node) if isinstance(node, dict) else given for node, given in zip(nodes, before, strict=True)]
        gradients, mine = self.of.clipped({self.name: at(self.gradients)}), {self.name: at(masters)}
        state = self.structure.unflatten([{self.name: one} if isinstance(one, dict) else one for one in old])
        updates, state = self.optimizer.update(gradients, state, mine)
        new = optax.apply_updates(mine, updates)
        made, _ = _nodes(state, mine)
        written = [
            _with_layer(layer, node, self.of.kept(after[self.name], was)) if isinstance(after, dict) else after
            for node, after, was in zip(nodes, made, old, strict=True)
        ]
        return _with_layer(layer, masters, self.of.kept(new, mine)[self.name]), written


def _layer_of(layer: Array, tree: Any) -> Any:
    """Returns a layer of stacked arrays on the device, as a stack of one."""
    one = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, layer, 1), tree)
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x, one)


def _with_layer(layer: Array, tree: Any, one: Any) -> Any:
    """Returns stacked arrays with one layer replaced. The layer is copied to the memory of the stack."""

    def replaced(whole: Array, part: Array) -> Array:
        part = jax.device_put(part, jax.memory.Space.Host) if is_on_host(whole) else part
        return jax.lax.dynamic_update_slice_in_dim(whole, part, layer, 0)

    return jax.tree.map(replaced, tree, one)


def _at_once(
    optimizer: optax.GradientTransformation, structure: Any, of: UpdateScalars, nodes: Sequence[Any],
    gradients: Any, masters: Any,
) -> _Updated:  # fmt: skip
    """Returns parts of the model and the nodes of their state after an update."""
    own = [_parts(node, masters) if isinstance(node, dict) else node for node in nodes]
    updates, state = optimizer.update(of.clipped(gradients), structure.unflatten(own), masters)
    return optax.apply_updates(masters, updates), _nodes(state, masters)[0]


def _nodes(state: Any, masters: Collection[str]) -> tuple[list[Any], Any]:
    """Returns what a state consists of: a dict for each tree like the parameters, by part of the model, and scalars;
    and the structure that makes a state of such."""
    parts = set(masters)
    return jax.tree.flatten(state, is_leaf=lambda node: isinstance(node, dict) and node.keys() == parts)


def _joined(nodes: Sequence[Any]) -> Any:
    """Returns a node of the whole model from those of its parts. Scalars, such as counts, are the same in each."""
    first, *others = nodes
    if not isinstance(first, dict):
        return first
    return first | {part: tree for node in others for part, tree in node.items()}


def _parts(tree: Any, names: Collection[str]) -> dict[str, Any]:
    return {name: tree[name] for name in names}
