"""Writes safetensors files, one tensor in memory at a time, and the folder that holds them.

A folder is written beside its place, as OUT.unfinished; one rename finishes it. Within it, each file is written to
NAME.tmp, synced, read back from the disk and compared, and then renamed. So kill -9 at any moment leaves nothing that
passes for whole, and the same command goes on with the files that are there.

An adapter is written as the folder that PEFT, vLLM and transformers load: two files, the tensors and their config.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.places import PUBLISHED
from meshloom.compiler.core.trees import leaves_by_path, node_at
from meshloom.compiler.declare.published_folder import understood
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.declare.sections import EXPORT
from meshloom.compiler.plan import Plan
from meshloom.compiler.sharding.arrays import build_model
from meshloom.models.adapter import is_adapter
from meshloom.models.published.peft import check_modules, write_peft

from ..core.files import file_sha256
from .folder import FLOATS, FROM

NAMES = {dtype: name for name, dtype in FLOATS.items()}
WRITTEN_AT_ONCE = 2**26  # bytes
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


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
    """A file that was read back differs from what was written."""


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


def check_peft(spec: RunSpec) -> Path:
    """Returns the folder to write. Raises ConfigError if the run has no adapter that PEFT can hold."""
    if spec.checkpoint.weights_from is None:
        raise ConfigError([Problem(FROM, "names no weights to export", "set it to RUN or RUN/checkpoints/STEP")])
    if spec.export.directory is None:
        raise ConfigError([Problem(f"{EXPORT}.directory", "is missing", "name a new folder: directory=OUT")])
    if spec.adapter is None:
        what = "peft writes an adapter, and this run trained the whole model"
        raise ConfigError([Problem(f"{EXPORT}.format", what, "choose format=huggingface")])
    understood(lambda: check_modules(spec.model, build_model(spec)), "model")
    folder = Path(spec.export.directory).absolute()
    _check_new(folder)
    return folder


def write_adapter(folder: Path, plan: Plan[RunSpec], params: Any, base: str | None, model_type: str | None) -> int:
    """Writes the adapter among these parameters. Returns the bytes of its tensors. base: the place of its base.
    model_type: of the family whose names are written."""
    needed = {
        path: np.asarray(jax.device_get(weight.encoding.float32(node_at(params, path))))
        for path, weight in leaves_by_path(plan.weights).items()
        if is_adapter(path) or (path in plan.model.adapters and plan.model.adapters[path].config.has_magnitude)
    }
    name = base and base.removeprefix(PUBLISHED)
    tensors, config = write_peft(plan.spec.model, plan.model, needed, base=name, model_type=model_type)
    write_peft_folder(folder, tensors, config)
    return sum(x.nbytes for x in tensors.values())


def _check_new(folder: Path) -> None:
    if folder.exists():
        what = f"{folder} holds something already" if folder.is_dir() else f"{folder} is a file"
        raise ConfigError([Problem(f"{EXPORT}.directory", what, "name a new folder: directory=OUT")])


def write_peft_folder(folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> None:
    """Writes a PEFT folder, under another name until it is whole. Raises ConfigError if the folder is there."""
    _check_new(folder)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    (unfinished / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    with open(unfinished / TENSORS, "wb") as file:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, x in tensors.items():
            header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [offset, offset + x.nbytes]}
            offset += x.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # the format aligns what follows
        file.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            file.write(np.ascontiguousarray(x, "<f4").tobytes())
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(folder)
