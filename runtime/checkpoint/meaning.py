"""What the weights of a checkpoint mean is saved in it: the words that declared them, and the values of some keys.

    data    ..., weights: {request: {...}, values: {model: {...}, adapter: null, ...}, origin: hf:models/llama}

A run directory says what was typed last. A run that is continued with other words, and stopped before its first step,
leaves words there that no weight was trained with. So weights are opened by what their checkpoint holds, and a run that
goes on with anything else says so before it compiles.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import human_names

from ..core.files import Folder, folder_at, is_remote, parse_json, saved_hash
from ..rundir.folders import RecordedRequest, RunFolder
from .find import EXPECTED, finished

RECORD = "weights"  # in the data of a checkpoint
KEYS = ("model", "adapter", "data.tokenizer")
OF_CHATS = ("template", "variables", "date")  # keys of sources of chats, by which texts become what a model reads
# Keys that change no output of weights that are there.
OF_TRAINING = ("model.dropout_rate", "model.initializer_stddev", "model.router_jitter", "model.load_balancing_weight",
               "model.load_balancing_counts", "model.router_z_loss_weight", "model.router_bias_update_rate",
               "adapter.dropout")  # fmt: skip
TOKENIZER = "data.tokenizer"


@dataclass(frozen=True)
class Meaning:
    """What the weights of a checkpoint mean. values: by key. request: the words that declared them; None where nothing
    says. origin: the place of the weights that the run began from. tokenizer: its identity, by key. is_recorded: False
    for an older checkpoint, for which the declaration of its run is taken."""

    place: str
    values: Mapping[str, Any]
    request: RecordedRequest | None
    origin: str | None
    tokenizer: Mapping[str, Any]
    base: str | None
    is_recorded: bool

    def differences(self, written: Mapping[str, Any], identity: Mapping[str, Any] | None = None) -> list[str]:
        """Returns lines to show where a declaration means something else by the same weights. written: its values, as
        spec.yaml has them. identity: of its data, with that of their tokenizer; None: it is not known, and the
        tokenizer's words are compared."""
        tokenizer = _of_tokenizer(identity or {})
        now = said_of_weights(written)
        before = {key: value for key, value in self.values.items() if key in now}
        if self.tokenizer and tokenizer:  # a file may lie elsewhere, and be the same
            before, now = before | dict(self.tokenizer), now | tokenizer
        without = {f"{TOKENIZER}.path", *OF_TRAINING, *([TOKENIZER] if self.tokenizer and tokenizer else [])}
        changed = [
            each for key in {**before, **now} if key in before
            for each in _changes(key, before[key], now.get(key), without)
        ]  # fmt: skip
        lines = []
        if changed:
            named = [f"{key} {_shown(there)} there, {_shown(here)} here" for key, there, here in changed]
            lines.append(f"warning: the weights of {self.place} were trained as something else: {human_names(named)}")
        if not self.is_recorded:
            lines.append(f"{self.place} does not say what its weights mean: its run directory is assumed to say it")
        return lines


def said_of_weights(written: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a declaration that say what its weights mean, by key. written: as spec.yaml has them."""
    data = _node(written, "data")
    found = {"model": written.get("model"), "adapter": written.get("adapter"), TOKENIZER: data.get("tokenizer")}
    source = data.get("source")
    if isinstance(source, dict) and source.get("kind") in ("chats", "preferences"):
        found |= {f"data.source.{key}": source.get(key) for key in OF_CHATS}
    return found


def meaning_record(written: Mapping[str, Any], request: RecordedRequest | None) -> dict[str, Any]:
    """Returns what a checkpoint of a run says of its weights. written: the declaration, as spec.yaml has it."""
    words = request and request.model_dump(mode="json")
    return {"request": words, "values": said_of_weights(written), "origin": _origin(written)}


def _origin(written: Mapping[str, Any]) -> str | None:
    checkpoint = _node(written, "checkpoint")
    place = checkpoint.get("weights_from") or checkpoint.get("restore_from")
    return place if isinstance(place, str) else None


def meaning_of(path: Folder) -> Meaning:
    """Returns what the weights of a checkpoint mean; of an older one, which has no record of it, by the declaration of
    its run. Raises ConfigError for a record that is damaged: other words would open the weights as something else."""
    data = _data_of(path)
    record, identity, base = (_node(data, key) for key in (RECORD, "identity", "base"))
    place = f"checkpoint {path.name}"
    tokenizer = _of_tokenizer(identity)
    named = base.get("place")
    if RECORD in data:
        values, origin = _node(record, "values"), record.get("origin")
        if not set(KEYS) <= values.keys() or not isinstance(values["model"], dict):
            raise _damaged(path, "does not say what its weights mean")
        try:
            request = record.get("request") and RecordedRequest.model_validate_json(json.dumps(record["request"]))
        except ValidationError as error:
            raise _damaged(path, "does not say which words declared its weights") from error
        return Meaning(place, values, request, origin, tokenizer, named, True)
    # Nothing is declared where its run directory is not around it.
    declared = {} if is_remote(path) else RunFolder.around(Path(path)).declared
    values = {key: value for key, value in said_of_weights(declared).items() if value is not None}
    return Meaning(place, values, None, _origin(declared), tokenizer, named, False)


def newest_meaning(checkpoints: str, step: str | None) -> Meaning | None:
    """Returns what the newest checkpoint of a folder means whose record is as it was saved, which is the one that is
    opened, or the one of a step; None where there is no checkpoint, which opening it says. Raises ConfigError where
    each record is damaged."""
    folder, damage = folder_at(checkpoints), list[ConfigError]()
    try:
        paths = [folder / step] if step else list(finished(folder))
        paths = [path for path in paths if path.is_dir()]
    except OSError:
        return None
    for path in paths:
        try:
            return meaning_of(path)
        except ConfigError as error:
            damage.append(error)
    if damage:
        raise damage[0]
    return None


def _data_of(path: Folder) -> dict[str, Any]:
    """Returns what a checkpoint says beside its arrays. Raises ConfigError if it is not as it was saved."""
    file = path / EXPECTED[0]
    try:
        content = file.read_bytes()
        data = parse_json(content)
    except OSError as error:
        raise _damaged(path, f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise _damaged(path, f"is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise _damaged(path, "is not a JSON object")
    if (saved := saved_hash(path, EXPECTED[0])) and hashlib.sha256(content).hexdigest() != saved:
        raise _damaged(path, "is not as it was saved")
    return data


def _damaged(path: Folder, what: str) -> ConfigError:
    fix = f"bring back a copy of it, or name another checkpoint: {path.parent}/STEP"
    return ConfigError([Problem(str(path / EXPECTED[0]), what, fix)])


def _node(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _of_tokenizer(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in identity.items() if key.startswith(f"{TOKENIZER}.")}


def _changes(key: str, there: Any, here: Any, without: Collection[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the keys that differ, with both values. What has the name of a variable of the environment is left out."""
    if key in without:
        return
    if isinstance(there, dict) and isinstance(here, dict):
        for name in {**there, **here}:
            yield from _changes(f"{key}.{name}", there.get(name), here.get(name), without)
    elif there != here and not any(isinstance(value, str) and "${" in value for value in (there, here)):
        yield key, there, here


def _shown(value: Any) -> str:
    text = str(value.get("kind", value) if isinstance(value, dict) else value)
    return text if len(text) <= 40 else f"{text[:37]}..."
