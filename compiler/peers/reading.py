"""What all peers share: the keys that a declaration of theirs gives, and what each of them becomes here.

A peer is a table of its keys (`conf_of`) and a function that reads those which decide the program. Each key that is
given is read, or has no effect here, or is refused with what is missing; another key is unknown to the peer. All
problems are reported at once.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from textwrap import shorten
from typing import Any

import yaml

from ..core.errors import ConfigError, Problem, meant_by, use_one_of
from ..core.format import counted
from ..spec.own_config import LOADER, own_config

_UNSET = re.compile(r"\$[\w{(]")  # a variable that a script does not set, or what only a shell can compute
_PLAIN = ("true", "false", "null")  # that files have in quotes
NOTHING = (None, "", "None", "none")
_MOST_SHOWN = 60  # characters of a refused value
_MOST_UNKNOWN = 0.5  # of the keys: with more it is another tool's declaration


@dataclass(frozen=True)
class Given:
    """What was found of a peer's declaration: values by key, and where they are. flags: XLA's, as `--name=value`.
    notes: what is to be said of how it was read."""

    place: str
    values: Mapping[str, Any]
    flags: Sequence[str] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Peer:
    """Another trainer. defaults: of the keys that decide a program. refused: keys of which only some values can be
    honoured, with what is missing. no_effect: keys by what they are for. is_complete: these are all of its keys.
    source: of these, with its version."""

    name: str
    title: str
    source: str
    defaults: Mapping[str, Any]
    refused: Mapping[str, Mapping[str, Any]]
    no_effect: Mapping[str, Sequence[str]]
    tables: Mapping[str, Any]
    is_complete: bool

    @property
    def keys(self) -> frozenset[str]:
        return frozenset((*self.defaults, *self.refused, *(key for keys in self.no_effect.values() for key in keys)))


@dataclass(frozen=True)
class Override:
    """An override of ours. because: what of the peer's it comes from."""

    text: str
    because: str


@dataclass(frozen=True)
class Imported:
    """A peer's declaration as ours. without_effect: the other keys that it gives, by what they are for."""

    peer: Peer
    place: str
    overrides: tuple[Override, ...]
    without_effect: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(each.text for each in self.overrides)


@cache
def peer_of(name: str) -> Peer:
    """Returns a peer by the name of its table."""
    values = yaml.load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"), LOADER)
    return Peer(
        name=name,
        title=values["title"],
        source=values["source"],
        defaults=values["defaults"],
        refused=values["refused"],
        no_effect={what: tuple(keys) for what, keys in values["no_effect"].items()},
        tables=values["tables"],
        is_complete=values["is_complete"],
    )


def option_values(group: str, option: str) -> dict[str, Any]:
    """Returns the values of an option of ours, with those of the options that it is built on."""
    values = dict(own_config(f"{group}/{option}.yaml"))
    for base in values.pop("defaults", ()):
        if isinstance(base, str) and base != "_self_":
            values = option_values(group, base) | values
    return values


@dataclass
class PeerReading:
    """A peer's keys while they are read, with the overrides, notes and problems so far."""

    peer: Peer
    given: Given
    target: str | None  # that the user chose
    overrides: list[Override] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def value(self, key: str) -> Any:
        """Returns the value that is given, else the peer's default. Refuses a variable that nothing sets."""
        value = self.given.values.get(key, self.peer.defaults[key])
        if isinstance(value, str) and _UNSET.search(value):
            self.refuse(key, f"is {value}, and nothing that was read sets it", f"add {key}=... to the command")
            return self.peer.defaults[key]
        return value

    def number(self, key: str) -> float:
        value = self.value(key)
        try:
            if isinstance(value, bool) or not math.isfinite(number := float(value)):
                raise ValueError
            return number
        except (TypeError, ValueError, OverflowError):
            return self._not_a("number", key, value)

    def whole(self, key: str) -> int:
        value = self.number(key)
        return int(value) if value == int(value) else self._not_a("whole number", key, value)

    def count(self, key: str, *others: int) -> int:
        """Returns a whole number from 1. others: more values that it may have."""
        value = self.whole(key)
        if value < 1 and value not in others:
            self.refuse(key, f"is {value}", "use a whole number from 1")
            return 1
        return value

    def flag(self, key: str) -> bool:
        value = self.value(key)
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "1"):
            return True
        if str(value).lower() in ("false", "0", "none", ""):
            return False
        return self._not_a("truth value", key, value)

    def text(self, key: str) -> str:
        value = self.value(key)
        return "" if value is None else str(value)

    def one_of(self, key: str, table: Mapping[str, Any]) -> Any:
        """Returns what a word of the peer's means here. Refuses another word."""
        word = self.text(key)
        if word in table:
            return table[word]
        self.refuse(key, f"there is no '{word}' that we know", use_one_of(word, table))
        return None

    def is_given(self, key: str) -> bool:
        return key in self.given.values

    def put(self, override: str, because: str) -> None:
        self.overrides.append(Override(override, because))

    def model_value(self, key: str) -> Any:
        """Returns a value of the model that the overrides choose."""
        values: dict[str, Any] = {}
        for each in self.overrides:
            name, _, value = each.text.partition("=")
            if name == "model":
                values = option_values("model", value) | values
            elif name == f"model.{key}":
                values[key] = yaml.safe_load(value)
        return values.get(key)

    def said(self, *keys: str) -> str:
        """Returns keys with their values, as the source of an override: those that are given, else the default of
        the first."""
        given = [f"{key}={_shown(self.given.values[key])}" for key in keys if self.is_given(key)]
        return " ".join(given) or f"{keys[0]}={_shown(self.peer.defaults[keys[0]])}, its default"

    def refuse(self, key: str, what: str, fix: str) -> None:
        self.problems.append(Problem(f"{self.given.place}: {key}" if key else self.given.place, what, fix))

    def _not_a(self, kind: str, key: str, value: Any) -> Any:
        self.refuse(key, f"{_shown(value)} is not a {kind}", f"its default is {_shown(self.peer.defaults[key])}")
        default = self.peer.defaults[key]
        return default if isinstance(default, (int, float)) else 1


def _is_honoured(value: Any, rule: Mapping[str, Any]) -> bool:
    """Returns True for a value that means nothing else here, also in quotes. A long one is known by its digest."""
    plain = yaml.safe_load(value) if isinstance(value, str) and value.lower() in _PLAIN else value
    if plain in rule["unless"] or (plain in NOTHING and any(each in NOTHING for each in rule["unless"])):
        return True
    return "or_digest" in rule and sha256(json.dumps(value).encode()).hexdigest()[:12] in rule["or_digest"]


def _shown(value: Any) -> str:
    if isinstance(value, (bool, type(None))):
        return str(value).lower() if isinstance(value, bool) else "null"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return in_full(value) if isinstance(value, float) else str(value) or "''"


def in_full(value: float) -> str:
    """Returns a number as it is written in an override, with all of its digits."""
    return f"{value:.15g}"


def read_declaration(
    peer: Peer, given: Given, target: str | None, read: Callable[[PeerReading], None], others: Iterable[Peer] = ()
) -> Imported:
    """Returns a peer's declaration as ours. read: puts the overrides. Raises ConfigError with every problem."""
    reading = PeerReading(peer, given, target)
    unknown = [key for key in given.values if key not in peer.keys]
    if unknown and len(unknown) > _MOST_UNKNOWN * len(given.values):
        raise ConfigError([_not_of(peer, given, unknown, others)])
    for key in unknown:
        meant = meant_by(key, peer.keys)
        what = f"{peer.title} has no such key, as of {peer.source}"
        if not peer.is_complete:
            what = "is none of the keys that decide a program here, or are known to have no effect on one"
        fix = f"did you mean '{meant}'? Correct it, or leave it out" if meant else "leave it out"
        reading.refuse(key, what, fix)
    for key, rule in peer.refused.items():
        if reading.is_given(key) and not _is_honoured(value := given.values[key], rule):
            neutral = _shown(rule["unless"][0])
            fix = f"to import the program without it, add {key}={neutral}"
            reading.refuse(key, f"{shorten(_shown(value), _MOST_SHOWN, placeholder=' ..')}: {rule['missing']}", fix)
    read(reading)
    if reading.problems:
        raise ConfigError(reading.problems)
    without = {what: tuple(key for key in keys if key in given.values) for what, keys in peer.no_effect.items()}
    neutral = tuple(key for key in peer.refused if key in given.values)
    if neutral:
        without["as it is here"] = (*without.get("as it is here", ()), *neutral)
    return Imported(
        peer,
        given.place,
        tuple(dict.fromkeys(reading.overrides)),
        {what: keys for what, keys in without.items() if keys},
        (*given.notes, *reading.notes),
    )


def _not_of(peer: Peer, given: Given, unknown: Sequence[str], others: Iterable[Peer]) -> Problem:
    what = f"of its {counted(len(given.values), 'key')}, {peer.title} does not have {len(unknown)}, such as "
    what += ", ".join(sorted(unknown)[:3])
    for other in others:
        if sum(key in other.keys for key in given.values) > _MOST_UNKNOWN * len(given.values):
            return Problem(given.place, f"is a declaration of {other.title}", f"type: meshloom import {other.name} ...")
    return Problem(given.place, what, f"give a declaration of {peer.title}")
