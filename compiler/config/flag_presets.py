"""Sets of XLA's options that go together for a chip, by name: data, conf/overlap/_flag_presets.yaml."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal, Self

import yaml
from pydantic import model_validator

from meshloom.models.config import Record

from ..core.collectives import CollectiveKind
from .spec import CompilerOption

Moved = Literal["weights", "activations"]
Options = Mapping[str, CompilerOption]


@dataclass(frozen=True)
class FlagPreset:
    """One set, for one target.

    flags: the options; None where there are none for the target, so that it cannot be chosen. hides: kinds of
    collectives that run beside arithmetic with it. begins_early: of them what an iteration of a loop needs first begins
    in the iteration before. tried_for: what `overlap.search` hopes to hide with it; empty: never tried.
    """

    tried_for: tuple[Moved, ...]
    hides: tuple[CollectiveKind, ...]
    begins_early: bool
    flags: Options | None


class OptionNote(Record):
    """One option. since: the oldest compiler that it was seen in. hazard: what it may cost or break; None: not known to
    do either."""

    what: str
    why: str
    since: str
    hazard: str | None


class EnvironmentNote(Record):
    """A setting that only the environment of a process can make, for whoever launches it."""

    what: str
    why: str


class PresetEntry(Record):
    """A set in the file. values: options by chip or platform, the chip's before its platform's."""

    what: str
    tried_for: tuple[Moved, ...]
    hides: tuple[CollectiveKind, ...]
    begins_early: bool
    values: dict[str, dict[str, CompilerOption]]


class FlagPresetFile(Record):
    """The file: each set, and each option that one of them has."""

    presets: dict[str, PresetEntry]
    options: dict[str, OptionNote]
    environment: dict[str, EnvironmentNote]

    @model_validator(mode="after")
    def _check(self) -> Self:
        used = {name for one in self.presets.values() for values in one.values.values() for name in values}
        if used != set(self.options):
            raise ValueError(f"described, or in a preset, and not both: {sorted(used ^ set(self.options))}")
        return self


@cache
def preset_file() -> FlagPresetFile:
    """The file of conf/."""
    text = files("meshloom.conf").joinpath("overlap", "_flag_presets.yaml").read_text()
    return FlagPresetFile.model_validate_json(json.dumps(yaml.safe_load(text)))


def read_flag_presets(platform: str, chip: str | None) -> dict[str, FlagPreset]:
    """Every preset by its name, as it is for a chip of a platform; None: for any device of it."""
    return {
        name: FlagPreset(
            tried_for=one.tried_for,
            hides=one.hides,
            begins_early=one.begins_early,
            flags=next((one.values[key] for key in (chip, platform) if key in one.values), None),
        )
        for name, one in preset_file().presets.items()
    }
