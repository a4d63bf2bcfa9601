"""Settings of `meshloom export`: the form and the place of the weights that it writes."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Literal

from meshloom.models.config import Config

from ..core.config_types import LocalPath, NumBytes
from ..core.float_types import ExportType


class ExportSpec(Config):
    """Settings of `meshloom export`."""

    format: Literal["huggingface", "safetensors", "orbax", "peft"]  # safetensors, orbax: under our own names;
    # peft: the adapter alone
    directory: LocalPath | None  # a new folder
    dtype: ExportType | None  # None: as where the run began; without that, bfloat16
    max_shard_bytes: NumBytes  # of the tensors in a file


EXPORT = "export"


def in_export(words: Sequence[str]) -> list[str]:
    """Returns the words of a command line with the keys of this section, which it takes without the section's name."""
    return [f"{EXPORT}.{word}" if _is_own(word) else word for word in words]


def _is_own(word: str) -> bool:
    key, equals, _ = word.partition("=")
    return bool(equals and get_close_matches(key, list(ExportSpec.model_fields), cutoff=0.75))
