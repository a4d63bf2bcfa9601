"""Adapters as PEFT writes them, both ways: tensors by name, and adapter_config.json. Pure: it opens no file.

    base_model.model.MODULE.lora_A.weight (rank, in)    .lora_B.weight (out, rank)    .lora_magnitude_vector (out,)

How a module's inputs and outputs are ordered is read off the table of its family: a matrix whose entries are their own
numbers is brought into the layout of the file. Where a file joins matrices, as GPT-2's c_attn, each has a part of a
larger rank: A is stacked, and B has a block for each.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..adapter import LORA_A, LORA_B, MAGNITUDE, Adapter, adapter_path
from ..config import AdapterConfig, ModelConfig
from ..contract import Model
from .contract import Mistake, NotUnderstood, PublishedTensor
from .registry import tensors

PREFIX, SUFFIX = "base_model.model.", ".weight"
_NAMES = {LORA_A: "lora_A.weight", LORA_B: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
Arrays = Mapping[str, np.ndarray]  # by path among our parameters, with the layers of a stack along a first dimension


@dataclass(frozen=True)
class AdaptedModule:
    """A module of the file whose matrix, or parts of it, have adapters. inputs: our input of each of the file's.
    parts: of each slot, its adapter and the outputs of the module that are its own, in our order; None: no adapter."""

    tensor: PublishedTensor
    is_transposed: bool
    inputs: np.ndarray
    parts: tuple[tuple[Adapter | None, np.ndarray], ...]

    @property
    def name(self) -> str:
        return self.tensor.name.removesuffix(SUFFIX)

    @property
    def num_outputs(self) -> int:
        return sum(len(own) for _, own in self.parts)

    @property
    def adapted(self) -> list[tuple[int, Adapter, np.ndarray]]:
        return [(place, one, own) for place, (one, own) in enumerate(self.parts) if one is not None]


def write_peft(
    config: ModelConfig, model: Model, params: Arrays, *, base: str | None, model_type: str | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns the tensors of a PEFT folder by name, in float32, and its adapter_config.json.

    model: the adapted one. params: its adapters' parameters, and for DoRA the matrices beside them. base: the name or
    folder of the base. model_type: of its family. Raises NotUnderstood for adapters that PEFT has no module for, as
    those of experts.
    """
    modules, adapter = modules_of(config, model, model_type), next(iter(model.adapters.values())).config
    found: dict[str, np.ndarray] = {}
    for module in modules:
        for name, array in _tensors_of(module, params).items():
            found[f"{PREFIX}{module.name}.{_NAMES[name]}"] = np.ascontiguousarray(array, np.float32)
    every = {t.name.removesuffix(SUFFIX) for t in tensors(config, model_type) if len(t.shape) == 2}
    return found, _adapter_config(every, modules, adapter, base)


def check_modules(config: ModelConfig, model: Model) -> None:
    """Raises NotUnderstood for adapters that PEFT has no module for."""
    modules_of(config, model, None)


def modules_of(config: ModelConfig, model: Model, model_type: str | None) -> list[AdaptedModule]:
    """Returns the modules of files whose matrices have adapters. Raises NotUnderstood where PEFT has none."""
    experts = sorted(path for path, one in model.adapters.items() if one.matrix.is_of_experts)
    if experts:
        fix = "export the weights with the adapter merged into them"
        raise NotUnderstood([Mistake("adapter.targets", f"PEFT has no module for one expert of {experts[0]}", fix)])
    found = [
        _module(t, model) for t in tensors(config, model_type) if any(slot.path in model.adapters for slot in t.slots)
    ]
    left = model.adapters.keys() - {slot.path for module in found for slot in module.tensor.slots}
    if left:
        what = f"no published tensor holds {min(left)}"
        raise NotUnderstood([Mistake("adapter.targets", what, "leave it out of the targets")])
    return found


def _module(tensor: PublishedTensor, model: Model) -> AdaptedModule:
    adapters = [model.adapters.get(slot.path) for slot in tensor.slots]
    shapes = {piece.name: piece for piece in model.stacks}
    sizes = []
    for slot in tensor.slots:
        piece, _, within = slot.path.partition("/")
        node: Any = shapes[piece].layer.abstract if piece in shapes else getattr(model, piece).abstract
        for key in within.split("/"):
            node = node[key]
        sizes.append((node.shape, model.adapters.get(slot.path) or next(one for one in adapters if one)))
    matrices = tuple((shape, len(one.matrix.contracted)) for shape, one in sizes)
    is_transposed, inputs, own = _order(tensor.to_published, tensor.shape, matrices)
    return AdaptedModule(tensor, is_transposed, inputs, tuple(zip(adapters, own, strict=True)))


@cache
def _order(
    to_published: Any, shape: tuple[int, ...], matrices: tuple[tuple[tuple[int, ...], int], ...]
) -> tuple[bool, np.ndarray, tuple[np.ndarray, ...]]:
    """Returns whether the file has (in, out), our input of each of its inputs, and of each matrix the place in the file
    of each of its outputs."""
    num_in = int(np.prod(matrices[0][0][: matrices[0][1]]))
    widths = [int(np.prod(ours[num:])) for ours, num in matrices]
    total, first, numbered = sum(widths), 0, []
    for (ours, _), width in zip(matrices, widths, strict=True):
        outputs = np.arange(first, first + width)
        numbered.append((np.arange(num_in)[:, None] * total + outputs).reshape(ours))
        first += width
    laid_out = np.asarray(to_published(tuple(numbered)))
    is_transposed = laid_out.shape[0] == num_in and (laid_out[:, 0] % total == laid_out[0, 0] % total).all()
    by_output = laid_out.T if is_transposed else laid_out
    inputs, outputs = by_output[0] // total, by_output[:, 0] % total
    if by_output.shape != (total, num_in) or (by_output != inputs * total + outputs[:, None]).any():
        raise ValueError(f"a tensor of shape {shape} mixes inputs and outputs, and no adapter of low rank fits it")
    places = np.argsort(outputs)
    ends = np.cumsum(widths)
    return bool(is_transposed), inputs, tuple(np.split(places, ends[:-1]))


def _tensors_of(module: AdaptedModule, params: Arrays) -> dict[str, np.ndarray]:
    rows, rank = [], sum(one.config.rank for _, one, _ in module.adapted)
    b = np.zeros((module.num_outputs, rank), np.float32)
    lengths = None
    for number, (place, one, own) in enumerate(module.adapted):
        slot, r = module.tensor.slots[place], one.config.rank
        parts = {
            name: np.asarray(params[f"{adapter_path(slot.path)}/{name}"][slot.index], np.float32)
            for name in one.letters
        }
        rows.append(parts[LORA_A].reshape(-1, r)[module.inputs].T)
        b[own, number * r : (number + 1) * r] = parts[LORA_B].reshape(r, -1).T
        if MAGNITUDE in parts:
            lengths = np.ones(module.num_outputs, np.float32) if lengths is None else lengths
            weight = np.asarray(params[slot.path][slot.index], np.float32)
            of_base = np.sqrt(np.square(weight.reshape(len(module.inputs), -1)).sum(axis=0))
            lengths[own] = of_base + parts[MAGNITUDE].reshape(-1)
    if lengths is not None and len(module.adapted) < len(module.parts):
        what = f"DoRA scales all of {module.name}, and a part of it has no adapter"
        raise NotUnderstood([Mistake("adapter.targets", what, "name all matrices that the file joins")])
    return {LORA_A: np.concatenate(rows), LORA_B: b} | ({} if lengths is None else {MAGNITUDE: lengths})


def _adapter_config(
    every: Collection[str], modules: Iterable[AdaptedModule], adapter: AdapterConfig, base: str | None
) -> dict[str, Any]:
    modules = list(modules)
    joined = {module.name: len(module.adapted) for module in modules if len(module.adapted) > 1}
    grow = (lambda n: n**0.5) if adapter.kind == "rslora" else (lambda n: n)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": _target_modules(every, modules),
        "rank_pattern": {name: adapter.rank * n for name, n in joined.items()},
        "alpha_pattern": {name: adapter.alpha * grow(n) for name, n in joined.items()},
        "bias": "none",
        "use_rslora": adapter.kind == "rslora",
        "use_dora": adapter.kind == "dora",
        "fan_in_fan_out": any(module.is_transposed for module in modules),
        "inference_mode": True,
    }


def _target_modules(every: Collection[str], modules: Iterable[AdaptedModule]) -> list[str]:
    """Returns the last parts of the modules' names; whole names where others with the same last part are left out.
    every: the names of all modules with a matrix."""
    adapted = {module.name for module in modules}
    names = set(every)
    short = {name.rpartition(".")[2] for name in adapted}
    others = {name.rpartition(".")[2] for name in names - adapted}
    return sorted(short) if not short & others else sorted(adapted)
