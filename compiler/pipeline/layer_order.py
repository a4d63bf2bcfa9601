"""Puts the layers of a model into the order in which stages hold them.

    loop, 2 stages, 2 chunks, 8 layers:  stage 0: layers 0 1 | 4 5    stage 1: layers 2 3 | 6 7
    placement order:                     0 1 4 5 2 3 6 7
    V:                                   0 1 6 7 2 3 4 5

In natural order layer k follows layer k - 1. In placement order the layers of a stage lie together, so that an array
of them can be split over the stages: by stage, then by chunk, then by layer. With one chunk both orders are equal.
"""

from collections.abc import Sequence
from itertools import accumulate

from .table import StagePlacement


def split_evenly(num_layers: int, placement: StagePlacement) -> tuple[int, ...]:
    """Returns the number of layers of each virtual stage, equal for all. Raises ValueError if they do not divide."""
    if num_layers % placement.num_virtual:
        raise ValueError(f"{num_layers} layers do not divide into {placement.num_virtual} virtual stages")
    return (num_layers // placement.num_virtual,) * placement.num_virtual


def layer_order(placement: StagePlacement, layers_per_virtual: Sequence[int]) -> tuple[int, ...]:
    """Returns the number of the layer at each place of placement order.

    layers_per_virtual: the number of layers of each virtual stage. `stack[list(layer_order(..))]` brings an array of
    layers from natural order into placement order.
    """
    first = (0, *accumulate(layers_per_virtual))
    held = (
        placement.virtual(stage, chunk)
        for stage in range(placement.num_stages)
        for chunk in range(placement.num_chunks)
    )
    return tuple(layer for virtual in held for layer in range(first[virtual], first[virtual + 1]))


def natural_order(placement: StagePlacement, layers_per_virtual: Sequence[int]) -> tuple[int, ...]:
    """Returns the place of each layer in placement order: the inverse of `layer_order`."""
    order = layer_order(placement, layers_per_virtual)
    return tuple(sorted(range(len(order)), key=order.__getitem__))
