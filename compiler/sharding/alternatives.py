"""Which dimension a rule splits: the one that it names, or an alternative that the compiler handles better."""

from collections.abc import Sequence

from ..spec.compiler_traits import CompilerTraits
from ..spec.spec import Rule
from .arrays import Array


def split_by(
    rule: Rule, array: Array, dimension: int, free: Sequence[int], num_shards: int, compiler: CompilerTraits
) -> tuple[int, str]:
    """Returns the dimension that a rule splits when it takes one, and why if it is another.

    free: the dimensions that no rule has taken. Best is one whose shards the compiler handles well; next, the first of
    the array, which is moved unpadded without a copy (weights.py).
    """
    why = _trouble(array, dimension, num_shards, compiler) if rule.alternatives and num_shards > 1 else ""
    if not why:
        return dimension, ""
    others = [
        place
        for logical in rule.alternatives
        for place in free
        if array.logical_axes[place] == logical and not array.shape[place] % num_shards
    ]
    well = [place for place in others if not _trouble(array, place, num_shards, compiler)]
    best = [*well, *(place for place in others if place == _own_dimensions(array)[0])]
    return (best[0], why) if best else (dimension, "")


def _trouble(array: Array, dimension: int, num_shards: int, compiler: CompilerTraits) -> str:
    """Returns what the compiler would do with shards along a dimension; empty if nothing is wrong with them."""
    own, size = _own_dimensions(array), array.shape[dimension]
    if len(own) == 2 and size % (num_shards * compiler.tile_rows):  # of more dimensions, two others lie in tiles
        return f"shards of {size // num_shards} would be padded"
    # Where the two are not tied, the embedding exchanges rows, and the head is cut (embedding.py, lm_head.py); in
    # layers, an all-reduce is hidden.
    others = [array.shape[place] for place in own if place != dimension]
    if array.is_tied and compiler.all_reduces(num_shards, others):
        return "its gradient would be all-reduced"
    return ""


def _own_dimensions(array: Array) -> list[int]:
    """Returns the dimensions that a layer sees."""
    return [place for place, name in enumerate(array.logical_axes) if name != "layers"]
