"""Limits on the size of a declaration: a few lines of YAML aliases or interpolations can expand to 10^9 values.

The expanded size is counted before anything is expanded, in time proportional to the file's own size. OmegaConf has no
limit of its own: it takes 26 s for five lines of aliases, 230 characters that come to 10^5 values, and 35 s for five of
interpolations that come to 10^6 characters; one more line of either takes ten times as long (OmegaConf 2.3.1).
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf.errors import OmegaConfBaseException

from ..core.errors import ConfigError, Problem
from ..core.key_paths import value_at
from . import hydra_private

MOST_VALUES = 10_000
MOST_NESTED = 50
MOST_CHARACTERS = 1_000_000  # of a text that is made of interpolations
MEND = "correct the file"
WRITE_OUT = "write the values out"

# `${a.b}` and `${oc.select:a.b}`, innermost first: the keys that a text refers to.
_REFERENCE = re.compile(r"\$\{\s*(?:oc\.(?:select|deprecated|dict\.keys|dict\.values)\s*:\s*)?([^\s${}:,]+)")


class FileConfigSource(hydra_private.FileConfigSource):
    """Hydra's folders of configs, with a check of each file before it is expanded."""

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        if path.is_file():
            check_file(path)
        try:
            return super().load_config(config_path)
        except (ConfigError, HydraException, OmegaConfBaseException, yaml.MarkedYAMLError, OSError):
            raise
        except Exception as error:  # OmegaConf and YAML raise many other exceptions for a file that they cannot read
            raise _file_error(path, _first_line(error)) from error


def check_file(path: Path) -> None:
    """Raises ConfigError for a YAML file that is not text, or that expands to too much."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ConfigError([Problem(f"{path}:{line}", "is not UTF-8", "save the file as UTF-8")]) from error
    try:
        num_values = _num_values(yaml.parse(text, Loader=yaml.SafeLoader), path)
    except yaml.MarkedYAMLError:  # reported when it is loaded
        return
    except yaml.YAMLError as error:  # characters that YAML does not allow
        raise _file_error(path, _first_line(error)) from error
    if num_values > MOST_VALUES:
        raise _file_error(path, f"has more than {MOST_VALUES:,} values once aliases are expanded")


def check_references(values: Mapping[str, Any]) -> None:
    """Raises ConfigError if interpolations refer to themselves, or expand to too much. values: unresolved."""
    sizes: dict[str, tuple[int, int]] = {}

    def size(key: str, above: tuple[str, ...]) -> tuple[int, int]:
        """Returns the numbers of values and of characters that `key` expands to."""
        too_much = f"its interpolations expand to more than {MOST_VALUES:,} values or {MOST_CHARACTERS:,} characters"
        if key in above:
            chain = " -> ".join([*above[above.index(key) :], key])
            raise ConfigError([Problem(key, f"refers to itself: {chain}", "give it a value")])
        if len(above) > MOST_NESTED:
            what = f"refers to a value through a chain of more than {MOST_NESTED} keys"
            raise ConfigError([Problem(above[0], what, WRITE_OUT)])
        if key not in sizes:
            found = list(_leaves(value_at(values, key), key))
            parts = [size(each, (*above, key)) for path, text in found for each in _referred(path, text)]
            num_values = len(found) + sum(part[0] for part in parts)
            num_characters = sum(len(text) for _, text in found) + sum(part[1] for part in parts)
            if num_values > MOST_VALUES or num_characters > MOST_CHARACTERS:
                raise ConfigError([Problem((*above, key)[0], too_much, WRITE_OUT)])
            sizes[key] = num_values, num_characters
        return sizes[key]

    for path, text in _leaves(values, ""):
        if "${" in text:
            size(path, ())


def _num_values(events: Iterator[Any], path: Path) -> int:
    """Returns the number of values that a file expands to, without expanding its aliases."""
    anchored: dict[str, int | None] = {}  # None: not complete yet
    counts, names = [0], [None]
    for event in events:
        match event:
            case yaml.AliasEvent():
                if anchored.get(event.anchor, 0) is None:
                    raise _file_error(path, f"the alias *{event.anchor} refers to a node that contains it", event)
                counts[-1] += anchored.get(event.anchor) or 0
            case yaml.ScalarEvent():
                anchored[event.anchor or ""] = 1
                counts[-1] += 1
            case yaml.CollectionStartEvent():
                anchored[event.anchor or ""] = None
                counts.append(1)
                names.append(event.anchor)
                if len(counts) > MOST_NESTED:
                    raise _file_error(path, f"is nested deeper than {MOST_NESTED} levels", event)
            case yaml.CollectionEndEvent():
                count = counts.pop()
                anchored[names.pop() or ""] = count
                counts[-1] += count
        if counts[-1] > MOST_VALUES:  # the rest can only add to it
            break
    return max(counts)


def _file_error(path: Path, what: str, event: Any = None) -> ConfigError:
    line = f":{event.start_mark.line + 1}" if event else ""
    return ConfigError([Problem(f"{path}{line}", what, MEND)])


def _first_line(error: Exception) -> str:
    text = str(error).partition(";")[0] or type(error).__name__
    return f"cannot be read: {text.splitlines()[0]}"


def _leaves(node: Any, path: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yields each key of a tree with its text; other values than text as an empty one."""
    if depth > MOST_NESTED:
        what = f"is nested deeper than {MOST_NESTED} levels"
        raise ConfigError([Problem(path.partition(".")[0], what, "write it in fewer levels")])
    if isinstance(node, Mapping | list):
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _leaves(value, f"{path}.{key}" if path else str(key), depth + 1)
    else:
        yield path, node if isinstance(node, str) else ""


def _referred(path: str, text: str) -> Iterator[str]:
    """Yields the keys that a text refers to, from the root: in a.b `${.c}` is a.c."""
    for reference in _REFERENCE.findall(text):
        name = reference.lstrip(".")
        num_dots = len(reference) - len(name)
        base = path.split(".")[:-num_dots] if num_dots else []
        yield ".".join([*base, *re.split(r"[.\[\]]+", name.rstrip("]"))]).rstrip(".")
