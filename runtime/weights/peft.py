"""Writes an adapter as the folder that PEFT, vLLM and transformers load: two files, the tensors and their config."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.places import PUBLISHED
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.declare.published_folder import understood
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.declare.sections import EXPORT
from meshloom.compiler.plan import Plan
from meshloom.compiler.sharding.arrays import build_model
from meshloom.models.adapter import is_adapter
from meshloom.models.published.peft import check_modules, write_peft

from .match import FROM

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


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


def write_adapter(folder: Path, plan: Plan[RunSpec], params: Any, base: str | None) -> int:
    """Writes the adapter among these parameters. Returns the bytes of its tensors. base: the place of its base."""
    needed = {
        path: np.asarray(jax.device_get(x))
        for path, x in leaves_by_path(params).items()
        if is_adapter(path) or (path in plan.model.adapters and plan.model.adapters[path].config.has_magnitude)
    }
    name = base and base.removeprefix(PUBLISHED)
    tensors, config = write_peft(plan.spec.model, plan.model, needed, base=name)
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
