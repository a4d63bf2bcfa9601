"""`model=from_hf model.path=DIR`: the declaration of a published model is made from the config.json of its folder.

    {family: from_hf, path: DIR, num_layers: 4}  ->  what DIR/config.json says, with num_layers: 4

What config.json does not say, of training alone, is as in conf/model. The model is resolved before the declaration is
checked, so neither a program nor its fingerprint knows the folder. Its weights and its tokenizer are those of the run,
unless the declaration names others.
"""

import json
import os
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, Problem
from ..core.places import PUBLISHED, PlaceError, local_path
from ..spec.own_config import own_config
from .gguf_file import SUFFIX
from .published_folder import CONFIG, PublishedFolder

FAMILY = "from_hf"
BASES = {"decoder": "_llama", "moe": "_moe"}  # the files of conf/model with what all models of a family share
PLACEHOLDER = "tiny"  # is checked in place of a model that cannot be read, so that other mistakes are found, too
BYTES = {"kind": "bytes"}
WEIGHTS = "checkpoint.weights_from"


def with_published_model(values: dict[str, Any], typed: Collection[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Returns the values of a declaration with its published model resolved, and what is wrong with that; others as
    they are. typed: the keys and groups of the overrides."""
    declared = values.get("model")
    if not isinstance(declared, dict) or declared.get("family") != FAMILY:
        return values, []
    try:
        folder = _folder(declared.get("path"))
        opened = PublishedFolder(folder, _declared_base(values))
        read = opened.model
    except ConfigError as error:
        return values | {"model": _own(PLACEHOLDER)}, list(error.problems)
    own = {key: value for key, value in declared.items() if key not in ("family", "path")}
    if own.get("vocab_size") == "auto":
        own["vocab_size"] = max(read["vocab_size"], _num_tokens(values, opened))
    base = BASES.get(read["family"])  # a family of another package says all of its keys
    model = merged(merged(_own(base) if base else {}, read), own)
    return _with_folder(values, opened, typed) | {"model": model}, []


def folder_name(path: str) -> str:
    """Returns the name of a published model by its folder: also one in the cache of Hugging Face's Hub,
    models--ORGANIZATION--NAME/snapshots/REVISION."""
    folder = Path(path)
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.rpartition("--")[2]
    return folder.name or path


def merged(values: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of both; where both have a key, the others', and nodes are merged."""
    found = dict(values)
    for key, value in others.items():
        known = found.get(key)
        found[key] = merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return found


def _folder(path: Any) -> Path:
    """Returns the folder. Raises ConfigError if it is not there, or has no config.json."""
    if not isinstance(path, str) or not path:
        what = "has no value" if path is None else f"{path!r} is not a path"
        raise ConfigError([Problem("model.path", what, "set model.path=DIR, a folder with config.json and weights")])
    try:
        folder = Path(os.path.abspath(local_path(path)))
    except PlaceError as error:
        raise ConfigError([Problem("model.path", error.what, error.fix)]) from error
    if (folder.is_dir() and (folder / CONFIG).is_file()) or PublishedFolder(folder).holds_weights:
        return folder
    if folder.is_dir():
        what = f"'{path}' has no {CONFIG}"
        if files := sorted(folder.glob(f"*{SUFFIX}")):
            raise ConfigError(
                [Problem("model.path", f"{what}, and several GGUF files", f"name one of them: {files[0]}")]
            )
        below = sorted(str(found.parent) for found in folder.glob(f"*/{CONFIG}"))
        fix = f"give the folder that has it: {below[0]}" if below else "give a folder as transformers writes it"
        raise ConfigError([Problem("model.path", what, fix)])
    if folder.is_file():
        what, fix = f"'{path}' is a file", f"give its folder: {os.path.dirname(path) or '.'}"
        raise ConfigError([Problem("model.path", what, fix)])
    what = f"there is no folder '{path}'"
    is_name = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    fix = (
        f"download it first: hf download {path} --local-dir DIR" if is_name else "give the folder of a published model"
    )
    raise ConfigError([Problem("model.path", what, fix)])


def _with_folder(values: dict[str, Any], opened: PublishedFolder, typed: Collection[str]) -> dict[str, Any]:
    """Returns the values with the weights and the tokenizer of the folder, where the declaration names no others: a
    checkpoint to start from, or a tokenizer that is typed, or other than that of bytes. Weights that are typed as null
    are drawn."""
    checkpoint, data, folder = values.get("checkpoint"), values.get("data"), opened.path
    changes: dict[str, Any] = {}
    if isinstance(checkpoint, dict):
        named = checkpoint.get("weights_from") or checkpoint.get("restore_from")
        # The folder holds the base of an adapter that goes on, or of a folder of PEFT.
        is_base = not opened.is_adapter and (_has_adapter(values) or _is_peft(named))
        if named and is_base and checkpoint.get("base_from") is None:
            changes["checkpoint"] = checkpoint | {"base_from": f"{PUBLISHED}{folder}"}
        elif not named and WEIGHTS not in typed:
            changes["checkpoint"] = checkpoint | {"weights_from": f"{PUBLISHED}{folder}"}
    is_typed = any(key.replace("/", ".").startswith("data.tokenizer") for key in typed)
    tokenizer = None if is_typed else _tokenizer(opened)
    if tokenizer and isinstance(data, dict) and data.get("tokenizer") == BYTES:
        changes["data"] = data | {"tokenizer": tokenizer}
    return values | changes


def _num_tokens(values: Mapping[str, Any], opened: PublishedFolder) -> int:
    """Returns the number of tokens of the tokenizer.json that the declaration names, or the folder has; 0 if none."""
    data = values.get("data")
    tokenizer = data.get("tokenizer") if isinstance(data, dict) else None
    named = tokenizer.get("path") if isinstance(tokenizer, dict) else None
    place = Path(named).expanduser() if isinstance(named, str) else None
    file = place / "tokenizer.json" if place and place.is_dir() else place
    file = file or next((each for each in opened.tokenizer if each.name == "tokenizer.json"), None)
    try:
        said = json.loads(file.read_bytes()) if file else {}
        known = [
            *said.get("model", {}).get("vocab", {}).values(),
            *(each["id"] for each in said.get("added_tokens", [])),
        ]
        return max(known, default=-1) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0  # opening the tokenizer says what is wrong with it


def _is_peft(place: Any) -> bool:
    return PublishedFolder(Path(str(place).removeprefix(PUBLISHED))).is_adapter


def _declared_base(values: Mapping[str, Any]) -> Path | None:
    """Returns the declared folder of the base of an adapter."""
    checkpoint = values.get("checkpoint")
    place = checkpoint.get("base_from") if isinstance(checkpoint, dict) else None
    return Path(place.removeprefix(PUBLISHED)).expanduser() if isinstance(place, str) else None


def _has_adapter(values: Mapping[str, Any]) -> bool:
    adapter = values.get("adapter")
    return isinstance(adapter, dict) and adapter.get("kind") != "none"


def _tokenizer(opened: PublishedFolder) -> dict[str, Any] | None:
    """Returns the tokenizer of a folder; None if it has none that can be read."""
    there = {file.name: file for file in opened.tokenizer}
    if "tokenizer.json" in there:  # the folder's other files say which token ends a document
        return {"kind": "huggingface", "path": str(there["tokenizer.json"].parent), "end_of_document": None}
    if file := there.get("tokenizer.model"):
        return {"kind": "sentencepiece", "path": str(file), "end_of_document": None}
    return None


@cache
def _file(name: str) -> dict[str, Any]:
    return own_config(f"model/{name}.yaml")


def _own(name: str) -> dict[str, Any]:
    """Returns the keys of a file of Meshloom's own conf/model, with those of the files that it is based on."""
    found: dict[str, Any] = {}
    for base in _file(name).get("defaults", ["_self_"]):
        found |= (
            {key: value for key, value in _file(name).items() if key != "defaults"} if base == "_self_" else _own(base)
        )
    return found
