"""Reads a file of conf/ as it is, without Hydra: figures of chips, traits of compilers, presets of flags."""

from importlib.resources import files
from typing import Any

import yaml

LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader  # libyaml takes a fifth of the time


def own_config(name: str) -> Any:
    """Returns the values of a file of conf/, such as target/_v5p.yaml."""
    return yaml.load((files("meshloom.conf") / name).read_text(encoding="utf-8"), LOADER)
