"""Reads how the TPU compiler sends a collective over the torus, as far as its program says.

"emitter":"1DAllGatherNonMajorDim"                  one ring through all devices of the group
"emitter":"2DAllGatherOnMajorDim"                   two axes at once
StrategyND{colors:2 phases:2 ...}                   each color is a part of the data, in each phase on an own axis
StrategySubgroupND{colors:1 phases:2 ...}           one axis after the other
UniDirectionNDRingStrategy{colors:4 phases:2 ...}   a color for each direction of two axes
"""

import re

_STRATEGY = re.compile(r"(\w*Strategy\w*)\{colors:(\d+)")
_GATHER = re.compile(r'"emitter":"(\d)DAllGather')


def num_axes(attributes: str) -> int | None:
    """Returns the axes of the torus that carry a collective at the same time; None where the program does not say."""
    if gather := _GATHER.search(attributes):
        return int(gather[1])
    if strategy := _STRATEGY.search(attributes):
        colors = int(strategy[2])
        return max(1, colors // 2 if "UniDirection" in strategy[1] else colors)
    return None
