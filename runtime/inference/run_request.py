"""Turns a run directory, or a folder of published weights, into the request that opens its weights.

    meshloom evaluate RUN target=cpu-1  ->  what RUN recorded, target=cpu-1 checkpoint.weights_from=RUN/checkpoints

A run is opened by the words that declared its checkpoint, so that an override of the user changes it as it would have
changed the run: sharding=tensor brings its own mesh. What the weights mean, their model, adapter and tokenizer, is
taken from the checkpoint by value (meaning.py), so that no file that changed since says it. What the run recorded for
one command or one cluster is left out, and so is what would load or run code: a run directory may come from somebody
else.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any
from meshloom.compiler.core.key_paths import is_within
from meshloom.compiler.core.places import PUBLISHED, PlaceError, expanded, is_published, is_url
from meshloom.compiler.declare.compose import Request
from meshloom.compiler.declare.hydra_settings import SEARCH_PATH, search_path_override
from meshloom.compiler.declare.overrides import overridden_key, override, parse_override
from meshloom.compiler.declare.pinned import Pinned
from meshloom.compiler.declare.published_folder import PublishedFolder

from ..checkpoint.meaning import TOKENIZER, Meaning, newest_meaning
from ..core.files import check_bucket, folder_at
from ..rundir.folders import CHECKPOINTS, RECORD_FILE, RunFolder, check_directory

WEIGHTS_FROM, BASE_FROM = "checkpoint.weights_from", "checkpoint.base_from"
MODEL_PATH = "model.path"
WHAT_TO_NAME = (
    "name a run directory (`meshloom runs` lists them), RUN/checkpoints/STEP, or a folder of published weights"
)
OF_THE_RUN = (  # not of its weights: places of files, processes, observers; and keys that load or run code
    "artifact", "checkpoint", "compilation_cache", "compile", "compiler_options", "distributed", "evaluation.split",
    "evaluation.tasks", "evaluation.tasks_path", "export", "generate", "hydra", "launch",
    "logging", "objective", "on_nonfinite", "on_out_of_memory", "overlap.pgle", "profile", "replay", "run", "shards",
    "stragglers", "sweep", "tune", "watchdog",
)  # fmt: skip


def request_of_run(place: str, overrides: Sequence[str], flags: argparse.Namespace | None = None) -> Request:
    """Returns the request that opens the weights at a place: RUN, RUN/checkpoints/STEP, or a folder of published
    weights. overrides: the user's, which come after those of the run. flags: Hydra's, for places of configs.

    Raises ConfigError if the place holds neither. The weights themselves are found later (open_weights.py).
    """
    recorded = _recorded(place)
    overrides, pinned = _with_meaning(recorded, overrides)
    given = [*_without_replaced(recorded.words, overrides), *overrides, *recorded.chosen]
    name, path = recorded.config_name, recorded.config_path
    if flags is not None:
        given = search_path_override(given, flags.config_dir)
        name = flags.config_name or name
        path = str(Path(flags.config_path).resolve()) if flags.config_path else path
    return Request(tuple(given), name, path, pinned)


@dataclass(frozen=True)
class _Recorded:
    """What a place declares. words: the overrides that the user's follow. chosen: those that follow the user's.
    config_name, config_path: where its configs are. meaning: of the weights of a run; None for published ones, and
    where there is no checkpoint."""

    words: Sequence[str]
    chosen: Sequence[str]
    config_name: str = "config"
    config_path: str | None = None
    meaning: Meaning | None = None


def _recorded(place: str) -> _Recorded:
    """Returns what a place declares. Raises ConfigError if it holds no weights."""
    if is_url(place):
        what = "is a URL, and the declaration of a run is in its directory, on a disk"
        raise ConfigError([Problem(place, what, "name the run directory: it knows where its checkpoints are")])
    try:
        folder = Path(expanded(place.removeprefix(PUBLISHED)))
    except PlaceError as error:
        raise ConfigError([Problem(place, error.what, error.fix)]) from error
    holds_weights = PublishedFolder(folder).holds_weights
    if is_published(place) or holds_weights:
        if not holds_weights:
            check_directory(folder, WHAT_TO_NAME)
        if not holds_weights:
            raise ConfigError([Problem(str(folder), "holds no config.json with safetensors files", WHAT_TO_NAME)])
        weights = override(WEIGHTS_FROM, f"{PUBLISHED}{folder}")
        return _Recorded(["model=from_hf"], [override("model.path", str(folder)), weights])
    run_dir, step = _run_of(folder)
    check_directory(run_dir, WHAT_TO_NAME)
    run = RunFolder(run_dir)
    record = run.record
    if record is None or record.command != "train":
        raise ConfigError([_no_run(run_dir)])
    check_bucket(folder_at(run.checkpoints), WEIGHTS_FROM)
    meaning = newest_meaning(run.checkpoints, step)
    request = (meaning and meaning.request) or record.request
    if request is None:
        what = "records no overrides: it was declared by a value in Python, or an older version of Meshloom trained it"
        raise ConfigError([Problem(str(run_dir / RECORD_FILE), what, "train from overrides, with this version")])
    kept = [text for text in request.overrides if _is_of_weights(text)]
    what, fix = "records a URL with a value in it, which would be sent there: ", "yourself, or train without the value"
    raise_if_any(
        Problem(str(run_dir / RECORD_FILE), f"{what}{text}", f"name {overridden_key(text)} {fix}")
        for text in kept
        if is_url_with_value(text)
    )
    weights = override(WEIGHTS_FROM, run.checkpoints + (f"/{step}" if step else ""))
    return _Recorded(kept, [weights], request.config_name, request.config_path, meaning)


def _with_meaning(recorded: _Recorded, overrides: Sequence[str]) -> tuple[Sequence[str], Pinned | None]:
    """Returns the user's overrides, and what holds beside them of the weights' meaning. model.path names the folder to
    which the base of an adapter has moved, and its tokenizer: the model stays the one that was trained."""
    meaning = recorded.meaning
    if meaning is None or not meaning.is_recorded:
        return overrides, None
    keys = {_key(text): text for text in overrides}
    values = dict(meaning.values)
    moved = keys.get(MODEL_PATH) if "model" not in keys else None
    if moved is not None:
        folder = parse_override(moved).value()
        overrides = [text for text in overrides if text != moved]
        if values["adapter"] is not None:
            overrides = [*overrides, override(BASE_FROM, f"{PUBLISHED}{folder}")]
        tokenizer, before = values.get(TOKENIZER), meaning.base or meaning.origin or ""
        if isinstance(tokenizer, dict) and _is_below(tokenizer.get("path", ""), before.removeprefix(PUBLISHED)):
            beside = os.path.relpath(tokenizer["path"], before.removeprefix(PUBLISHED))
            values[TOKENIZER] = tokenizer | {"path": os.path.normpath(os.path.join(str(folder), beside))}
    return overrides, Pinned.of(values, keys)


def _is_below(path: str, folder: str) -> bool:
    """Returns True for the path of a folder, or of a file in it; no path is below no folder."""
    return bool(folder) and Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))


def is_url_with_value(text: str) -> bool:
    """Returns True for an override by which a value of this machine could become part of a URL."""
    return "://" in text and "${" in text


def _run_of(folder: Path) -> tuple[Path, str | None]:
    """Returns a run directory and perhaps a step: RUN, RUN/checkpoints, RUN/checkpoints/STEP."""
    if folder.name.isdecimal() and folder.parent.name == CHECKPOINTS:
        return folder.parent.parent, folder.name
    return (folder.parent if folder.name == CHECKPOINTS else folder), None


def _is_of_weights(text: str) -> bool:
    return _key(text) == SEARCH_PATH or not any(is_within(_key(text), root) for root in OF_THE_RUN)


def _without_replaced(recorded: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Returns the recorded overrides without those below a group that the user chooses anew. A sharding brings its
    mesh, and the order of devices is of a mesh."""
    chosen = {key for text in overrides if "." not in (key := _key(text))}
    chosen |= {"mesh"} if "sharding" in chosen else set()
    chosen |= {"device_order"} if chosen & {"mesh", "target"} else set()
    return [text for text in recorded if not any(is_within(_key(text), group) for group in chosen)]


def _key(text: str) -> str:
    """Returns the key or group of an override: data/tokenizer=bytes -> data.tokenizer."""
    return overridden_key(text).replace("/", ".")


def _no_run(folder: Path) -> Problem:
    """Returns the problem of a folder that holds nothing to open, with the runs below it."""
    below = sorted(str(path.parent) for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{RECORD_FILE}"))
    fix = f"{WHAT_TO_NAME}, such as {below[-1]}" if below else WHAT_TO_NAME
    return Problem(str(folder), "is neither the directory of a trained run nor a folder of published weights", fix)
