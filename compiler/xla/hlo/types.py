"""Types of HLO values: `bf16[4,2048]{1,0:T(8,128)S(1)}`, `(f32[], u32[2])`, `token[]`."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

# Bits of an element. Other types say them in their names: f32, s8.
_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b(pred|token|opaque|bf16|[fscu]\d+[a-z0-9]*)\[([\d,<=]*)\](\{[^{}]*\})?")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_TILE = re.compile(r"\{([\d,]*):T\(([\d,]+)\)")
COMMENT = re.compile(r"/\*.*?\*/")
HBM, HOST = 0, 5


@dataclass(frozen=True, slots=True)
class ArrayType:
    """The type of an array. memory_space: 0 is HBM; on TPUs 1 is the vector memory and 5 the host's. num_padding: the
    elements that fill up its tiles. tile: the size of its tiles along each dimension; empty without tiles."""

    dtype: str
    shape: tuple[int, ...]
    memory_space: int = HBM
    num_padding: int = 0
    tile: tuple[int, ...] = field(default=(), compare=False)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Returns its bytes without padding."""
        return -(-self.num_elements * bits_of(self.dtype) // 8)

    @property
    def held_bytes(self) -> int:
        """Returns its bytes in memory, with padding."""
        return -(-(self.num_elements + self.num_padding) * bits_of(self.dtype) // 8)

    def touched_bytes(self, part: Sequence[int]) -> int:
        """Returns the bytes of the tiles that hold a part of this shape, if it begins at the edge of one: of
        f32[16,512,7168]{2,0,1:T(8,128)} a part [1,512,7168] lies in tiles that hold eight of them."""
        if len(part) != len(self.shape) or not self.tile:
            return -(-math.prod(part) * bits_of(self.dtype) // 8)
        sizes = (
            -(-own // step) * step if own < whole else own
            for own, whole, step in zip(part, self.shape, self.tile, strict=True)
        )
        return -(-math.prod(sizes) * bits_of(self.dtype) // 8)


@cache
def parse_type(text: str) -> tuple[ArrayType, ...]:
    """Returns the arrays of a type, those of a tuple in order; nested tuples are flat."""
    return tuple(_array(*match.groups()) for match in _ARRAY.finditer(text))


@cache
def elements_of(text: str) -> tuple[str, ...] | None:
    """Returns the types within a tuple's, one level down: '((f32[2]), s32[])' -> ('(f32[2])', 's32[]'). None if it is
    not a tuple."""
    text = COMMENT.sub("", text).strip()
    if not text.startswith("("):
        return None
    found, depth, start = [], 0, 1
    for place in range(1, len(text) - 1):
        character = text[place]
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            found.append(text[start:place].strip())
            start = place + 1
    return (*found, last) if (last := text[start:-1].strip()) else tuple(found)


def num_bytes(text: str) -> int:
    """Returns the bytes of all arrays of a type."""
    return sum(array.num_bytes for array in parse_type(text))


@cache
def bits_of(dtype: str) -> int:
    """Returns the bits of an element type: bf16 -> 16, f8e4m3fn -> 8, s4 -> 4."""
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 0


def _array(dtype: str, dimensions: str, layout: str | None) -> ArrayType:
    shape = tuple(int(size.lstrip("<=")) for size in dimensions.split(",") if size)
    space = _MEMORY_SPACE.search(layout) if layout else None
    order, tile = _tiles(layout or "")
    along = dict(zip(order, reversed(tile), strict=False))
    return ArrayType(
        dtype=dtype,
        shape=shape,
        memory_space=int(space[1]) if space else HBM,
        num_padding=_padding(shape, order, tile),
        tile=tuple(along.get(dimension, 1) for dimension in range(len(shape))) if tile else (),
    )


def _tiles(layout: str) -> tuple[list[int], list[int]]:
    """Returns the dimensions, the innermost first, and the sizes of a tile, the innermost last: {1,0:T(8,128)}."""
    match = _TILE.match(layout)
    order, tile = ([int(n) for n in numbers.split(",") if n] for numbers in match.groups()) if match else ([], [])
    return order, tile


def _padding(shape: tuple[int, ...], order: list[int], tile: list[int]) -> int:
    """Returns the elements that are added: {1,0:T(8,128)} fills the innermost dimensions up to multiples of 8 and of
    128."""
    if not tile:
        return 0
    inner_first = [shape[dimension] for dimension in order]
    inner_first += [1] * (len(tile) - len(inner_first))
    sizes = [-(-size // step) * step for size, step in zip(inner_first, reversed(tile), strict=False)]
    return math.prod(sizes) * math.prod(inner_first[len(tile) :]) - math.prod(shape)
