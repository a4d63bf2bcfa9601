"""Translates chips to the names that engines use: labels of nodes, names of slices, from conf/launch/_chips.yaml."""

from functools import cache
from importlib.resources import files

import yaml

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.models.config import Record


class ChipNames(Record):
    """Names of one chip; None where the engine does not have it."""

    gke: str
    gcloud: str | None
    runtime: str | None
    sky: str | None


@cache
def _all_chips() -> dict[str, ChipNames]:
    text = (files("meshloom.conf") / "launch" / "_chips.yaml").read_text()
    return {chip: ChipNames.model_validate(names) for chip, names in yaml.safe_load(text).items()}


def chip_names(chip: str) -> ChipNames:
    """Returns the names of a chip. Raises ConfigError for one that engines have no names of."""
    if chip not in _all_chips():
        what = f"no engine's name of {chip} is known"
        raise ConfigError([Problem("launch", what, f"choose a target of {', '.join(_all_chips())}")])
    return _all_chips()[chip]
