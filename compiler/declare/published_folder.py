"""Opens the folder of a published model, as `transformers` writes it: config.json, and the files of a tokenizer.

    PublishedFolder(path).config       what config.json says
    PublishedFolder(path).model        the keys of conf/model for it
    PublishedFolder(path).tokenizer    the files of its tokenizer

Its tensors are opened by `runtime/weights/folder.py`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..core.errors import ConfigError, Problem

T = TypeVar("T")

CONFIG = "config.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
OF_WEIGHTS = (CONFIG, "export.json", "adapter_config.json", "training_args.bin", "trainer_state.json")
WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".npz", ".tflite", ".ot", ".index.json",
           ".unfinished", ".tmp")  # fmt: skip
FOLDERS = ("additional_chat_templates",)


@dataclass(frozen=True)
class PublishedFolder:
    """The folder of a published model. Reading a missing or damaged file raises ConfigError."""

    path: Path

    @property
    def holds_weights(self) -> bool:
        """Returns True for a folder with a config.json and safetensors files."""
        return (self.path / CONFIG).is_file() and any(self.path.glob("*.safetensors*"))

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Returns the content of config.json."""
        file = self.path / CONFIG
        try:
            said = json.loads(file.read_bytes(), parse_constant=_refuse_constant)
        except OSError as error:
            fix = "copy or download it again, or give this process access to it"
            raise ConfigError([Problem(str(file), f"cannot be read: {error.strerror or error}", fix)]) from error
        except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
            what = f"is not valid JSON: {error}"
            raise ConfigError([Problem(str(file), what, "download it again, or correct it")]) from error
        if not isinstance(said, dict):
            what, fix = "is not a JSON object", "take the config.json that was published with the weights"
            raise ConfigError([Problem(str(file), what, fix)])
        return said

    @cached_property
    def known_config(self) -> Mapping[str, Any]:
        """Returns the content of config.json; {} if it cannot be read, as of a folder that has gone."""
        try:
            return self.config
        except ConfigError:
            return {}

    @cached_property
    def model(self) -> Mapping[str, Any]:
        """Returns the keys of conf/model that config.json says. Raises ConfigError with all that is wrong."""
        from meshloom.models.published import read_config

        return understood(lambda: read_config(self.config), str(self.path / CONFIG))

    @property
    def model_type(self) -> str | None:
        """Returns the model_type of its family; None if config.json names none that is known."""
        from meshloom.models.published import model_type_of

        return model_type_of(self.known_config)

    @property
    def dtype(self) -> str | None:
        """Returns the type of the weights, as config.json names it; None if it does not say."""
        return self.known_config.get("dtype") or self.known_config.get("torch_dtype")

    @property
    def others(self) -> tuple[Path, ...]:
        """Returns what else was published with the weights: the tokenizer, its templates, settings for generating text,
        code, a README and a license; no weights in any form, and no hidden files."""
        if not self.path.is_dir():
            return ()
        found = [each for each in sorted(self.path.iterdir()) if not each.name.startswith(".")]
        return tuple(
            each for each in found
            if each.name in FOLDERS or (each.is_file() and each.name not in OF_WEIGHTS and not _holds_weights(each))
        )  # fmt: skip

    @property
    def tokenizer(self) -> tuple[Path, ...]:
        """Returns the files of the tokenizer and of the settings for generating text."""
        return tuple(self.path / name for name in TOKENIZER_FILES if (self.path / name).is_file())


def understood(read: Callable[[], T], where: str) -> T:
    """Returns what a function of published models returns; its mistakes are raised as a ConfigError."""
    from meshloom.models.published import NotUnderstood

    try:
        return read()
    except NotUnderstood as error:
        raise ConfigError(
            Problem(where if m.key == where else f"{where}: {m.key}", m.what, m.fix) for m in error.mistakes
        ) from None


def _holds_weights(file: Path) -> bool:
    return file.name.endswith(WEIGHTS) or ".safetensors" in file.name


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
