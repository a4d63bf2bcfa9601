"""The families of published models, and what is asked of them: names of tensors, and config.json both ways."""

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import jax

from ..config import ModelConfig
from ..contract import Model, is_counted
from . import deepseek, gemma, gpt2, gpt_oss, llama, mixtral, phi, qwen
from .contract import Mistake, NamedTensors, NotUnderstood, PublishedTensor, Row, Slot, UnknownFamily, Values
from .family import UNUSED, Family, Reader, fits_of, read_table, write_table

FAMILIES: tuple[Family, ...] = (
    *llama.FAMILIES, *qwen.FAMILIES, *gemma.FAMILIES, *mixtral.FAMILIES, *deepseek.FAMILIES,
    *gpt_oss.FAMILIES, *gpt2.FAMILIES, *phi.FAMILIES,
)  # fmt: skip

_REGISTERED: dict[str, Family] = {}  # by model_type: those of other packages

# Buffers that older releases saved: rotary frequencies and their tables, and the number that hides tokens.
HARMLESS = (r".*\brotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)", r".*\bmasked_bias",
            r".*\bposition_ids")  # fmt: skip
TABLE, HEAD = "embed/table_VE", r"lm_head\.weight"  # which are the same where embeddings are tied

OF_HEADS = r"(ForCausalLM|LMHeadModel)$"
OF_OLD_GPT2 = ("n_embd", "n_layer", "n_head", "vocab_size")  # its first files name neither architecture nor model_type

ShapesByPath = dict[str, tuple[int, ...]]


def register(*families: Family) -> None:
    """Adds families of another package, of a model class of its own (docs/extend.md). Raises ValueError for a name that
    another family has."""
    for family in families:
        others = [each for each in known_families() if each.model_type != family.model_type or each in FAMILIES]
        taken = {name for each in others for name in (each.model_type, each.architecture)}
        if clashes := sorted(taken & {family.model_type, family.architecture}):
            raise ValueError(f"{clashes[0]} is the name of another family: give it another")
        if "family" not in fits_of(family.table):
            raise ValueError(f"the table of {family.model_type} has no entry ours(family='MODULE:CLASS')")
        _REGISTERED[family.model_type] = family


def known_families() -> tuple[Family, ...]:
    """Returns our families, and those that are registered."""
    return (*FAMILIES, *_REGISTERED.values())


def tensors(config: ModelConfig, model_type: str | None = None) -> tuple[PublishedTensor, ...]:
    """Returns the tensors of published files that hold a model: each parameter exactly once, tied tables once.
    model_type: of the family to prefer, as families name the same parameters differently. Raises NotUnderstood for a
    model that no family describes."""
    model = config.build()
    keyed = jax.tree_util.tree_leaves_with_path(model.abstract())
    shapes = {jax.tree_util.keystr(keys, simple=True, separator="/"): x.shape for keys, x in keyed}
    places = tuple(_layers(model))
    family = family_of(config, model_type=model_type)
    found = tuple(tensor for row in family.rows(config) for tensor in _of_row(row, shapes, places))
    named = {slot.path for tensor in found for slot in tensor.slots}
    if unnamed := [path for path in shapes if path not in named and not is_counted(path)]:
        what, fix = f"no tensor of {family.model_type} holds {unnamed[0]}", "add a Row for it to the family's table"
        raise NotUnderstood([Mistake("model.family", what, fix)])
    return found


WRAPPERS = ("_orig_mod.", "module.")  # names of torch.compile and DistributedDataParallel, where they were left


def tensors_in(config: ModelConfig, names: Collection[str], model_type: str | None = None) -> NamedTensors:
    """Returns the same tensors under the names of a folder, and which of its names no parameter needs.

    names: all that a folder has. Some folders leave out the first part of each name: GPT-2's have "wte.weight" for
    "transformer.wte.weight".
    """
    family, found = family_of(config, model_type=model_type), tensors(config, model_type)
    prefix = family.prefix
    befores = [each for each in (family.before, *WRAPPERS) if each]
    if before := next((each for each in befores if any(name.startswith(each + prefix) for name in names)), ""):
        found, prefix = tuple(replace(each, name=before + each.name) for each in found), before + prefix
    elif not any(name.startswith(prefix) for name in names):
        found = tuple(replace(tensor, name=tensor.name.removeprefix(prefix)) for tensor in found)
    needed = {tensor.name for tensor in found}
    others = [name for name in names if name not in needed]

    def matching(*patterns: str) -> frozenset[str]:
        known = [pattern.replace("{num_layers}", str(getattr(config, "num_layers", None))) for pattern in patterns]
        compiled = [re.compile(f"({re.escape(prefix)})?{pattern}") for pattern in known]
        return frozenset(name for name in others if any(pattern.fullmatch(name) for pattern in compiled))

    tables = [tensor.name for tensor in found if tensor.slots[0].path == TABLE]
    heads = matching(HEAD) if getattr(config, "embeddings", None) == "tied" else ()
    copies = dict.fromkeys(heads, tables[0]) if tables else {}
    may_differ = bool(copies) and not family.differs(config.model_copy(update={"embeddings": "separate"}))
    return NamedTensors(found, matching(*HARMLESS, *family.harmless), matching(*family.left_out), copies, may_differ)


def family_of(config: ModelConfig, *, model_type: str | None = None) -> Family:
    """Returns the first family that a config can be written as. model_type: the one to prefer, if it can."""
    families = known_families()
    known = {value for family in families for value in fits_of(family.table)["family"]}
    if config.family not in known:
        what, fix = f"{config.family} is not a family of published models", f"use one of {', '.join(sorted(known))}"
        raise UnknownFamily([Mistake("model.family", what, fix)])
    preferred = sorted(families, key=lambda family: family.model_type != model_type)
    differences = [family.differs(config) for family in preferred]
    if fitting := [family for family, differs in zip(preferred, differences, strict=True) if not differs]:
        return fitting[0]
    of_kind = [each for each in differences if not any(mistake.key == "model.family" for mistake in each)]
    raise NotUnderstood(min(of_kind, key=len))


def read_config(config_json: Values) -> dict[str, Any]:
    """Returns the keys of conf `model` that a config.json says. Raises NotUnderstood with all keys that may change the
    computation and are not understood."""
    family = _named(config_json)
    reader = Reader(config_json)
    read = dict(family.defaults) | read_table(family.table, reader)
    reader.finish()
    return read


def write_config(
    config: ModelConfig, *, dtype: str, max_length: int, base: Values | None = None
) -> dict[str, Any]:  # fmt: skip
    """Returns the config.json of a model. dtype: of the tensors. max_length: the longest sequence that it was trained
    for, unless `base` says one. base: the config.json that it came from: its family is kept, with all keys
    that the family's table does not write."""
    model_type = model_type_of(base) if base else None
    family = family_of(config, model_type=model_type)
    if base:
        is_same = model_type in (None, family.model_type)
        kept = {key: value for key, value in base.items() if is_same or key in UNUSED}
    else:  # without these, transformers takes the numbers of the family's first release
        kept: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        if getattr(config, "num_positions", None) is None:
            kept["max_position_embeddings"] = max_length
    named = {"architectures": [family.architecture], "model_type": family.model_type}
    return kept | named | {"dtype": dtype, "torch_dtype": dtype} | write_table(family.table, config)


def model_type_of(config_json: Values) -> str | None:
    """Returns the model_type of the family that a config.json names; None if it names none that is known."""
    try:
        return _named(config_json).model_type
    except NotUnderstood:
        return None


def _named(config_json: Values) -> Family:
    """Returns the family that a config.json names: by its first architecture, or by its model_type."""
    reader = Reader(config_json)
    architectures = reader.items("architectures", otherwise=[])
    key, of = ("architectures", "architecture") if architectures else ("model_type", "model_type")
    named = architectures[0] if architectures else reader.text("model_type", otherwise="")
    families = known_families()
    by_name = {getattr(family, of): family for family in families}
    if architectures:  # of the module without its head, which has the same tensors and names no part of them
        by_name |= {re.sub(OF_HEADS, "Model", name): family for name, family in by_name.items()} | by_name
    if not named and all(name in config_json for name in OF_OLD_GPT2):
        return next(family for family in FAMILIES if family.model_type == "gpt2")
    if isinstance(named, str) and named in by_name:
        return by_name[named]
    if not reader.mistakes and not named:
        reader.refuse("architectures", "is missing", "take the config.json of a published model")
    elif not reader.mistakes:
        names = [getattr(family, of) for family in families]
        near = get_close_matches(str(named), names, n=1, cutoff=0.6)
        hint = f"did you mean '{near[0]}'? " if near else ""
        fix = f"{hint}use one of {', '.join(names)}, or register it from a package of your own (docs/extend.md)"
        reader.refuse(key, f"'{named}' is not implemented", fix)
        raise UnknownFamily(reader.mistakes)
    raise NotUnderstood(reader.mistakes)


def _layers(model: Model) -> Iterator[tuple[str, int]]:
    """Yields the place of each layer, in order: the path above its parameters, and its index in their first dimension.
    A stack may repeat a group of layers, layer_0, layer_1 and so on."""
    for stack in model.stacks:
        inner = [name for name in stack.layer.abstract if re.fullmatch(r"layer_\d+", name)]
        inner.sort(key=lambda name: int(name.removeprefix("layer_")))
        for index in range(stack.num_layers):
            yield from ((f"{stack.name}/{name}", index) for name in inner) if inner else ((stack.name, index),)


def _of_row(row: Row, shapes: ShapesByPath, places: Collection[tuple[str, int]]) -> Iterator[PublishedTensor]:
    """Yields the tensors of one row of a table: of each layer and each expert that has its parameters."""
    if "{layer}" not in row.name:
        yield from _of_place(row, row.name, row.paths, (), shapes)
        return
    for layer, (above, index) in enumerate(places):
        paths = tuple(f"{above}/{path}" for path in row.paths)
        name = row.name.replace("{layer}", str(layer))
        if "{expert}" not in name:
            yield from _of_place(row, name, paths, (index,), shapes)
        elif paths[0] in shapes:
            for expert in range(shapes[paths[0]][1]):
                yield from _of_place(row, name.replace("{expert}", str(expert)), paths, (index, expert), shapes)


def _of_place(
    row: Row, name: str, paths: tuple[str, ...], index: tuple[int, ...], shapes: ShapesByPath
) -> Iterator[PublishedTensor]:
    if any(path not in shapes for path in paths):
        return
    layout = row.layout(tuple(shapes[path][len(index) :] for path in paths))
    slots = tuple(Slot(path, index) for path in paths)
    yield PublishedTensor(name, layout.shape, slots, layout.to_ours, layout.to_published)
