"""Writes safetensors files, one tensor in memory at a time, and the folder that holds them.

A folder is written beside its place, as OUT.unfinished; one rename finishes it. Within it, each file is written to
NAME.tmp, synced, read back from the disk and compared, and then renamed. So kill -9 at any moment leaves nothing that
passes for whole, and the same command goes on with the files that are there.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.files import file_sha256
from .folder import FLOATS

NAMES = {dtype: name for name, dtype in FLOATS.items()}
WRITTEN_AT_ONCE = 2**26  # bytes


@dataclass(frozen=True)
class OutTensor:
    """A tensor to write. parts: yields its values in one array after the other, each of `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: Callable[[], Iterator[np.ndarray]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WriteFailed(Exception):
    """What was read back is not what was written."""


def shards_of(tensors: Sequence[OutTensor], max_bytes: int) -> list[list[OutTensor]]:
    """Returns the tensors of each file: in order, as many as have room. A larger one has a file of its own."""
    shards: list[list[OutTensor]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor.num_bytes > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.num_bytes
    return shards


def write_tensors(path: Path, tensors: Sequence[OutTensor], advance: Callable[[int], None]) -> str:
    """Writes one file, whole or not at all, and reads it back. Returns its SHA-256; raises WriteFailed if the disk does
    not give back what was written."""
    digest, unfinished = hashlib.sha256(), path.with_name(f"{path.name}.tmp")
    with unfinished.open("wb", buffering=0) as file:
        for block in _blocks(tensors, advance):
            digest.update(block)
            file.write(block)
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # so that the disk is read, and not the memory of the system
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if file_sha256(unfinished) != digest.hexdigest():
        raise WriteFailed(f"{unfinished} was read back with other content than was written")
    unfinished.replace(path)
    sync_folder(path.parent)
    return digest.hexdigest()


def _blocks(tensors: Sequence[OutTensor], advance: Callable[[int], None]) -> Iterator[memoryview]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers reads no file without it
    at = 0
    for tensor in tensors:
        end = at + tensor.num_bytes
        header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # as the library does, so that tensors are aligned
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
        num_bytes = 0
        for part in tensor.parts():
            assert part.dtype == tensor.dtype, (tensor.name, part.dtype)
            content = memoryview(np.ascontiguousarray(part).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
            num_bytes += len(content)
            for start in range(0, len(content), WRITTEN_AT_ONCE):
                block = content[start : start + WRITTEN_AT_ONCE]
                yield block
                advance(len(block))
        assert num_bytes == tensor.num_bytes, tensor.name


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
