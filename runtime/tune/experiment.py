"""A winner as a file of the config group `experiment`, ready to run."""

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from meshloom.compiler.config.compose import Request, hydra_session
from meshloom.compiler.config.override_parser import parse_override
from meshloom.compiler.tune.answer import Estimated

from ..core.files import replace_text
from .variants import Space


def write_experiment(space: Space, winner: Estimated, path: Path, why: str) -> None:
    """Writes the declaration of the winner: what was typed, and what was searched."""
    groups, values = _split(space.request, winner)
    text = "# @package _global_\n" + "".join(f"# {line}\n" for line in why.splitlines())
    text += yaml.safe_dump({"defaults": groups}, sort_keys=False) + yaml.safe_dump(values, sort_keys=False)
    replace_text(path, text)


def _split(request: Request, winner: Estimated) -> tuple[list[Any], dict[str, Any]]:
    """Returns the choices of groups, as a defaults list has them, and the values of keys."""
    searched = winner.candidate.values
    typed = [text for text in request.overrides if not text.startswith(("hydra.", "tune."))]
    experiments: list[str] = []
    choices: dict[str, str] = {}  # of two of one group the last one
    values = OmegaConf.create({})
    with hydra_session(request) as known:
        for text in (*typed, *(f"{key}={value}" for key, value in searched.items())):
            parsed = parse_override(text)
            key, value = parsed.key_or_group, parsed.value()
            if key == "experiment":
                experiments = [str(value)]
            elif key in known or key == "target":
                choices[f"override /{key}"] = str(value)
            elif not parsed.is_delete():
                OmegaConf.update(values, key, value, merge=True)
    plain = OmegaConf.to_container(values)
    assert isinstance(plain, dict)
    return [*experiments, *({key: option} for key, option in choices.items())], {
        str(key): value for key, value in plain.items()
    }
