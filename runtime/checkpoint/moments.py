"""Moments that a checkpoint holds in another type or other blocks than the run are converted as they are restored.

    optimizer/1/0/mu/layers/mlp/up_EM float32[32,4096,14336]  ->  .../elements int8, .../scales float32[32,4096,56]

To float32 every conversion is exact; to fewer bits it rounds, once. Only the storage of moments is converted: another
optimizer has other arrays, and is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshloom.compiler.core.float_types import FloatType
from meshloom.compiler.core.format import be, counted
from meshloom.compiler.core.partition_spec import axes_of
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.formats.block import ELEMENTS, SCALES
from meshloom.compiler.optim.moments import is_stored_in_blocks, moment_of, stored_format

FLOATS = get_args(FloatType)
OPTIMIZER = "optimizer/"


@dataclass(frozen=True)
class ConvertedMoment:
    """A moment that is stored otherwise in a checkpoint. there, here: its arrays by part, None for a plain array."""

    path: str
    there: Mapping[str | None, Any]
    here: Mapping[str | None, Any]

    @property
    def is_exact(self) -> bool:
        """Returns True if the run's type has every number of the checkpoint's."""
        return None in self.here and str(self.here[None].dtype) == "float32"


def converted_moments(there: Any, here: Any) -> dict[str, ConvertedMoment]:
    """Returns the moments that differ in how they are stored and in nothing else, by path. there, here: states, whose
    leaves have a shape and a dtype."""
    saved, wanted = _by_moment(there), _by_moment(here)
    return {
        path: ConvertedMoment(path, saved[path], wanted[path])
        for path in saved.keys() & wanted.keys()
        if _described(saved[path]) != _described(wanted[path])
        and _shape(saved[path]) == _shape(wanted[path])
        and all(map(_is_moment, (saved[path], wanted[path])))
    }


def describe_conversion(moments: Mapping[str, ConvertedMoment]) -> str | None:
    """Returns a line about what restoring converts; None if nothing."""
    if not moments:
        return None
    before, after = (
        ", ".join(sorted({_type(getattr(one, side)) for one in moments.values()})) for side in ("there", "here")
    )
    rounded = [one for one in moments.values() if not one.is_exact]
    how = "without loss" if not rounded else f"and {len(rounded)} of them {be(len(rounded))} rounded"
    number = counted(len(moments), "moment")
    return f"{number} {be(len(moments))} stored as {before} in the checkpoint and as {after} here: converted {how}"


def as_saved(state: Any, moments: Mapping[str, ConvertedMoment]) -> Any:
    """Returns an abstract state with the moments as the checkpoint holds them, laid out as the run's are."""

    def one(keys: Any, here: Any) -> Any:
        moment = moments.get(jax.tree_util.keystr(keys, simple=True, separator="/"))
        if moment is None:
            return here
        layout = (here[ELEMENTS] if is_stored_in_blocks(here) else here).sharding
        parts = {part: _abstract(x, layout) for part, x in moment.there.items()}
        return parts.get(None, parts)

    return jax.tree_util.tree_map_with_path(one, state, is_leaf=is_stored_in_blocks)


def as_here(state: Any, restored: Any) -> Any:
    """Returns a restored state with its moments stored as the run's abstract state has them."""

    def one(here: Any, there: Any) -> Any:
        types = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (here, there)]
        if types[0] == types[1]:
            return there
        layouts = jax.tree.map(lambda x: x.sharding, here)
        return jax.jit(partial(_stored_as, here), out_shardings=layouts)(there)

    return jax.tree.map(one, state, restored, is_leaf=is_stored_in_blocks)


def _stored_as(here: Any, there: Any) -> Any:
    whole = stored_format(there).decode(there) if is_stored_in_blocks(there) else there.astype(jnp.float32)
    return stored_format(here).encode(whole) if is_stored_in_blocks(here) else whole.astype(here.dtype)


def _abstract(x: Any, layout: Any) -> jax.ShapeDtypeStruct:
    """Returns an array laid out as another; whole along dimensions that this does not divide."""
    spec = [*layout.spec, *[None] * (len(x.shape) - len(layout.spec))]
    counts = [math.prod(layout.mesh.shape[axis] for axis in axes_of(entry)) for entry in spec]
    fits = [None if size % count else entry for size, count, entry in zip(x.shape, counts, spec, strict=True)]
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(layout.mesh, PartitionSpec(*fits)))


def _by_moment(state: Any) -> dict[str, dict[str | None, Any]]:
    found = dict[str, dict[str | None, Any]]()
    for path, x in leaves_by_path(state).items():
        if path.startswith(OPTIMIZER) and x.shape:
            whole, part = moment_of(path)
            found.setdefault(whole, {})[part] = x
    return found


def _is_moment(parts: Mapping[str | None, Any]) -> bool:
    return {*parts} == {ELEMENTS, SCALES} or ({*parts} == {None} and str(parts[None].dtype) in FLOATS)


def _shape(parts: Mapping[str | None, Any]) -> tuple[int, ...] | None:
    array = parts.get(None, parts.get(ELEMENTS))
    return None if array is None else tuple(array.shape)


def _described(parts: Mapping[str | None, Any]) -> dict[str | None, Any]:
    return {part: (tuple(x.shape), str(x.dtype)) for part, x in parts.items()}


def _type(parts: Mapping[str | None, Any]) -> str:
    return str(parts[None].dtype) if None in parts else f"{parts[ELEMENTS].dtype} in blocks"
