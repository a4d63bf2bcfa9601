"""Types of HLO values: `bf16[4,2048]{1,0:T(8,128)S(1)}`, `(f32[], u32[2])`, `token[]`."""

import math
import re
from dataclasses import dataclass
from functools import cache

# Bits of an element; what is not listed is 8 bits per digit of its name, as f32.
_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b(pred|token|opaque|bf16|[fscu]\d+[a-z0-9]*)\[([\d,<=]*)\](\{[^{}]*\})?")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")


@dataclass(frozen=True, slots=True)
class ArrayType:
    """memory_space: 0 is HBM; on TPUs 1 is the vector memory, 5 the host's."""

    dtype: str
    shape: tuple[int, ...]
    memory_space: int = 0

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return -(-self.num_elements * bits_of(self.dtype) // 8)


@cache
def parse_type(text: str) -> tuple[ArrayType, ...]:
    """The arrays of a type, those of a tuple in order; nested tuples are flat."""
    return tuple(_array(*match.groups()) for match in _ARRAY.finditer(text))


def num_bytes(text: str) -> int:
    """Bytes of all arrays of a type."""
    return sum(array.num_bytes for array in parse_type(text))


@cache
def bits_of(dtype: str) -> int:
    """bf16 -> 16, f8e4m3fn -> 8, s4 -> 4."""
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 0


def _array(dtype: str, dimensions: str, layout: str | None) -> ArrayType:
    shape = tuple(int(size.lstrip("<=")) for size in dimensions.split(",") if size)
    space = _MEMORY_SPACE.search(layout) if layout else None
    return ArrayType(dtype, shape, int(space[1]) if space else 0)
