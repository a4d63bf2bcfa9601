"""Checks settings that Hydra accepts silently although they do nothing, or something unexpected."""

import os
from collections.abc import Sequence
from pathlib import Path

from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..core.errors import ConfigError, Problem, raise_if_any
from ..core.places import PlaceError, local_path
from .overrides import in_quotes, parsed_or_none

SEARCH_PATH = "hydra.searchpath"
OUR_TARGETS = "meshloom://targets"  # config_files.TargetNames
RUN_DIR = "hydra.run.dir"
SWEEPER_PARAMS = "hydra.sweeper.params"
SUBDIRECTORY = "hydra.sweep.subdir"
JOB_NUMBER = "${hydra.job.num}"  # Hydra's default
SWEEP_DIR = "hydra.sweep.dir"
DIRECTORIES = (RUN_DIR, SWEEP_DIR)
PLUGINS = {  # options that other packages add to Hydra's groups
    "hydra/launcher": {
        "joblib": "hydra-joblib-launcher", "submitit_local": "hydra-submitit-launcher",
        "submitit_slurm": "hydra-submitit-launcher", "ray": "hydra-ray-launcher", "ray_aws": "hydra-ray-launcher",
        "rq": "hydra-rq-launcher",
    },
    "hydra/sweeper": {
        "optuna": "hydra-optuna-sweeper", "ax": "hydra-ax-sweeper", "nevergrad": "hydra-nevergrad-sweeper",
    },
}  # fmt: skip


def problems_of_settings(composed: DictConfig) -> list[Problem]:
    """Returns problems with the directories that Hydra creates."""
    problems = []
    for key in DIRECTORIES:
        try:
            directory = str(OmegaConf.select(composed, key) or "")
        except OmegaConfBaseException as error:
            problems.append(Problem(key, str(error).splitlines()[0], f"give a directory: {key}=runs/first"))
            continue
        if not directory.strip() or "\0" in directory:
            what = "contains a control character" if directory.strip() else "is empty"
            problems.append(Problem(key, what, f"give a directory: {key}=runs/first"))
        elif directory.startswith("~") and _problem_of_place("", directory) is None:  # typed ones are expanded before
            what = f"'{directory}' of a config file would be a folder named ~"
            problems.append(Problem(key, what, "write ${oc.env:HOME} in the file, or type the key"))
        elif problem := _problem_of_place(key, directory):
            problems.append(problem)
    return problems


def with_home(text: str) -> str:
    """Returns the override of a directory with `~` and `file://` as paths, which Hydra would take for names. Any other
    override is returned unchanged, also one that `problems_of_settings` refuses."""
    parsed = parsed_or_none(text)
    if parsed is None or parsed.key_or_group not in DIRECTORIES or parsed.is_sweep_override() or parsed.is_delete():
        return text
    place = str(_text(parsed.value()))
    try:
        path = local_path(place)
    except PlaceError:
        return text
    return text if path == place else f"{parsed.key_or_group}={in_quotes(path)}"


def _problem_of_place(key: str, directory: str) -> Problem | None:
    try:
        local_path(directory)
    except PlaceError as error:
        return Problem(key, error.what, error.fix)
    return None


def without_plugin(group: str, option: str) -> Problem | None:
    """Returns the Problem of a launcher or sweeper whose package is not installed; None for any other option."""
    package = PLUGINS.get(group, {}).get(option)
    return Problem(group, f"'{option}' is not installed", f"pip install {package}") if package else None


def check_subdirectories(subdirectory: str) -> None:
    """Raises ConfigError if all points of a sweep would have the same directory: none of its name differs."""
    if "${" not in subdirectory:
        raise ConfigError([one_directory(repr(subdirectory))])


def one_directory(directory: str) -> Problem:
    """Returns the Problem of sweep points that would overwrite each other."""
    fix = f"leave it out, or make it differ: {SUBDIRECTORY}=" + "'${hydra.job.num}'"
    return Problem(SUBDIRECTORY, f"several points of the sweep would share the directory {directory}", fix)


def check_places(sources: Sequence[ConfigSource]) -> None:
    """Raises ConfigError for search-path entries that do not exist."""
    fix = "name a folder with groups in it, such as file://my/configs for my/configs/model/mine.yaml"
    missing = [source for source in sources if source.provider != "schema" and not source.available()]
    raise_if_any(Problem(SEARCH_PATH, f"there is no {source.scheme()}://{source.path}", fix) for source in missing)


def search_path_override(overrides: Sequence[str], config_dir: str | None) -> list[str]:
    """Returns the overrides with one `hydra.searchpath`, of the user's places, `config_dir` and Meshloom's own.

    Without a user's place or `config_dir` they are returned unchanged.
    """
    kept, places = [], [OUR_TARGETS]
    for text in overrides:
        parsed = parsed_or_none(text)
        if parsed is None or parsed.key_or_group != SEARCH_PATH or parsed.is_delete():
            kept.append(text)
            continue
        value = None if parsed.is_sweep_override() else parsed.value()
        found = list(map(_text, value)) if isinstance(value, list) else [None]
        if not all(isinstance(place, str) and place for place in found):
            fix = f"write {SEARCH_PATH}=[file://my/configs]"
            raise ConfigError([Problem(SEARCH_PATH, "is not a list of places", fix)])
        places += map(str, found)
    if config_dir is not None:
        try:
            config_dir = local_path(config_dir)  # shells leave the ~ of --config-dir=~/configs to us
        except PlaceError as error:
            raise ConfigError([Problem("--config-dir", error.what, error.fix)]) from error
        if not config_dir or "\0" in config_dir or not Path(config_dir).is_dir():
            what = f"there is no directory {config_dir or repr(config_dir)}"
            raise ConfigError([Problem("--config-dir", what, "name a folder with groups in it: model/mine.yaml")])
        places.append(f"file://{os.path.realpath(config_dir)}")
    if len(kept) == len(overrides) and config_dir is None:
        return kept
    return [*kept, f"{SEARCH_PATH}=[{','.join(map(in_quotes, dict.fromkeys(places)))}]"]


def _text(place: object) -> object:
    """Returns a quoted text without its quotes."""
    return getattr(place, "text", place)
