"""Writes an adapter as the folder that PEFT, vLLM and transformers load: two files, the tensors and their config."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshloom.compiler.core.errors import ConfigError, Problem

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def write_peft_folder(folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> None:
    """Writes a PEFT folder, under another name until it is whole. Raises ConfigError if the folder is there."""
    if folder.exists():
        raise ConfigError([Problem(str(folder), "is there already", "name a new folder")])
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
