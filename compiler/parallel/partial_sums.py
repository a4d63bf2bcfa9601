"""Adds up the parts that devices have of a scaled product.

Devices that split what a product sums over have a part of it each. The gradient of an input that several sites share is
the sum of their products:

    scatter(a) s + scatter(b) t    each is reduced by itself, as it is scaled afterwards
    scatter(a s) + scatter(b t)    compilers reduce a s + b t, once

So each device scales its part first. Scales are constant along what is summed, so the sum is the same.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax import Array
from jax.sharding import PartitionSpec

from ..core.partition_spec import Axes, axes_of
from ..formats.block import ELEMENTS, SCALES, EncodedArray


@dataclass(frozen=True)
class PartialSum:
    """A product whose sum several devices split, and whose result they split along one dimension. axes: the mesh axes
    that they are along. operands, result: the layouts over these axes. dimension: that of the result."""

    axes: Axes
    operands: tuple[PartitionSpec, PartitionSpec]
    result: PartitionSpec
    dimension: int

    def added(self, product: Callable[[EncodedArray, EncodedArray], Array], a: EncodedArray, b: EncodedArray) -> Array:
        """Returns the sum of what `product`, which scales, makes of the shards of each device."""

        def on_shards(a: EncodedArray, b: EncodedArray) -> Array:
            part = product(a, b)
            return jax.lax.psum_scatter(part, self.axes, scatter_dimension=self.dimension, tiled=True)

        specs = tuple(_of_encoded(spec, each) for spec, each in zip(self.operands, (a, b), strict=True))
        added = jax.shard_map(
            on_shards, in_specs=specs, out_specs=self.result, axis_names=set(self.axes), check_vma=False
        )
        return added(a, b)


def find_partial_sum(subscripts: str, first: PartitionSpec, result: PartitionSpec) -> PartialSum | None:
    """Returns how devices split the sum of a product: "btm,em->bte" with m of the first operand over tensor, and t of
    the result. None where they do not, or split anything else. first: the layout of the first operand."""
    operands, of_result = subscripts.split("->")
    of_first, of_second = operands.split(",")
    split = {letter: axes_of(entry) for letter, entry in zip(of_first, first, strict=False) if axes_of(entry)}
    axes = tuple(axis for letter in of_first for axis in split.get(letter, ()))
    scattered = [(at, axes_of(entry)) for at, entry in enumerate(result) if axes_of(entry)]
    if not axes or any(letter in of_result for letter in split) or [found for _, found in scattered] != [axes]:
        return None
    layouts = tuple(PartitionSpec(*(split.get(letter) for letter in at)) for at in (of_first, of_second))
    return PartialSum(axes, (layouts[0], layouts[1]), result, scattered[0][0])


def _of_encoded(spec: PartitionSpec, encoded: EncodedArray) -> dict[str, PartitionSpec]:
    """Returns the layouts of elements and of scales. A dimension that shares one scale is not split in the scales."""
    of_scales = (None if size == 1 else axes for size, axes in zip(encoded[SCALES].shape, spec, strict=True))
    return {ELEMENTS: spec, SCALES: PartitionSpec(*of_scales)}
