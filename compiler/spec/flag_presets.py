"""XLA flag presets: named sets of options for a chip, read from conf/overlap/_flag_presets.yaml."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, Self

from pydantic import Field, model_validator

from meshloom.models.record import Record

from ..core.config_types import CompilerOption
from ..core.traffic import CollectiveKind
from .own_config import own_config

Moved = Literal["weights", "activations"]
Options = Mapping[str, CompilerOption]


@dataclass(frozen=True)
class FlagPreset:
    """One preset, for one target.

    flags: the options; None if the preset has none for the target and cannot be chosen. hides: kinds of collectives
    that it overlaps with compute. begins_early: kinds that it starts in the loop iteration before the one that needs
    them. tried_for: what `overlap.search` tries to hide with it; empty: never tried. is_default: part of `auto`.
    inert: why the target's programs are the same without it; None if they are not.
    """

    tried_for: tuple[Moved, ...]
    hides: tuple[CollectiveKind, ...]
    begins_early: bool
    flags: Options | None
    is_default: bool = False
    inert: str | None = None

    @property
    def is_offered(self) -> bool:
        """Returns True if it has options for the target, and they change its programs."""
        return self.flags is not None and self.inert is None


class OptionNote(Record):
    """One option. since: the oldest compiler known to have it. hazard: what it may cost or break; None: nothing
    known."""

    what: str
    why: str
    since: str
    hazard: str | None


class EnvironmentNote(Record):
    """A setting that only a process's environment can make. values: what `meshloom launch` sets, by chip or platform;
    a chip's takes precedence. Where there is none, it is left to the user."""

    what: str
    why: str
    values: dict[str, str]


class PresetEntry(Record):
    """A preset in the file. values: options by chip or platform; a chip's take precedence over its platform's.
    default_for: chips. inert: by chip or platform, why its programs are the same without the preset."""

    what: str
    tried_for: tuple[Moved, ...]
    hides: tuple[CollectiveKind, ...]
    begins_early: bool
    values: dict[str, dict[str, CompilerOption]]
    default_for: tuple[str, ...] = ()
    inert: dict[str, str] = Field(default_factory=dict)


class FlagPresetFile(Record):
    """The file: every preset, and a note on every option that a preset uses."""

    presets: dict[str, PresetEntry]
    options: dict[str, OptionNote]
    environment: dict[str, EnvironmentNote]

    @model_validator(mode="after")
    def _check(self) -> Self:
        used = {name for one in self.presets.values() for values in one.values.values() for name in values}
        if used != set(self.options):
            raise ValueError(
                f"options need a preset and a description; one is missing: {sorted(used ^ set(self.options))}"
            )
        return self


@cache
def preset_file() -> FlagPresetFile:
    """Returns the contents of the file in conf/."""
    return FlagPresetFile.model_validate_json(json.dumps(own_config("overlap/_flag_presets.yaml")))


def read_flag_presets(platform: str, chip: str | None) -> dict[str, FlagPreset]:
    """Returns every preset by name, as it is for a chip of a platform. chip None: any device of the platform."""
    keys = (chip, platform)
    return {
        name: FlagPreset(
            tried_for=one.tried_for,
            hides=one.hides,
            begins_early=one.begins_early,
            flags=next((one.values[key] for key in keys if key in one.values), None),
            is_default=chip in one.default_for,
            inert=next((one.inert[key] for key in keys if key in one.inert), None),
        )
        for name, one in preset_file().presets.items()
    }


def read_environment(platform: str, chip: str | None) -> dict[str, str]:
    """Returns the variables that a process needs besides compile options, for a chip of a platform."""
    notes = preset_file().environment.items()
    found = {name: note.values.get(chip or "", note.values.get(platform)) for name, note in notes}
    return {name: value for name, value in found.items() if value is not None}
