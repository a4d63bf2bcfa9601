"""Whether devices have whole blocks of encoded arrays: a block has one scale, and is encoded and decoded at once."""

import math
from collections.abc import Iterable

from ..core.errors import Problem
from ..formats.layout import cut_at
from ..target.mesh import MeshPlan
from .base_formats import WHERE
from .rules import ArrayPlan


def check_shards(plans: Iterable[ArrayPlan], mesh: MeshPlan) -> list[Problem]:
    """Returns a problem for encoded arrays of which a device would have parts of blocks, with a size that works."""
    cut: dict[str, list[tuple[str, int]]] = {}
    for plan in plans:
        format, shape = plan.array.format, plan.array.shape
        if format is None:
            continue
        shards = [mesh.num_shards(d.axes) for d in plan.dimensions]
        for text in cut_at(format, shape, shards)[:1]:
            of_scales = text.startswith("of its scales") and format.scales_format
            blocks, sizes = (format.scales_format, format.scales_shape(shape)) if of_scales else (format, shape)
            assert blocks is not None
            length = math.prod(
                math.gcd(block, size // count)
                for block, size, count in zip(blocks.block_sizes(sizes), sizes, shards, strict=True)
            )
            key = "scales_block" if of_scales else "block"
            cut.setdefault(key, []).append((f"'{plan.array.path}': {text}", length))
    problems = []
    for key, found in cut.items():
        others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        fits = math.gcd(*(length for _, length in found))
        whole = "null, a scale for each column" if key == "block" else "null, for scales in float32"
        use = f"use {fits}, {whole}, or fewer devices there" if fits > 1 else f"use {whole}, or fewer devices there"
        problems.append(Problem(f"{WHERE}.{key}", f"devices would have parts of blocks of {found[0][0]}{others}", use))
    return problems
