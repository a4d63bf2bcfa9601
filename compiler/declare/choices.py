"""Describes what a request can choose and what it chose: options, keys, the name of its model, and itself as a file."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.conf import HydraConf
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, OmegaConf

from ..core.format import human_names
from ..core.key_paths import leaves
from ..spec.attached import AUTO
from ..spec.target_names import patterns
from .compose import Request, chosen_options, config_sources, hydra_arguments, hydra_session
from .compositions import compose_kept
from .overrides import parse_override
from .problems import ConfigGroups
from .published_model import FAMILY, folder_name

NUM_CHANGES = 2  # changed keys that are named


@dataclass(frozen=True)
class Option:
    """An option of a config group. description: the first comment of its file. is_default: chosen where none is
    typed."""

    name: str
    description: str
    is_default: bool


def described_groups(request: Request) -> dict[str, list[Option]]:
    """Returns all config groups that the request can see, also those of the user, with their options."""
    with hydra_session(request) as groups:
        chosen, sources = chosen_options(request), config_sources(request)
        return {
            group: [
                Option(name, _description(sources, group, name), chosen.get(group) == name)
                for name in (patterns() if group == "target" else options)
            ]
            for group, options in groups.items()
        }


def _description(sources: Sequence[ConfigSource], group: str, name: str) -> str:
    """Returns the first readable comment of an option's file, or of the file from which sizes of a target are made."""
    if (group, name) == ("target", AUTO):
        return "attached accelerators; eight simulated devices where there is none"
    names = (name, f"_{name.removesuffix('-N')}") if group == "target" else (name,)
    texts = (_text(source, f"{group}/{each}.yaml") for each in names for source in sources)
    lines = next((text.splitlines() for text in texts if text is not None), [])
    comments = (line[1:].strip() for line in lines if line.startswith("#"))
    return next((line for line in comments if line and not line.startswith("@package")), "")


def _text(source: ConfigSource, name: str) -> str | None:
    """Returns the text of a file in a place of configs; None if it does not have the file, or any files."""
    if source.scheme() not in ("file", "pkg"):
        return None
    place = Path(source.path) if source.scheme() == "file" else files(source.path)
    file = place / name
    return file.read_bytes().decode(errors="replace") if file.is_file() else None


def default_values(request: Request) -> dict[str, Any]:
    """Returns each key with its default, and each group with the option that is chosen by default."""
    with hydra_session(request) as groups:
        chosen = chosen_options(request)
        composed = OmegaConf.to_container(compose(request.config_name, overrides=request.search_path), resolve=False)
    return dict(leaves(composed)) | {group: chosen[group] for group in groups if chosen.get(group)}


def all_keys() -> list[str]:
    """Returns the keys and groups of Meshloom's own configs; none if they cannot be composed."""
    try:
        with hydra_session(Request(())) as groups:
            values = OmegaConf.to_container(compose("config"), resolve=False)
    except HydraException:
        return []
    return [*(key for key, _ in leaves(values)), *groups]


def as_config_file(request: Request, overrides: Iterable[str]) -> tuple[list[Any], dict[str, Any]]:
    """Returns overrides as an option of the group `experiment` states them: its defaults list, and its values.

    request: whose groups are known. model=tiny, mesh.fsdp=8 -> [{"override /model": "tiny"}], {"mesh": {"fsdp": 8}}
    """
    experiments: list[str] = []
    choices: dict[str, str] = {}  # the last option of each group
    values = OmegaConf.create({})
    with hydra_session(request) as groups:
        for text in overrides:
            parsed = parse_override(text)
            key, value = parsed.key_or_group, parsed.value()
            if key == "experiment":
                experiments = [str(value)]
            elif key in groups or key == "target":
                choices[f"override /{key}"] = str(value)
            elif not parsed.is_delete():
                OmegaConf.update(values, key, value, merge=True)
    plain = OmegaConf.to_container(values)
    assert isinstance(plain, dict)
    defaults = [*experiments, *({key: option} for key, option in choices.items())]
    return defaults, {str(key): value for key, value in plain.items()}


def model_of(request: Request) -> str | None:
    """Returns the name of the model that a valid request chooses, without Hydra being set up."""
    overrides = hydra_arguments(request)
    with hydra_session(request) as groups:
        composed = compose_kept(request.config_name, request.config_path, overrides, groups)
        return chosen_model(composed, composed.hydra)


def chosen_model(composed: DictConfig, hydra: HydraConf) -> str | None:
    """Returns 'llama2_7b', or 'llama2_7b (num_layers=4)' if something sets model.num_layers=4; of a published model the
    name of its folder.

    hydra: Hydra's own node of the same composition; Hydra must still be set up. Returns None if no option is chosen, or
    if the family differs from the option's, whose name would then be misleading.
    """
    option = hydra.runtime.choices.get("model")
    if option is None:
        return None
    places = [text for text in hydra.overrides.hydra if text.startswith("hydra.searchpath=")]
    beside = compose_kept(str(hydra.job.config_name), None, [*places, f"+model@plain={option}"], ConfigGroups())
    model, plain = (OmegaConf.to_container(node, resolve=False) for node in (composed.model, beside.plain))
    assert isinstance(model, dict)
    assert isinstance(plain, dict)
    if model["family"] != plain.get("family"):
        return None
    if model["family"] == FAMILY:
        option, plain = folder_name(str(model.get("path"))), plain | {"path": model.get("path")}
    changes = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in model.items()
        if key not in plain or plain[key] != value
    ]
    changes += [f"~{key}" for key in plain if key not in model]
    return f"{option} ({human_names(changes, NUM_CHANGES)})" if changes else str(option)
