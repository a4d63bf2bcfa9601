"""Reads config files, and refuses the settings that they may not make: only the command line sets those of TYPED_ONLY.

A config file here is one that is not Meshloom's own: from --config-dir, --config-path or hydra.searchpath. It may not
run or load code, send values away, or use up the machine by expanding to a large declaration (docs/security.md).
"""

import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..core.errors import ConfigError, Problem
from ..core.key_paths import is_within, leaves, value_at
from ..core.places import is_url
from ..core.user_code import check_importable
from ..spec import target_names
from ..spec.attached import AUTO, LOCAL, automatic
from . import hydra_private
from .hydra_settings import SEARCH_PATH

OWN_SOURCES = {("pkg", "hydra.conf"), ("pkg", "meshloom.conf"), ("meshloom", "targets"), ("structured", "")}

# The part of Hydra's own node that a config file may set: names of folders, and text that is shown.
FREE_OF_HYDRA = ("run.dir", "sweep.dir", "sweep.subdir", "searchpath", "help", "hydra_help", "verbose", "runtime",
                 "overrides", "job.name", "job.config_name", "job.override_dirname", "job.id", "job.num",
                 "job.config")  # fmt: skip

_NAMES_A_PLACE = re.compile(r"dump|file|path|(^|_)dir|_to$|_from$|denylist|plugin|librar|extra_flags")
_OF_VARIABLE = re.compile(r"\$\{oc\.env:\w+\}(/[^$]*)?")
_OF_KEY = re.compile(r"\$\{([A-Za-z_][\w.]*)\}(/[^$]*)?")

# OmegaConf copies what an alias names, and resolves each reference anew: ten lines of ten each become 10^10 values. So
# a file is counted while it is parsed, and references are counted before one is resolved.
MOST_VALUES = 10_000
MOST_NESTED = 50
MOST_CHARACTERS = 1_000_000  # of a text that is made of interpolations
MEND = "correct the file"
WRITE_OUT = "write the values out"

# `${a.b}` and `${oc.select:a.b}`, innermost first: the keys that a text refers to.
_REFERENCE = re.compile(r"\$\{\s*(?:oc\.(?:select|deprecated|dict\.keys|dict\.values)\s*:\s*)?([^\s${}:,]+)")
MOST_BITS = 1024  # of a whole number; every field accepts far fewer


class CheckedPackages(hydra_private.ImportlibResourcesConfigSource):
    """Reads Hydra's `pkg://a.b`, after a check that a.b may be imported.

    Meshloom's own files and Hydra's do not change while a process runs. To list and parse those of a composition takes
    half of its time (compositions.py), so each folder is listed once, and each file parsed once.
    """

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        check_importable(self.path, SEARCH_PATH)
        self.is_own = (self.scheme(), self.path) in OWN_SOURCES

    def available(self) -> bool:
        return self.is_own or super().available()

    def is_group(self, config_path: str) -> bool:
        if not self.is_own:
            return super().is_group(config_path)
        return config_path.strip("/") in _own_names(self.path)[0]

    def is_config(self, config_path: str) -> bool:
        if not self.is_own:
            return super().is_config(config_path)
        return f"{config_path.removesuffix('.yaml')}.yaml" in _own_names(self.path)[1]

    def load_config(self, config_path: str) -> ConfigResult:
        if not self.is_own:
            return super().load_config(config_path)
        header, values = _own_file(self.path, self._normalize_file_name(config_path))
        return ConfigResult(self.provider, f"pkg://{self.path}", pickle.loads(values), dict(header))


@cache
def _own_names(package: str) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the folders of a package, and its files, as paths below it."""
    top = str(files(package))
    found = [(os.path.relpath(folder, top), names) for folder, _, names in os.walk(top)]
    folders = frozenset("" if folder == "." else folder for folder, _ in found)
    return folders, frozenset(os.path.normpath(f"{folder}/{name}") for folder, names in found for name in names)


@cache
def _own_file(package: str, name: str) -> tuple[dict[str, str | None], bytes]:
    header, values = hydra_private.parse_config((files(package) / name).read_text(encoding="utf-8"))
    return header, pickle.dumps(OmegaConf.create(values))


class StructuredConfigSource(hydra_private.StructuredConfigSource):
    """Reads Hydra's `structured://a.b`, with the same check. Hydra finds its last source by this class name."""

    def __init__(self, provider: str, path: str) -> None:
        module = path.removeprefix(f"{self.scheme()}://")
        if module:
            check_importable(module, SEARCH_PATH)
        super().__init__(provider, path)


class FileConfigSource(hydra_private.FileConfigSource):
    """Reads Hydra's folders of configs, with a check of each file before it is expanded."""

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


class TargetNames(ConfigSource):
    """Provides `target/KIND-N` and `target/KIND:AxB` for every size that exists, so that these names work in overrides,
    in sweeps and in the defaults list of a file."""

    @staticmethod
    def scheme() -> str:
        return "meshloom"

    def load_config(self, config_path: str) -> ConfigResult:
        name, config = _target(config_path), dict[str, Any](defaults=[LOCAL])
        if name == AUTO:
            name, _ = automatic()
        if name != LOCAL:
            size = target_names.parse_name(name)
            assert size, config_path  # Hydra asks is_config first
            kind, values = size
            config = {"defaults": [f"_{kind}", "_self_"], **values}
        return ConfigResult(
            provider=self.provider, path=self.full_path(), config=OmegaConf.create(config), header={"package": None}
        )

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", "target")

    def is_config(self, config_path: str) -> bool:
        return config_path.startswith("target/") and target_names.is_sized(_target(config_path))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "" and results_filter != ObjectType.CONFIG:
            return ["target"]
        if config_path == "target" and results_filter != ObjectType.GROUP:
            return [AUTO] + [
                name for kind in target_names.kinds() for name in target_names.examples(kind)
            ]  # shell completion shows them
        return []


def register_sources() -> None:
    """Makes Hydra use these sources for configs; needed before composing."""
    hydra_private.replace_sources((CheckedPackages, FileConfigSource, StructuredConfigSource))
    Plugins.instance().register(TargetNames)


@dataclass(frozen=True)
class FileValue:
    """A value that a config file sets, unresolved. composed: the whole declaration. values: the same as plain values
    with their interpolations unresolved."""

    composed: DictConfig
    values: dict[str, Any]
    key: str
    value: Any

    @property
    def is_set(self) -> bool:
        return self.value not in (None, "???")

    @property
    def names_a_place(self) -> bool:
        return bool(_NAMES_A_PLACE.search(self.key.partition(".")[2]))

    @property
    def may_be_url(self) -> bool:
        """Returns True for a URL to which a run would send what it makes. An interpolation may be one, too."""
        text = self.value if isinstance(self.value, str) else ""
        return "${" in text or (is_url(text) and not text.startswith("sqlite:"))

    @property
    def carries(self) -> bool:
        """Returns True if a text with interpolations is a URL, or becomes one when they are resolved: its pieces may
        lie in several keys. A place that one key or variable names, or a path below it, receives no other value."""
        texts = [text for _, text in _leaves(self.value, "") if "${" in text]
        if any("://" in text for text in texts):
            return True
        if all(self._is_below_one(text) for text in texts):
            return False
        if value_at(self.values, self.key) is None:  # a name with a dot, which cannot be resolved by itself
            return True
        check_references(self.values)
        try:
            value = OmegaConf.select(self.composed, self.key)
            return "://" in str(OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value)
        except OmegaConfBaseException:  # reported where all values are resolved
            return False

    def _is_below_one(self, text: str) -> bool:
        """Returns True for `${oc.env:NAME}/path`, and for `${a.b}/path` where a.b is text without interpolations."""
        if _OF_VARIABLE.fullmatch(text):
            return True
        key = _OF_KEY.fullmatch(text)
        return bool(key) and isinstance(value := value_at(self.values, key[1]), str) and "${" not in value


TRUSTED, WANTED = "if you trust that place", "if you want it"
CARRIED = "its URL would carry the value of an interpolation to that place"
# What only the command line may set: a key, and all keys below it; why; which of its values; when to type it.
TYPED_ONLY: tuple[tuple[str, str, Callable[[FileValue], bool], str], ...] = (
    ("artifact", "its programs are loaded, which runs code", lambda each: each.is_set, TRUSTED),
    ("evaluation.tasks_path", "a task may name code, which runs", lambda each: each.is_set, TRUSTED),
    ("compilation_cache", "the programs in it are loaded, which runs code", lambda each: each.is_set, TRUSTED),
    ("distributed.coordinator_address", "every process connects to it", lambda each: each.is_set, TRUSTED),
    ("compiler_options", "XLA may write to the place that it names, or run files there",
     lambda each: each.names_a_place or (each.key == "compiler_options" and isinstance(each.value, str)), WANTED),
    ("data", CARRIED, lambda each: each.carries, TRUSTED),
    ("checkpoint.restore_from", CARRIED, lambda each: each.carries, TRUSTED),
    ("checkpoint.weights_from", CARRIED, lambda each: each.carries, TRUSTED),
    ("checkpoint.directory", "the state of the run would be saved there", lambda each: each.may_be_url, TRUSTED),
    ("shards.directory", "the tokens would be written there", lambda each: each.may_be_url, TRUSTED),
    ("logging.mlflow.uri", "the declaration and the metrics would be sent there", lambda each: each.may_be_url,
     TRUSTED),
    ("hydra", "Hydra's own settings may run code",
     lambda each: not any(is_within(each.key, f"hydra.{free}") for free in FREE_OF_HYDRA), WANTED),
)  # fmt: skip


def problems_of_files(composed: DictConfig, typed: Sequence[Override]) -> list[Problem]:
    """Returns the forbidden settings of config files. composed: with Hydra's node, unresolved. typed: the overrides."""
    if all((source.schema, source.path) in OWN_SOURCES for source in composed.hydra.runtime.config_sources):
        return []
    of_hydra = [each for each in typed if each.is_hydra_override() and each.key_or_group != SEARCH_PATH]
    try:  # what Meshloom's own files and the command line set
        own = hydra_private.compose_from("pkg://meshloom.conf", [each.input_line or "" for each in of_hydra])
    except HydraException:  # a choice of hydra/... that only a folder of configs has
        what, fix = "Hydra's own settings are chosen from a folder of configs, and may run code", "type them key by key"
        return [Problem("hydra", what, f"{fix}, such as hydra.job_logging.root.level=INFO")]
    own_values, values = dict(leaves(unresolved(own))), unresolved(composed)
    theirs = [(key, value) for key, value in leaves(values) if key not in own_values or own_values[key] != value]
    return [
        problem
        for key, value in theirs
        if (problem := _problem_of_value(FileValue(composed, values, key, value)))
        and not any(_sets(one, key) for one in typed if one not in of_hydra)  # which `own` has
    ]


def _problem_of_value(each: FileValue) -> Problem | None:
    for top, why, is_forbidden, condition in TYPED_ONLY:
        if is_within(each.key, top) and is_forbidden(each):
            typed = f"'{each.key}=...'" if top == "hydra" else f"{each.key}=..."
            fix = f"remove it from the file, and type {typed} {condition}"
            return Problem(each.key, f"a config file sets it, and {why}", fix)
        if is_within(top, each.key) and each.key != top and isinstance(each.value, str):
            what = f"a config file sets it to '{each.value}', which may set {top}"
            return Problem(each.key, what, "write its keys out in the file")
    return None


def unresolved(node: DictConfig) -> dict[str, Any]:
    """Returns the values with their interpolations as text."""
    values: Any = OmegaConf.to_container(node, resolve=False)
    return values


def _sets(override: Override, key: str) -> bool:
    """Returns True for a value of the key, or of a key above it that has this one. `data=theirs` chooses a file, which
    sets the keys, and a typed mapping is merged with those of files."""
    typed = override.key_or_group
    is_value = typed == key or value_at(override.value(), key.removeprefix(typed).lstrip(".")) is not None
    return is_value and is_within(key, typed) and not override.is_delete()


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


def plain_values(composed: DictConfig, texts: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Returns the values with interpolations resolved, and what is wrong with them. texts: with them unresolved.

    Keys that are still `???` are omitted, so that they count as missing. Raises ConfigError for interpolations that
    cannot be resolved in reasonable time.
    """
    check_references(texts)
    problems: list[Problem] = []

    def plain(node: Any, key: str) -> Any:
        if isinstance(node, dict):
            return {
                str(name): plain(value, f"{key}.{name}" if key else str(name))
                for name, value in node.items()
                if not (isinstance(value, str) and value == "???")
            }
        if isinstance(node, list):
            return [plain(value, f"{key}[{index}]") for index, value in enumerate(node)]
        if what := _not_plain(node):
            problems.append(Problem(key, what, "write a number, text in quotes, true, false or null"))
            return None
        return node

    return plain(OmegaConf.to_container(composed, resolve=True), ""), problems


def _not_plain(value: Any) -> str | None:
    """Returns what is wrong with a value, or None."""
    if isinstance(value, str):
        return "is not Unicode text" if any("\ud800" <= character <= "\udfff" for character in value) else None
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return f"is a number of {value.bit_length():,} bits"
    if value is None or isinstance(value, bool | int | float):
        return None
    return f"has the type {type(value).__name__}, which a declaration cannot hold"


def _target(config_path: str) -> str:
    return config_path.removeprefix("target/").removesuffix(".yaml")
