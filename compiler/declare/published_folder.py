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
from ..core.user_code import import_registering
from .gguf_file import ACCESS, SUFFIX, GgufHeader, gguf_values, is_gguf, read_gguf

T = TypeVar("T")

CONFIG = "config.json"
FAMILY_MODULES = "meshloom.families"  # the entry points of packages with families of published models
ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"  # of an adapter, as PEFT writes it
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
OF_WEIGHTS = (CONFIG, "export.json", ADAPTER_CONFIG, "training_args.bin", "trainer_state.json")
WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".npz", ".tflite", ".ot", ".index.json",
           ".unfinished", ".tmp")  # fmt: skip
FOLDERS = ("additional_chat_templates",)


@dataclass(frozen=True)
class PublishedFolder:
    """The folder of a published model, or of an adapter that PEFT wrote, or a GGUF file. Reading a missing or damaged
    file raises ConfigError. declared_base: of an adapter; None: as its adapter_config.json says."""

    path: Path
    declared_base: Path | None = None

    @property
    def holds_weights(self) -> bool:
        """Returns True for a folder with a config.json and safetensors files, or an adapter."""
        return (
            self.gguf is not None
            or self.is_adapter
            or ((self.path / CONFIG).is_file() and any(self.path.glob("*.safetensors*")))
        )

    @property
    def is_adapter(self) -> bool:
        """Returns True for an adapter that PEFT wrote."""
        return (self.path / ADAPTER_CONFIG).is_file() and not any(self.path.glob("model*.safetensors"))

    @cached_property
    def adapter_config(self) -> Mapping[str, Any]:
        """Returns the content of adapter_config.json."""
        return _json_of(self.path / ADAPTER_CONFIG)

    @cached_property
    def base(self) -> "PublishedFolder":
        """Returns the folder of the model that an adapter changes."""
        named = self.declared_base or self.adapter_config.get("base_model_name_or_path")
        places = [Path(named).expanduser(), self.path / named] if isinstance(named, str | Path) and str(named) else []
        found = next((place for place in places if (place / CONFIG).is_file()), None)
        if found is None or PublishedFolder(found).is_adapter:
            what = f"names {repr(str(named)) if named else 'nothing'} as its base, where there is no folder of a model"
            fix = "download the base, and name it: checkpoint.base_from=hf:DIR"
            raise ConfigError([Problem(str(self.path / ADAPTER_CONFIG), what, fix)])
        return PublishedFolder(found)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Returns the content of config.json; of an adapter, that of its base."""
        if self.gguf is not None:
            return self._config_of_gguf()
        return self.base.config if self.is_adapter else _json_of(self.path / CONFIG)

    @property
    def gguf(self) -> Path | None:
        """Returns the GGUF file that this is: the path, or the only one of a folder without other weights."""
        if is_gguf(self.path):
            return self.path if self.path.is_file() else None
        if (self.path / CONFIG).is_file() or not self.path.is_dir() or self.is_adapter:
            return None
        files = sorted(self.path.glob(f"*{SUFFIX}"))
        return files[0] if len(files) == 1 else None

    @cached_property
    def gguf_header(self) -> GgufHeader:
        """Returns the header of the GGUF file."""
        assert self.gguf is not None
        return read_gguf(self.gguf)

    def _config_of_gguf(self) -> Mapping[str, Any]:
        from meshloom.models.published.gguf import FREQUENCIES, config_of_gguf

        file, header = self.gguf, self.gguf_header
        assert file is not None
        shapes = {name: tensor.shape for name, tensor in header.tensors.items()}

        def factors() -> Any:
            return gguf_values(file, header.tensors[FREQUENCIES])

        return understood(lambda: config_of_gguf(header.said, shapes, factors), str(file))

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

        return understood(lambda: read_config(self.config), str(self.gguf or self.path / CONFIG))

    @property
    def model_type(self) -> str | None:
        """Returns the model_type of its family; None if config.json names none that is known."""
        from meshloom.models.published import model_type_of

        said = self.known_config
        return model_type_of(said) or (model_type_of(said) if said and import_registering(FAMILY_MODULES) else None)

    @property
    def dtype(self) -> str | None:
        """Returns the type of the weights, as config.json names it; None if it does not say."""
        return self.known_config.get("dtype") or self.known_config.get("torch_dtype")

    @property
    def others(self) -> tuple[Path, ...]:
        """Returns what else was published with the weights: the tokenizer, its templates, settings for generating text,
        code, a README and a license; no weights in any form, and no hidden files."""
        if self.gguf is not None:
            return self.tokenizer
        if not self.path.is_dir():
            return ()
        if self.is_adapter:  # the README is the adapter's, and the tokenizer may be
            own = {file.name: file for file in self.tokenizer}
            return tuple(({file.name: file for file in self.base.others} | own).values())
        found = [each for each in sorted(self.path.iterdir()) if not each.name.startswith(".")]
        return tuple(
            each for each in found
            if each.name in FOLDERS or (each.is_file() and each.name not in OF_WEIGHTS and not _holds_weights(each))
        )  # fmt: skip

    @property
    def folders_left(self) -> tuple[str, ...]:
        """Returns the names of the folders in it that are no part of what was published, as far as is known."""
        there = self.path.iterdir() if self.path.is_dir() else ()
        return tuple(sorted(each.name for each in there if each.is_dir() and not each.name.startswith(".")
                            and each.name not in FOLDERS))  # fmt: skip

    @property
    def tokenizer(self) -> tuple[Path, ...]:
        """Returns the files of the tokenizer and of the settings for generating text."""
        folder = self.path.parent if is_gguf(self.path) else self.path
        found = tuple(folder / name for name in TOKENIZER_FILES if (folder / name).is_file())
        return self.base.tokenizer if not found and self.is_adapter else found


def understood(read: Callable[[], T], where: str) -> T:
    """Returns what a function of published models returns; its mistakes are raised as a ConfigError. A family that is
    not ours is looked for in other packages."""
    from meshloom.models.published import NotUnderstood, UnknownFamily

    try:
        try:
            return read()
        except UnknownFamily:
            if not import_registering(FAMILY_MODULES):
                raise
        return read()
    except NotUnderstood as error:
        raise ConfigError(
            Problem(where if m.key == where else f"{where}: {m.key}", m.what, m.fix) for m in error.mistakes
        ) from None


def _json_of(file: Path) -> Mapping[str, Any]:
    """Returns the object that a file of JSON holds."""
    try:
        said = json.loads(file.read_bytes(), parse_constant=_refuse_constant)
    except OSError as error:
        raise ConfigError([Problem(str(file), f"cannot be read: {error.strerror or error}", ACCESS)]) from error
    except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
        what = f"is not valid JSON: {error}"
        raise ConfigError([Problem(str(file), what, "download it again, or correct it")]) from error
    if not isinstance(said, dict):
        what, fix = "is not a JSON object", "take the file that was published with the weights"
        raise ConfigError([Problem(str(file), what, fix)])
    return said


def _holds_weights(file: Path) -> bool:
    return file.name.endswith(WEIGHTS) or ".safetensors" in file.name


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
