"""Reads adapters as PEFT writes them: adapter_config.json, and pairs of thin matrices by the names of their modules.

    base_model.model.MODULE.lora_A.weight (rank, in)    .lora_B.weight (out, rank)    .lora_magnitude_vector (out,)
    base_model.model.TABLE.lora_embedding_A (rank, tokens)    .lora_embedding_B (out, rank)

Pure: it opens no file. `read_modules` says which modules have an adapter and by what it is multiplied; `to_ours` brings
them into the parameters of our adapters; `merge` adds one to its matrix. What else PEFT can do is refused by name.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..adapter import LORA_A, LORA_B, MAGNITUDE, adapter_path
from ..config import ModelConfig
from ..contract import Model
from .contract import Mistake, NotUnderstood, Values
from .peft import PREFIX, SUFFIX, modules_of
from .registry import tensors

OF_LORA = re.compile(
    rf"{re.escape(PREFIX)}(.+)\.lora_(?:(embedding_)?([AB])|(magnitude_vector))(?:\.default)?(?:\.weight)?"
)
# Keys of adapter_config.json that say nothing which the tensors do not say, or concern training by PEFT alone.
READ = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core",
    "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "target_modules", "task_type",
    "use_dora", "use_rslora", "bias", "ensure_weight_tying", "modules_to_save",
))  # fmt: skip
MAGNITUDES = "magnitude_vector"
MERGE = "merge it with its base by PEFT: model.merge_and_unload().save_pretrained(DIR)"
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # these leave other weights in the base


@dataclass(frozen=True)
class PeftModule:
    """The adapter of one module. name: of the module. a, b: its tensors' names. scale: of the product B A. magnitude:
    of DoRA, the name of its lengths. is_table: the module is an embedding, whose table has the inputs as rows."""

    name: str
    a: str
    b: str
    rank: int
    scale: float
    magnitude: str | None = None
    is_table: bool = False


def is_of_lora(name: str) -> bool:
    """Returns True for a tensor of a PEFT folder that is of an adapter, and no tensor of the base that was trained."""
    return ".lora_" in name or ".token_adapter." in name


def read_modules(said: Values, shapes: Mapping[str, tuple[int, ...]]) -> tuple[PeftModule, ...]:
    """Returns the modules of a PEFT folder. said: its adapter_config.json. shapes: of the tensors of its adapters, by
    name. Raises NotUnderstood with everything that is not read here."""
    mistakes, parts = list(_mistakes(said)), dict[str, dict[str, str]]()
    tables = set[str]()
    for name in shapes:
        if found := OF_LORA.fullmatch(name):
            parts.setdefault(found[1], {})[found[3] or found[4]] = name
            tables |= {found[1]} if found[2] else set()
        else:
            mistakes.append(Mistake(name, "is no matrix of LoRA: it is not read", MERGE))
    modules = []
    for name, part in sorted(parts.items()):
        of_a, of_b = (shapes.get(part.get(side, ""), ()) for side in "AB")
        lengths = part.get(MAGNITUDES)
        if len(of_a) != 2 or len(of_b) != 2 or of_a[0] != of_b[1]:
            mistakes.append(Mistake(name, f"has A {list(of_a)} and B {list(of_b)}, which do not fit", "copy it again"))
        elif bool(lengths) != bool(said.get("use_dora")) or (lengths and shapes[lengths] != of_b[:1]):
            what = f"has lengths of DoRA, {list(shapes[lengths])}" if lengths else "has no lengths of DoRA"
            mistakes.append(Mistake(name, f"{what}, and use_dora is {said.get('use_dora')}", "copy it again"))
        elif not mistakes:
            scale = _scale(said, name, of_a[0])
            modules.append(PeftModule(name, part["A"], part["B"], of_a[0], scale, lengths, name in tables))
    if not parts and not mistakes:
        mistakes.append(Mistake("lora_A", "no tensor has this in its name", "name a folder as PEFT writes it"))
    if mistakes:
        raise NotUnderstood(mistakes)
    return tuple(modules)


def _mistakes(said: Values) -> Iterator[Mistake]:
    if said.get("peft_type", "LORA") != "LORA":
        yield Mistake("peft_type", f"is {said.get('peft_type')}, and LORA is read", MERGE)
    for key in sorted(said.keys() - READ):
        if said[key]:
            yield Mistake(key, f"is {said[key]}: this is not read", MERGE)
    if str(said.get("init_lora_weights")).startswith(CHANGES_BASE):
        what = f"is '{said['init_lora_weights']}', by which the base has other weights than its folder"
        yield Mistake("init_lora_weights", what, "convert it to LoRA: path_initial_model_for_weight_conversion in PEFT")
    if not _is_positive(said.get("lora_alpha")):
        yield Mistake("lora_alpha", f"is {said.get('lora_alpha')}, not a positive number", "copy the folder again")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _scale(said: Values, module: str, rank: int) -> float:
    alpha, patterns = said["lora_alpha"], said.get("alpha_pattern")
    for pattern, own in (patterns if isinstance(patterns, dict) else {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module) and _is_positive(own):
            alpha = own
            break
    return alpha / (math.sqrt(rank) if said.get("use_rslora") else rank)


def words_of(config: ModelConfig, said: Values, modules: tuple[PeftModule, ...], model_type: str | None) -> list[str]:
    """Returns the overrides that declare the adapter of a PEFT folder."""
    named = {module.name for module in modules}
    paths = {slot.path for t in tensors(config, model_type) if t.name.removesuffix(SUFFIX) in named for slot in t.slots}
    kind = "dora" if said.get("use_dora") else "rslora" if said.get("use_rslora") else "lora"
    targets = f"adapter.targets=[{','.join(sorted(paths))}]"
    return [f"adapter={kind}", f"adapter.rank={_rank(said, modules)}", f"adapter.alpha={said['lora_alpha']}", targets]


def _rank(said: Values, modules: tuple[PeftModule, ...]) -> int:
    rank = said.get("r")
    return rank if isinstance(rank, int) and rank > 0 else modules[0].rank


def to_ours(
    config: ModelConfig, model: Model, said: Values, modules: tuple[PeftModule, ...],
    read: Callable[[str], np.ndarray], read_base: Callable[[str], np.ndarray], model_type: str | None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Returns the parameters of a model's adapters, by path, that compute what a PEFT folder does. read: returns one of
    its tensors. read_base: the matrix of a module of the base. Raises NotUnderstood if the declared adapter is not the
    folder's, with the words that declare it."""
    for module in modules:
        if module.is_table:
            what = "is an adapter of an embedding, which is only read to be merged"
            raise NotUnderstood([Mistake(module.name, what, "declare no adapter: it is merged into its base")])
    if said.get("use_dora") and said.get("use_rslora"):
        what = "is true with use_dora: no adapter here has both"
        raise NotUnderstood([Mistake("use_rslora", what, "declare no adapter: it is merged into its base")])
    by_name, found = {module.name: module for module in modules}, dict[str, np.ndarray]()
    adapter = next(iter(model.adapters.values())).config
    ours = modules_of(config, model, model_type)
    words = words_of(config, said, modules, model_type)
    declared = [f"adapter={adapter.kind}", f"adapter.rank={adapter.rank}", f"adapter.alpha={adapter.alpha}"]
    same = float(said["lora_alpha"]) == float(adapter.alpha) and declared[:2] == words[:2]
    if not same or {module.name for module in ours} != by_name.keys():
        what = f"the adapter there is not the declared one, {' '.join(declared)}"
        fix = f"declare it: {' '.join(words)}; or declare none, and it is merged into its base"
        raise NotUnderstood([Mistake("adapter", what, fix)])
    shapes = {path: tuple(x.shape) for path, x in _adapters_of(model)}
    for module in ours:
        theirs = by_name[module.name]
        a, b = (read(name).astype(np.float32) for name in (theirs.a, theirs.b))
        if a.shape[1] != len(module.inputs) or b.shape[0] != module.num_outputs:
            what = (
                f"is {list(a.shape)}, {list(b.shape)}, and the model has {len(module.inputs)} -> {module.num_outputs}"
            )
            raise NotUnderstood([Mistake(module.name, what, "name the base that it was trained on")])
        covered = np.concatenate([own for _, _, own in module.adapted])
        if np.delete(b, covered, axis=0).any():
            what = "has outputs of matrices that have no adapter here"
            raise NotUnderstood([Mistake(module.name, what, f"declare it: {words[-1]}")])
        for number, (place, one, own) in enumerate(module.adapted):
            slot, rank = module.tensor.slots[place], one.config.rank
            part = slice(number * rank, (number + 1) * rank) if theirs.rank != rank else slice(None)
            rest = np.delete(b[own], np.arange(theirs.rank)[part], axis=1)
            if a[part].shape[0] != rank or rest.any():
                what = f"has rank {theirs.rank}, and adapter.rank is {rank}"
                raise NotUnderstood([Mistake(module.name, what, "declare no adapter: it is merged into its base")])
            into = np.empty((len(module.inputs), rank), np.float32)
            into[module.inputs] = a[part].T
            out_of = b[own][:, part].T * (theirs.scale / one.config.scale)
            ours_of = {LORA_A: into, LORA_B: out_of}
            if theirs.magnitude is not None:  # ours is what a length differs by from the base's
                of_base = read_base(module.name).astype(np.float32)
                lengths = np.linalg.norm(of_base.T if module.is_transposed else of_base, axis=1)
                ours_of[MAGNITUDE] = (read(theirs.magnitude).astype(np.float32) - lengths)[own]
            for name, x in ours_of.items():
                path = f"{adapter_path(slot.path)}/{name}"
                stack = found.setdefault(path, np.zeros(shapes[path], np.float32))
                stack[slot.index] = x.reshape(shapes[path][len(slot.index) :])
    return found


def _adapters_of(model: Model) -> Iterator[tuple[str, Any]]:
    for keys, x in jax.tree_util.tree_leaves_with_path(model.abstract()):
        yield jax.tree_util.keystr(keys, simple=True, separator="/"), x


def merge(
    weight: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float, lengths: np.ndarray | None, *, is_transposed: bool
) -> np.ndarray:
    """Returns a matrix of a file with its adapter, in float32. lengths: of DoRA, to which each output is brought.
    is_transposed: the file has (in, out)."""
    change = np.float32(scale) * (b.astype(np.float32) @ a.astype(np.float32))
    merged = weight.astype(np.float32) + (change.T if is_transposed else change)
    if lengths is None:
        return merged
    own = 0 if is_transposed else 1
    factor = lengths.astype(np.float32) / np.linalg.norm(merged, axis=own)
    return merged * np.expand_dims(factor, own)
