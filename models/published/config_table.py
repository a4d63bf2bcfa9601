"""config.json of a family as a table: each entry is a key, or a few that belong together, and says how it is read, how
it is written, and which of our models can be written so.

    key("num_key_value_heads", "num_kv_heads", missing=8)    a number; transformers takes 8 where the file does not say
    flag("tie_word_embeddings", "embeddings", "tied", "separate", missing=False)
    choice("hidden_act", "mlp_activation", {"silu": "silu"}, missing="silu")
    only("mlp_bias", False)                                  anything else is not implemented
    ours(norm="rms")                                         no key says so: the family has it
    unread("sliding_window_size")                            transformers does not read it
    Entry(("n_group", "topk_group"), (..), read, write)      what needs functions
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

from .config_json import MISSING, Reader
from .contract import SOME, Fits, Values


@dataclass(frozen=True)
class Entry:
    """An entry of a table.

    names: keys of config.json. ours: keys of our config. read: takes the reader and what the entries before it have
    read, and returns values of ours. write: takes our config, and returns values of config.json. fits: the values of
    ours with which a config can be written, SOME for any but null; keys that it does not name are free.
    """

    names: tuple[str, ...]
    ours: tuple[str, ...]
    read: Callable[[Reader, Values], Values]
    write: Callable[[Any], Values] = lambda config: {}
    fits: Fits = field(default_factory=dict)


Table = tuple[Entry, ...]


def key(
    name: str,
    our: str,
    *,
    missing: Any = MISSING,
    kind: Literal["number", "count", "optional"] = "number",
    aliases: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
    to_ours: Callable[[Any, Values], Any] = lambda value, read: value,
    to_published: Callable[[Any], Any] | None = None,
) -> Entry:
    """Returns the entry of a number.

    our: key; below another one with a dot. missing: what transformers takes for a missing key or null, perhaps by what
    was read before; without it the key has to be there. "optional": null is None. aliases: names that are read where
    the file does not have `name`. also: other names under which it is written, too.
    """
    above, _, below = our.partition(".")

    def read(reader: Reader, before: Values) -> Values:
        otherwise: Any = missing(before) if callable(missing) else missing
        if kind == "optional":
            value = reader.optional(name, otherwise)
        else:
            value = getattr(reader, kind)(name, *aliases, otherwise=otherwise)
        value = to_ours(value, before)
        return {above: {**before.get(above, {}), below: value}} if below else {above: value}

    def write(config: Any) -> Values:
        return dict.fromkeys((name, *also), (to_published or attrgetter(our))(config))

    names = tuple(dict.fromkeys((name, *aliases, *also)))
    return Entry(names, (above,), read, write, {above: (SOME,)} if below else {})


def flag(name: str, our: str, yes: str, no: str, *, missing: bool) -> Entry:
    """Returns the entry of a key that is true or false for two values of ours."""

    def read(reader: Reader, _before: Values) -> Values:
        return {our: yes if reader.flag(name, otherwise=missing) else no}

    return Entry((name,), (our,), read, lambda config: {name: getattr(config, our) == yes}, {our: (yes, no)})


def choice(name: str, our: str, values: Mapping[str, str], *, missing: str, also: tuple[str, ...] = ()) -> Entry:
    """Returns the entry of a name. values: ours by theirs; of several for the same, the first is written."""

    def read(reader: Reader, _before: Values) -> Values:
        named = reader.text(name, otherwise=missing)
        if named not in values:
            reader.refuse(name, f"'{named}' is not implemented", f"use a model with {', '.join(values)}")
        return {our: values.get(named)}

    def write(config: Any) -> Values:
        theirs = next(theirs for theirs, value in values.items() if value == getattr(config, our))
        return dict.fromkeys((name, *also), theirs)

    return Entry((name, *also), (our,), read, write, {our: tuple(dict.fromkeys(values.values()))})


def only(name: str, *allowed: Any, fix: str = "", is_written: bool = False) -> Entry:
    """Returns the entry of a key that has to have one of these values: the first where it is missing, or written."""

    def read(reader: Reader, _before: Values) -> Values:
        reader.only(name, *allowed, otherwise=allowed[0], fix=fix)
        return {}

    return Entry((name,), (), read, lambda config: {name: allowed[0]} if is_written else {})


def ours(**values: Any) -> Table:
    """Returns entries of our keys that are the same in all models of a family, and in no key of config.json."""
    return tuple(
        Entry((), (our,), lambda reader, before, our=our, value=value: {our: value}, fits={our: (value,)})
        for our, value in values.items()
    )


def unread(*names: str, written: Callable[[Any], Values] = lambda config: {}) -> Entry:
    """Returns the entry of keys that transformers does not read. written: the keys that are written for others."""
    return Entry(names, (), lambda reader, before: {}, written)


def changed(table: Table, *entries: Entry) -> Table:
    """Returns a table in which these entries replace entries of the same keys."""
    names = {name for entry in entries for name in entry.names}
    keys = {our for entry in entries for our in entry.ours}
    return tuple(entry for entry in table if names.isdisjoint(entry.names) and keys.isdisjoint(entry.ours)) + entries


def fits_of(table: Table) -> dict[str, tuple[Any, ...]]:
    """Returns the values of our keys with which a config can be written by a table."""
    return {our: allowed for entry in table for our, allowed in entry.fits.items()}


def read_table(table: Table, reader: Reader) -> dict[str, Any]:
    """Returns the keys of our config that a config.json says."""
    read: dict[str, Any] = {}
    for entry in table:
        reader.asked.update(entry.names)
        read |= entry.read(reader, read)
    return read


def write_table(table: Table, config: Any) -> dict[str, Any]:
    """Returns the keys of config.json for one of our configs."""
    return {name: value for entry in table for name, value in entry.write(config).items()}
