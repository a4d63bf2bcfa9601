"""Reads the header of a GGUF file: its metadata, and the names, shapes and places of its tensors; no tensor.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) is "GGUF", a version, two counts, metadata as
typed values by key, and a description of each tensor; the tensors follow, each aligned.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import ConfigError, Problem

SUFFIX = ".gguf"
AGAIN = "copy or download it again"
ACCESS = f"{AGAIN}, or give this process access to it"
# By their numbers: values of metadata, and types of tensors.
VALUES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
READ = {0: "F32", 1: "F16", 30: "BF16", 8: "Q8_0"}
TYPES = READ | {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
PLAIN = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of a number
BLOCK, BLOCK_BYTES = 32, 34  # of Q8_0: numbers, and their bytes with a scale in float16
MOST_ITEMS, MOST_DIMENSIONS = 10_000_000, 4


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file. shape: as in NumPy. dtype: by its name in GGUF. start: its offset in the file, in bytes."""

    shape: tuple[int, ...]
    dtype: str
    start: int
    num_bytes: int

    def one_of_first(self, number: int) -> "GgufTensor":
        """Returns one part of the first dimension, whose parts lie one after the other."""
        size = self.num_bytes // self.shape[0]
        return GgufTensor(self.shape[1:], self.dtype, self.start + number * size, size)


@dataclass(frozen=True)
class GgufHeader:
    """said: the metadata; of lists of texts, such as the tokens, the length alone. tensors: by name."""

    said: dict[str, Any]
    tensors: dict[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Returns True for the name of a GGUF file."""
    return path.suffix.lower() == SUFFIX


def read_gguf(path: Path) -> GgufHeader:
    """Returns the header. Raises ConfigError for damage, and for types of tensors that are not read: of those with few
    bits, the ones that the library gguf does not read, or all where it is not installed."""
    try:
        size = path.stat().st_size
        mapped = memoryview(np.memmap(path, np.uint8, "r")) if size else memoryview(b"")  # type: ignore[arg-type]
        return _Reader(mapped).header(path, size)
    except OSError as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error.strerror or error}", ACCESS)]) from None
    except (struct.error, _DamagedError, OverflowError):
        raise ConfigError([Problem(str(path), "is truncated, or its header is damaged", AGAIN)]) from None


class _DamagedError(Exception):
    """The header is not one of GGUF."""


class _Reader:
    """Reads values from the beginning of a file on."""

    def __init__(self, content: memoryview):
        self.content, self.at = content, 0

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self.content, self.at)
        self.at += struct.calcsize(kind)
        return value

    def text(self) -> str:
        length = self.number("Q")
        if length > len(self.content) - self.at:
            raise _DamagedError
        value = bytes(self.content[self.at : self.at + length]).decode(errors="replace")
        self.at += length
        return value

    def value(self, kind: int) -> Any:
        if kind in VALUES:
            value = self.number(VALUES[kind])
            return float(str(np.float32(value))) if VALUES[kind] == "f" else value  # 1e-06, and not 9.99999997e-07
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            raise _DamagedError
        of, count = self.number("I"), self.number("Q")
        if count > MOST_ITEMS or of == ARRAY:  # no program writes lists of lists
            raise _DamagedError
        if of in VALUES:
            items = struct.unpack_from(f"<{count}{VALUES[of]}", self.content, self.at)
            self.at += struct.calcsize(VALUES[of]) * count
            return list(items)
        for _ in range(count):
            self.value(of)
        return count

    def header(self, path: Path, size: int) -> GgufHeader:
        if bytes(self.content[:4]) != b"GGUF":
            is_pointer = bytes(self.content[:8]) == b"version "
            fix = "run `git lfs pull` in its repository" if is_pointer else AGAIN
            what = "is a pointer of Git LFS, not the file itself" if is_pointer else "is not a GGUF file"
            raise ConfigError([Problem(str(path), what, fix)])
        self.at = 4
        version, num_tensors, num_values = self.number("I"), self.number("Q"), self.number("Q")
        if version not in (2, 3):
            what = f"is of version {version} of GGUF, or big-endian, and 2 and 3 are read"
            raise ConfigError([Problem(str(path), what, "convert it again with a newer llama.cpp")])
        if max(num_tensors, num_values) > MOST_ITEMS:
            raise _DamagedError
        said: dict[str, Any] = {}
        for _ in range(num_values):
            key = self.text()
            said[key] = self.value(self.number("I"))
        found, unread = dict[str, GgufTensor](), dict[str, str]()
        for _ in range(num_tensors):
            name, num_dimensions = self.text(), self.number("I")
            if num_dimensions > MOST_DIMENSIONS:
                raise _DamagedError
            shape = tuple(self.number("Q") for _ in range(num_dimensions))[::-1]
            kind, offset = self.number("I"), self.number("Q")
            dtype = TYPES.get(kind, f"number {kind}")
            if (block := _block(dtype)) is None:
                unread.setdefault(dtype, name)
            elif block[0] > 1 and (not shape or shape[-1] % block[0]):
                raise _DamagedError
            found[name] = GgufTensor(shape, dtype, offset, _num_bytes(block, shape))
        if unread:
            raise ConfigError([Problem(str(path), *_unread(unread))])
        aligned = said.get("general.alignment", 32)
        if not isinstance(aligned, int) or aligned < 1:
            raise _DamagedError
        first = -(-self.at // aligned) * aligned
        placed = {n: GgufTensor(t.shape, t.dtype, first + t.start, t.num_bytes) for n, t in found.items()}
        end = max((t.start + t.num_bytes for t in placed.values()), default=first)
        if end > size:
            what = f"is truncated: its tensors end at {end:,} bytes, and the file has {size:,}"
            raise ConfigError([Problem(str(path), what, AGAIN)])
        return GgufHeader(said, placed)


@cache
def _block(dtype: str) -> tuple[int, int] | None:
    """Returns how many numbers of a type are written together, and their bytes; None for a type that is not read."""
    if dtype in PLAIN:
        return 1, PLAIN[dtype]
    if dtype == "Q8_0":
        return BLOCK, BLOCK_BYTES
    try:
        import gguf  # noqa: PLC0415 (an extra)  # pyright: ignore[reportMissingImports]

        kind = gguf.GGMLQuantizationType[dtype]
        block = gguf.GGML_QUANT_SIZES[kind]
        gguf.quants.dequantize(np.zeros((1, block[1]), np.uint8), kind)
    except (ImportError, KeyError, NotImplementedError):
        return None
    return block


def _unread(types: Mapping[str, str]) -> tuple[str, str]:
    """Returns what is wrong with a file that has tensors of types that are not read, and what to do. types: a tensor of
    each."""
    named = ", ".join(f"{dtype} ({name})" for dtype, name in list(types.items())[:3])
    take = "take the file in F16, BF16 or Q8_0, or the folder that was published for transformers"
    if find_spec("gguf") is None:
        what = f"holds tensors of the type {named}; without the library gguf, {', '.join(READ.values())} are read"
        return what, f"pip install 'meshloom[gguf]', and what few bits have left is read; or {take}"
    return f"holds tensors of the type {named}, which the library gguf does not read", take


def _num_bytes(block: tuple[int, int] | None, shape: tuple[int, ...]) -> int:
    if block is None:
        return 0
    return (int(np.prod(shape, dtype=object)) if shape else 1) // block[0] * block[1]


def gguf_values(path: Path, tensor: GgufTensor) -> np.ndarray:
    """Returns the values of a tensor: a view of the file, or of types with few bits what they stand for, in float32."""
    if not tensor.num_bytes:
        return np.zeros(tensor.shape, np.float32)
    mapped = np.asarray(np.memmap(path, np.uint8, "r", tensor.start, (tensor.num_bytes,)))
    if tensor.dtype == "Q8_0":
        blocks = mapped.reshape(-1, BLOCK_BYTES)
        scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
        return (blocks[:, 2:].view(np.int8) * scales).reshape(tensor.shape)
    if tensor.dtype == "BF16":
        return (mapped.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    if tensor.dtype in PLAIN:
        return mapped.view(np.float32 if tensor.dtype == "F32" else np.float16).reshape(tensor.shape)
    import gguf  # noqa: PLC0415 (an extra)  # pyright: ignore[reportMissingImports]

    rows = mapped.reshape(*tensor.shape[:-1], -1)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.dtype]).reshape(tensor.shape)
