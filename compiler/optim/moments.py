"""How an optimizer's moments are stored between steps: in a type of floats, or in 8 bits with a scale for each block.

    m (4096, 11008) over fsdp=8 along the last dimension  ->  {"elements": int8 (4096, 11008), "scales": (4096, 64)}

The types of 8 bits are those that were found to train as float32 does (docs/optimizers.md): int8 for Adam's first
moments, the fourth root in uint8 for its second, float8_e4m3fn for Lion's. A block lies along the last dimension,
within the shard of one device. So encoding needs no communication, and the scales lie as the elements do.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from ..core.errors import ConfigError, Problem
from ..core.float_types import MomentType
from ..core.partition_spec import axes_of
from ..core.trees import leaves_by_path
from ..formats.block import ELEMENTS, SCALES, BlockFormat

BLOCK = 256  # as 8-bit optimizers have it (Dettmers et al. 2022, arXiv:2110.02861): the scale adds 1/64 byte an element
SHORTEST_BLOCK = 16  # a scale adds 1/4 byte to each element
MOST_WHOLE_ELEMENTS = 4096  # of arrays that stay in float32 (the same paper, section 2.2)
KEY = "optimizer.moment_block"

FIRST: Mapping[MomentType, str] = {"int8": "int8", "float8": "float8_e4m3fn"}
SECOND: Mapping[MomentType, str] = {"int8": "root4"}
ELEMENT_OF = {"int8": "int8", "uint8": "root4", "float8_e4m3fn": "float8_e4m3fn"}  # by the type of stored elements


@dataclass(frozen=True)
class MomentLayout:
    """How the moments of one parameter are stored in 8 bits. block: the length of its blocks along the last dimension;
    None: it stays in float32, because of `reason`."""

    block: int | None
    reason: str


def moment_layout(
    shape: tuple[int, ...], kind: Any, spec: PartitionSpec, mesh: Mapping[str, int], declared: int | None = None
) -> MomentLayout:
    """Returns how the moments of a parameter are stored. kind: its ParameterKind. spec: the layout of its update.
    declared: the length of a block; None: the divisor of the shard that is nearest to 256. Raises a ValueError with the
    lengths that work if the declared one does not."""
    size = math.prod(shape[d] for group in kind.groups for d in group)
    if not kind.is_matrix:
        return MomentLayout(None, "a vector")
    if size < MOST_WHOLE_ELEMENTS:
        return MomentLayout(None, f"{size:,} elements, fewer than {MOST_WHOLE_ELEMENTS:,}")
    axes = axes_of(spec[len(shape) - 1]) if len(spec) == len(shape) else ()
    shard = shape[-1] // math.prod(mesh[axis] for axis in axes)
    sizes = [length for length in range(SHORTEST_BLOCK, shard + 1) if shard % length == 0]
    where = f"{shape[-1]:,} over {'+'.join(axes)} leaves {shard:,}" if axes else f"the last dimension has {shard:,}"
    if not sizes:
        return MomentLayout(None, f"{where}, which no block of {SHORTEST_BLOCK} or more divides")
    if declared is not None and declared not in sizes:
        near = sorted(sorted(sizes, key=lambda length: abs(length - declared))[:3])
        raise ValueError(f"{where}; blocks of {' or '.join(map(str, near))} divide it")
    return MomentLayout(declared or min(sizes, key=lambda length: abs(length - BLOCK)), where)


def moment_layouts(shapes: Any, kinds: Any, specs: Any, mesh: Mapping[str, int], declared: int | None) -> Any:
    """Returns the MomentLayout of each parameter, as a tree. Raises ConfigError with each array that a declared length
    of blocks does not divide."""
    problems = list[Problem]()
    fix = "use a length that divides the shards of all, or null, by which each array has its own"
    paths = iter(leaves_by_path(shapes))

    def one(x: Any, kind: Any, spec: PartitionSpec) -> MomentLayout | None:
        path = next(paths)
        try:
            return moment_layout(x.shape, kind, spec, mesh, declared)
        except ValueError as error:
            problems.append(Problem(KEY, f"blocks of {declared} do not divide {path}: {error}", fix))
            return None

    layouts = jax.tree.map(one, shapes, kinds, specs)
    if problems:
        raise ConfigError(problems)
    return layouts


def moment_of(path: str) -> tuple[str, str | None]:
    """Returns the path of the moment that an array of the state is a part of, and the part: mu/w/scales -> (mu/w,
    scales). None: it is the moment itself."""
    whole, _, part = path.rpartition("/")
    return (whole, part) if part in (ELEMENTS, SCALES) else (path, None)


def owner_of(path: str, parameters: Iterable[str]) -> str | None:
    """Returns the path of the parameter that an array of the state belongs to: optimizer/1/mu/w/scales -> w; None if it
    belongs to none of these parameters."""
    whole, _ = moment_of(path)
    return next((each for each in parameters if whole.endswith(f"/{each}")), None)


def is_stored_in_blocks(node: Any) -> bool:
    """Returns True for a moment in 8 bits, as it is in the state: {"elements": .., "scales": ..}."""
    return isinstance(node, dict) and node.keys() == {ELEMENTS, SCALES}


def stored_format(encoded: Mapping[str, Any]) -> BlockFormat:
    """Returns the format of a moment in 8 bits, by the types and shapes of its arrays."""
    elements, scales = encoded[ELEMENTS], encoded[SCALES]
    return BlockFormat(ELEMENT_OF[str(elements.dtype)], (elements.shape[-1] // scales.shape[-1],))


def stored_in(moments: optax.GradientTransformation, dtype: MomentType) -> optax.GradientTransformation:
    """Returns the transformation with its state stored in a type of floats between steps and computed in float32."""

    def cast(state: Any, dtype: Any) -> Any:
        is_moment = lambda x: jnp.ndim(x) > 0 and jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
        return jax.tree.map(lambda x: x.astype(dtype) if is_moment(x) else x, state)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = moments.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(moments.init(params), dtype), update)


LayoutsOf = Callable[[Any], Any]  # parameters -> their MomentLayouts, as a tree


def stored_in_types(
    moments: optax.GradientTransformation, types: Mapping[str, MomentType], layouts_of: LayoutsOf
) -> optax.GradientTransformation:
    """Returns the transformation with some moments stored in 8 bits between steps, and computed in float32.

    types: by the name of the moments in the state, {"mu": "int8", "nu": "int8"}. The moments start at zero.
    """
    formats = {name: (SECOND if name == "nu" else FIRST).get(dtype) for name, dtype in types.items()}

    def init(params: Any) -> Any:
        return _replaced(moments.init(params), layouts_of(params), _zeros)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        layouts = layouts_of(updates)
        updates, state = moments.update(updates, _replaced(state, layouts, _decoded), params)
        return updates, _replaced(state, layouts, _encoded)

    def _replaced(state: Any, layouts: Any, change: Callable[[Any, "BlockFormat | str"], Any]) -> Any:
        trees = {}
        for name, dtype in types.items():
            element = formats[name]

            def one(layout: MomentLayout, x: Any, element: str | None = element, dtype: str = dtype) -> Any:
                if element is None:
                    return change(x, dtype)
                return change(x, "float32" if layout.block is None else BlockFormat(element, (layout.block,)))

            trees[name] = jax.tree.map(one, layouts, getattr(state, name))
        return state._replace(**trees)

    return optax.GradientTransformation(init, update)


def _zeros(x: jax.Array, stored: BlockFormat | str) -> Any:
    if isinstance(stored, str):
        return x.astype(stored)
    # A slice has as many entries as there are blocks, and the layout of the array.
    first = jax.lax.slice(x, (0,) * x.ndim, x.shape, (1,) * (x.ndim - 1) + (stored.block[-1] or x.shape[-1],))
    encoded = jax.eval_shape(stored.encode, jax.ShapeDtypeStruct(x.shape[-1:], x.dtype))
    return {ELEMENTS: x.astype(encoded[ELEMENTS].dtype), SCALES: first}


def _encoded(x: jax.Array, stored: BlockFormat | str) -> Any:
    return x.astype(stored) if isinstance(stored, str) else stored.encode(x)


def _decoded(x: Any, stored: BlockFormat | str) -> jax.Array:
    return x.astype(jnp.float32) if isinstance(stored, str) else stored.decode(x)
