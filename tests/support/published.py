"""Folders of published weights with random tensors, written by the safetensors library."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from meshloom.models.config import ModelConfig
from meshloom.models.published import tensors, write_config
from meshloom.runtime.weights.folder import INDEX, SINGLE

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def write_published(
    folder: Path, config: ModelConfig, *, dtype: str = "bfloat16", num_files: int = 1, scale: float = 0.2
) -> dict[str, np.ndarray]:
    """Writes a folder for a model. Returns its tensors."""
    rng = np.random.default_rng(0)
    values = {
        tensor.name: (scale * rng.standard_normal(tensor.shape) + (len(tensor.shape) == 1)).astype(DTYPES[dtype])
        for tensor in tensors(config)
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = write_config(config, dtype=dtype, max_length=64)
    (folder / "config.json").write_text(json.dumps(written | {"bos_token_id": 1, "eos_token_id": 2}))
    names = sorted(values)
    parts = [names[n::num_files] for n in range(num_files)]
    files = (
        [SINGLE] if num_files == 1 else [f"model-{n + 1:05}-of-{num_files:05}.safetensors" for n in range(num_files)]
    )
    for file, part in zip(files, parts, strict=True):
        save_file({name: values[name] for name in part}, folder / file, {"format": "pt"})
    if num_files > 1:
        listed = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return values
