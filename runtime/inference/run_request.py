"""Turns a run directory, or a folder of published weights, into the request that opens its weights.

    meshloom evaluate RUN target=cpu-1  ->  what RUN recorded, target=cpu-1 checkpoint.weights_from=RUN/checkpoints

A run is opened by the words that declared it, so that an override of the user changes it as it would have changed the
run: sharding=tensor brings its own mesh. What the run recorded for one command or one cluster is left out, and so is
what would load or run code: a run directory may come from somebody else.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any
from meshloom.compiler.core.key_paths import is_within
from meshloom.compiler.core.places import PUBLISHED, PlaceError, expanded, is_published, is_url
from meshloom.compiler.declare.compose import Request
from meshloom.compiler.declare.hydra_settings import SEARCH_PATH, search_path_override
from meshloom.compiler.declare.overrides import overridden_key, override
from meshloom.compiler.declare.published_folder import PublishedFolder

from ..rundir.folders import CHECKPOINTS, RECORD_FILE, RunFolder, check_directory

WEIGHTS_FROM = "checkpoint.weights_from"
WHAT_TO_NAME = (
    "name a run directory (`meshloom runs` lists them), RUN/checkpoints/STEP, or a folder of published weights"
)
OF_THE_RUN = (  # not of its weights: places of files, processes, observers; and keys that load or run code
    "artifact", "checkpoint", "compilation_cache", "compile", "compiler_options", "distributed", "evaluation.split",
    "evaluation.tasks", "evaluation.tasks_path", "export", "generate", "hydra", "launch",
    "logging", "objective", "on_nonfinite", "on_out_of_memory", "profile", "replay", "run", "shards", "stragglers",
    "sweep", "tune", "watchdog",
)  # fmt: skip


def request_of_run(place: str, overrides: Sequence[str], flags: argparse.Namespace | None = None) -> Request:
    """Returns the request that opens the weights at a place: RUN, RUN/checkpoints/STEP, or a folder of published
    weights. overrides: the user's, which come after those of the run. flags: Hydra's, for places of configs.

    Raises ConfigError if the place holds neither. The weights themselves are found later (open_weights.py).
    """
    recorded, chosen, name, path = _recorded(place)
    given = [*_without_replaced(recorded, overrides), *overrides, *chosen]
    if flags is not None:
        given = search_path_override(given, flags.config_dir)
        name = flags.config_name or name
        path = str(Path(flags.config_path).resolve()) if flags.config_path else path
    return Request(tuple(given), name, path)


def _recorded(place: str) -> tuple[Sequence[str], Sequence[str], str, str | None]:
    """Returns the overrides of a place that the user's follow, those that follow the user's, and where its configs
    are."""
    if is_url(place):
        what = "is a URL, and the declaration of a run is in its directory, on a disk"
        raise ConfigError([Problem(place, what, "name the run directory: it knows where its checkpoints are")])
    try:
        folder = Path(expanded(place.removeprefix(PUBLISHED)))
    except PlaceError as error:
        raise ConfigError([Problem(place, error.what, error.fix)]) from error
    holds_weights = PublishedFolder(folder).holds_weights
    if is_published(place) or holds_weights:
        check_directory(folder, WHAT_TO_NAME)
        if not holds_weights:
            raise ConfigError([Problem(str(folder), "holds no config.json with safetensors files", WHAT_TO_NAME)])
        weights = override(WEIGHTS_FROM, f"{PUBLISHED}{folder}")
        return ["model=from_hf"], [override("model.path", str(folder)), weights], "config", None
    run_dir, step = _run_of(folder)
    check_directory(run_dir, WHAT_TO_NAME)
    run = RunFolder(run_dir)
    record = run.record
    if record is None or record.command != "train":
        raise ConfigError([_no_run(run_dir)])
    if record.request is None:
        what = "records no overrides: it was declared by a value in Python, or an older version of Meshloom trained it"
        raise ConfigError([Problem(str(run_dir / RECORD_FILE), what, "train from overrides, with this version")])
    kept = [text for text in record.request.overrides if _is_of_weights(text)]
    what, fix = "records a URL with a value in it, which would be sent there: ", "yourself, or train without the value"
    raise_if_any(
        Problem(str(run_dir / RECORD_FILE), f"{what}{text}", f"name {overridden_key(text)} {fix}")
        for text in kept
        if is_url_with_value(text)
    )
    weights = override(WEIGHTS_FROM, run.checkpoints + (f"/{step}" if step else ""))
    return kept, [weights], record.request.config_name, record.request.config_path


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
