"""A folder of PEFT is an adapter and the name of its base: adapter_config.json, adapter_model.safetensors.

Where the declaration has the same adapter, it goes on: its parameters are read. Where it has none, the adapter is
merged into the base while that is read, one matrix at a time: for full training, `evaluate`, `generate` and `export`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import human_names
from meshloom.compiler.declare.published_folder import ADAPTER_CONFIG, PublishedFolder, understood
from meshloom.models.config import ModelConfig
from meshloom.models.contract import Model
from meshloom.models.published import NamedTensors, tensors, tensors_in
from meshloom.models.published.peft import PREFIX
from meshloom.models.published.peft_read import PeftModule, is_of_lora, merge, read_modules, to_ours

from .folder import FLOATS, FileTensor, WeightsFolder, are_same

T = TypeVar("T")
HEAD, TABLE = "lm_head", "embed/table_VE"


@dataclass(frozen=True)
class MergedTensor(FileTensor):
    """A matrix of a base with an adapter's product added when it is read, in float32."""

    add: Callable[[np.ndarray], np.ndarray] = field(compare=False)
    of_file: FileTensor

    def values(self) -> np.ndarray:
        """Returns the merged matrix."""
        return self.add(self.of_file.values())


@dataclass(frozen=True)
class MergedFolder(WeightsFolder):
    """A published folder with other tensors in the places of some."""

    merged: Mapping[str, FileTensor] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> Mapping[str, FileTensor]:
        """Returns the tensors by name."""
        return self.merged


@dataclass(frozen=True)
class GrownTensor(FileTensor):
    """A table of tokens with rows for more of them: the mean of those that are there, in float32."""

    of_file: FileTensor

    def values(self) -> np.ndarray:
        """Returns the table with its new rows."""
        there = self.of_file.values().astype(np.float32)
        rows = np.broadcast_to(there.mean(axis=0), (self.shape[0] - len(there), *there.shape[1:]))
        return np.concatenate([there, rows])


def grown_folder(folder: WeightsFolder, named: NamedTensors) -> tuple[WeightsFolder, tuple[str, ...]]:
    """Returns a folder with rows in its tables for tokens of a model that has more of them, and a line that says so."""
    found, added = dict(folder.tensors), 0
    for tensor in named.tensors:
        there = found.get(tensor.name)
        is_table = {slot.path for slot in tensor.slots} <= {TABLE, "head/kernel_EV"}
        if is_table and there and there.shape[1:] == tensor.shape[1:] and there.shape[0] < tensor.shape[0]:
            size = (there.file, "F32", tensor.shape, there.start, there.num_bytes)
            found[tensor.name] = GrownTensor(*size, of_file=there)
            added = tensor.shape[0] - there.shape[0]
    if not added:
        return folder, ()
    line = f"{added:,} rows are added to the tables for tokens that they do not have: each is the mean of the others"
    return MergedFolder(folder.path, folder.declared_base, folder.adapter, MappingProxyType(found)), (line,)


def adapter_arrays(folder: WeightsFolder, config: ModelConfig, model: Model) -> dict[str, np.ndarray]:
    """Returns the parameters of a model's adapters that a folder of PEFT holds, by path. Raises ConfigError if the
    declared adapter is another one, or more than it was trained."""
    there = _names(folder, config)
    trained = [
        name
        for name, tensor in _trained(folder, there).items()
        if not ((base := _in_base(folder.tensors, name, there)) and are_same(tensor, base))
    ]
    if trained:
        what = f"holds tensors of the base that were trained, too: {human_names(trained, 3)}"
        fix = "declare no adapter: it is merged into its base with them"
        raise ConfigError([Problem(str(folder.adapter), what, fix)])

    def read_base(module: str) -> np.ndarray:
        return folder.tensors[there[module]].values()

    modules, said = _modules(folder), _said(folder)
    return _understood(
        folder,
        lambda: to_ours(
            config, model, said, modules, lambda name: _values(folder, name), read_base, folder.model_type
        ),
    )  # fmt: skip


def merged_folder(folder: WeightsFolder, config: ModelConfig) -> WeightsFolder:
    """Returns the base of a folder of PEFT with the tensors of it that were trained in their places, and the adapter
    merged into its matrices, which are read as they are asked for. Raises ConfigError for modules that the base does
    not have."""
    there = _names(folder, config)
    found = dict(folder.tensors) | _trained(folder, there)
    unknown = list[str]()
    for module in _modules(folder):
        name = there.get(module.name, f"{module.name}.weight")
        base = _in_base(found, name, there)
        (rank, num_in), (num_out, _) = (folder.adapter_tensors[name].shape for name in (module.a, module.b))
        is_transposed = module.is_table or (folder.model_type == "gpt2" and module.name != HEAD)
        expected = (num_in, num_out) if is_transposed else (num_out, num_in)
        if base is None or base.shape != expected or base.dtype not in FLOATS or not rank:
            unknown.append(f"{module.name} ({num_in} -> {num_out})")
        else:
            found[name] = _merged(folder, base, module, is_transposed=is_transposed)
    if unknown:
        what = f"holds adapters of matrices that the base {folder.path} does not have: {', '.join(unknown[:3])}"
        what += f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ConfigError([Problem(str(folder.adapter), what, "name its base: checkpoint.base_from=hf:DIR")])
    return MergedFolder(folder.path, folder.declared_base, folder.adapter, MappingProxyType(found))


def _names(folder: WeightsFolder, config: ModelConfig) -> dict[str, str]:
    """Returns the names of the base's tensors in its files by those of their modules, and of the table by TABLE."""
    named = understood(lambda: tensors_in(config, folder.tensors, folder.model_type), "model")
    plain = understood(lambda: tensors(config, folder.model_type), "model")
    found = {x.name.removesuffix(".weight"): y.name for x, y in zip(plain, named.tensors, strict=True)}
    return found | {y.slots[0].path: y.name for y in named.tensors if y.slots[0].path == TABLE}


def _in_base(tensors: Mapping[str, FileTensor], name: str, there: Mapping[str, str]) -> FileTensor | None:
    """Returns a tensor of a base; for a head that is tied to the table of tokens, the table."""
    return tensors.get(name) or (tensors.get(there[TABLE]) if name == f"{HEAD}.weight" else None)


def _merged(folder: WeightsFolder, base: FileTensor, module: PeftModule, *, is_transposed: bool) -> MergedTensor:
    def add(weight: np.ndarray) -> np.ndarray:
        a, b = (_values(folder, name) for name in (module.a, module.b))
        lengths = None if module.magnitude is None else _values(folder, module.magnitude)
        return merge(weight, a, b, module.scale, lengths, is_transposed=is_transposed)

    return MergedTensor(base.file, "F32", base.shape, base.start, base.num_bytes, add, base)


def _said(folder: WeightsFolder) -> Mapping[str, Any]:
    assert folder.adapter is not None
    return PublishedFolder(folder.adapter).adapter_config


def _modules(folder: WeightsFolder) -> tuple[PeftModule, ...]:
    shapes = {name: tensor.shape for name, tensor in folder.adapter_tensors.items() if is_of_lora(name)}
    return _understood(folder, lambda: read_modules(_said(folder), shapes))


def _trained(folder: WeightsFolder, there: Mapping[str, str]) -> dict[str, FileTensor]:
    """Returns the tensors that a folder of PEFT has in whole, of modules_to_save, biases and tables, by their names in
    the base. there: the names of the base's tensors by those of their modules."""
    found = dict[str, FileTensor]()
    for name, tensor in folder.adapter_tensors.items():
        if not is_of_lora(name):
            plain = name.removeprefix(PREFIX).replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")
            found[there.get(plain.removesuffix(".weight"), plain)] = tensor
    for module in _said(folder).get("modules_to_save") or ():
        if not any(f".{name}".rpartition(".")[0].endswith(f".{module}") for name in found):
            what = f"names '{module}', and the folder does not hold it"
            where = f"{folder.adapter}/{ADAPTER_CONFIG}: modules_to_save"
            raise ConfigError([Problem(where, what, "copy the folder again, or save it again with PEFT")])
    return found


def _values(folder: WeightsFolder, name: str) -> np.ndarray:
    return folder.adapter_tensors[name].values()


def _understood(folder: WeightsFolder, read: Callable[[], T]) -> T:
    return understood(read, str(Path(folder.adapter or "") / ADAPTER_CONFIG))


def describe_adapter(arrays: Mapping[str, Any]) -> str:
    """Returns the number of an adapter's parameters, in words."""
    return f" and an adapter of {sum(x.size for x in arrays.values()):,} parameters" if arrays else ""
