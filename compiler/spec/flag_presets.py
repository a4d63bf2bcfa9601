"""XLA's options for overlap, and flag presets, which are named sets of them; read from conf/overlap/_flag_presets.yaml.

What an option does to overlap is said of the option, so that it counts the same from a preset and written by hand.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, Self

from pydantic import Field, model_validator

from meshloom.models.record import Record

from ..core.config_types import CompilerOption, UpToOne
from ..core.traffic import CollectiveKind
from .own_config import own_config

Moved = Literal["weights", "activations"]
Options = Mapping[str, CompilerOption]
_ON, _OFF = ("true", "1", "enabled"), ("false", "0", "disabled")


@dataclass(frozen=True)
class OptionEffect:
    """The effect of an option on overlap, on one target.

    hides: kinds of collectives that run beside compute while it is on. needs: options without which it does nothing.
    is_default: whether the compiler has it on by itself. begins_early: whether it starts collectives in the loop
    iteration before the one that needs them. waits: kinds of collectives that are waited for, by the word of its value.
    unless: options with which they are not. sends_from_matmuls: whether matmuls send chunks of what it hides.
    matmul_share: the share of the peak that matmuls reach with a value of at_least and more. is_at_once: whether its
    value is the number of collectives that are on their way at once.
    """

    hides: tuple[CollectiveKind, ...]
    needs: tuple[str, ...]
    is_default: bool
    begins_early: bool
    waits: Mapping[str, CollectiveKind]
    unless: tuple[str, ...]
    sends_from_matmuls: bool
    matmul_share: float | None
    at_least: float
    is_at_once: bool


Effects = Mapping[str, OptionEffect]


def hidden_by(options: Options, effects: Effects, *, by_default: bool = True) -> frozenset[CollectiveKind]:
    """Returns the kinds of collectives that run beside compute with these options. by_default: also those that do so
    by options that are on where nothing is said of them."""

    def is_on(name: str) -> bool:
        return _is_on(options.get(name), default=effects[name].is_default)

    asked = effects if by_default else effects.keys() & options.keys()
    working = (effects[name] for name in asked if all(map(is_on, (name, *effects[name].needs))))
    hidden: set[CollectiveKind] = {kind for one in working for kind in one.hides}
    holding = ((name, one) for name, one in effects.items() if not any(map(is_on, one.unless)))
    waits = ((options.get(name), word, kind) for name, one in holding for word, kind in one.waits.items())
    return frozenset(hidden - {kind for value, word, kind in waits if _names(value, word)})


def begin_early(options: Options, effects: Effects) -> bool:
    """Returns True if one of these options starts collectives in the loop iteration before."""
    return any(one.begins_early and _is_on(options.get(name), default=False) for name, one in effects.items())


def sent_at_once(options: Options, effects: Effects) -> int:
    """Returns the number of collectives that the compiler has on their way at once with these options."""
    return max([1, *(int(_number(options.get(name))) for name, one in effects.items() if one.is_at_once)])


def matmul_share_by(options: Options, effects: Effects) -> float | None:
    """Returns the share of the peak that matmuls reach with one of these options; None if none changes it."""
    shares = (
        one.matmul_share
        for name, one in effects.items()
        if one.matmul_share is not None and _number(options.get(name)) >= one.at_least
    )
    return max(shares, default=None)


def _number(value: CompilerOption | None) -> float:
    """Returns the number that an option's value is, as a type or as text; else 0."""
    try:
        return float(value or 0)
    except ValueError:
        return 0.0


def _names(value: CompilerOption | None, word: str) -> bool:
    """Returns True if a value is a list that has a word, or, where that is `true`, if it turns the option on."""
    return _is_on(value, default=False) if word == "true" else word.lower() in str(value).lower().split(",")


def _is_on(value: CompilerOption | None, *, default: bool) -> bool:
    """Returns True if a value, as a type or as text, turns an option on. default: for none, and for any other value."""
    word = str(value).lower()
    return word in _ON or (default and word not in _OFF)


@dataclass(frozen=True)
class FlagPreset:
    """One preset, for one target.

    flags: the options; None if the preset has none for the target and cannot be chosen. hides: kinds of collectives
    that these options overlap with compute. tried_for: what `overlap.search` tries to hide with it; empty: never tried.
    is_default: part of `auto`; is_default_for_experts, is_default_for_parts: where the model has experts, or the batch
    is split. inert: why the target's programs are the same without it; None if they are not.
    """

    tried_for: tuple[Moved, ...]
    hides: tuple[CollectiveKind, ...]
    flags: Options | None
    is_default: bool = False
    is_default_for_experts: bool = False
    is_default_for_parts: bool = False
    inert: str | None = None

    @property
    def is_offered(self) -> bool:
        """Returns True if it has options for the target, and they change its programs."""
        return self.flags is not None and self.inert is None


class OptionNote(Record):
    """One option. since: the oldest compiler known to have it. hazard: what it may cost or break; None: nothing
    known. hides: kinds of collectives, by chip or platform; a chip's take precedence. default_for: chips and platforms
    whose compiler has it on by itself. matmul_share: by chip, with its source. The others: as of `OptionEffect`."""

    what: str
    why: str
    since: str
    hazard: str | None
    hides: dict[str, tuple[CollectiveKind, ...]] = Field(default_factory=dict)
    needs: tuple[str, ...] = ()
    default_for: tuple[str, ...] = ()
    begins_early: bool = False
    waits: dict[str, CollectiveKind] = Field(default_factory=dict)
    unless: tuple[str, ...] = ()
    sends_from_matmuls: bool = False
    matmul_share: dict[str, UpToOne] = Field(default_factory=dict)
    at_least: float = 0.0
    is_at_once: bool = False
    source: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.matmul_share) != bool(self.source):
            raise ValueError(f"a share of the peak needs a source: {self.what}")
        return self


class EnvironmentNote(Record):
    """A setting that only a process's environment can make. values: what `meshloom launch` sets, by chip or platform;
    a chip's takes precedence. Where there is none, it is left to the user."""

    what: str
    why: str
    values: dict[str, str]


class PresetEntry(Record):
    """A preset in the file. values: options by chip or platform; a chip's take precedence over its platform's.
    default_for, default_for_experts, default_for_parts: chips and platforms, where it is not inert. inert: by chip or
    platform, why its programs are the same without the preset."""

    what: str
    tried_for: tuple[Moved, ...]
    values: dict[str, dict[str, CompilerOption]]
    default_for: tuple[str, ...] = ()
    default_for_experts: tuple[str, ...] = ()
    default_for_parts: tuple[str, ...] = ()
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
        if unknown := {name for one in self.options.values() for name in (*one.needs, *one.unless)} - set(self.options):
            raise ValueError(f"options that others name have no description: {sorted(unknown)}")
        return self


@cache
def preset_file() -> FlagPresetFile:
    """Returns the contents of the file in conf/."""
    return FlagPresetFile.model_validate_json(json.dumps(own_config("overlap/_flag_presets.yaml")))


def read_flag_presets(platform: str, chip: str | None) -> dict[str, FlagPreset]:
    """Returns every preset by name, as it is for a chip of a platform. chip None: any device of the platform."""
    keys, found = (chip, platform), dict[str, FlagPreset]()
    effects = read_option_effects(platform, chip)
    for name, one in preset_file().presets.items():
        flags = next((one.values[key] for key in keys if key in one.values), None)
        inert = next((one.inert[key] for key in keys if key in one.inert), None)
        found[name] = FlagPreset(
            tried_for=one.tried_for,
            hides=tuple(sorted(hidden_by(flags or {}, effects, by_default=False))),
            flags=flags,
            is_default=inert is None and any(key in one.default_for for key in keys),
            is_default_for_experts=inert is None and any(key in one.default_for_experts for key in keys),
            is_default_for_parts=inert is None and any(key in one.default_for_parts for key in keys),
            inert=inert,
        )
    return found


def read_option_effects(platform: str, chip: str | None) -> dict[str, OptionEffect]:
    """Returns what each option does to overlap on a chip of a platform. chip None: any device of the platform."""
    keys = (chip, platform)
    return {
        name: OptionEffect(
            hides=next((one.hides[key] for key in keys if key in one.hides), ()),
            needs=one.needs,
            is_default=any(key in one.default_for for key in keys),
            begins_early=one.begins_early,
            waits=one.waits,
            unless=one.unless,
            sends_from_matmuls=one.sends_from_matmuls,
            matmul_share=one.matmul_share.get(chip or ""),
            at_least=one.at_least,
            is_at_once=one.is_at_once,
        )
        for name, one in preset_file().options.items()
    }


def read_environment(platform: str, chip: str | None) -> dict[str, str]:
    """Returns the variables that a process needs besides compile options, for a chip of a platform."""
    notes = preset_file().environment.items()
    found = {name: note.values.get(chip or "", note.values.get(platform)) for name, note in notes}
    return {name: value for name, value in found.items() if value is not None}
