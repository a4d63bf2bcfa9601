"""Finds a peer's declaration where it is: in a file of its own form, a script, a manifest, or on a command line."""

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml

from ..core.errors import ConfigError, Problem, raise_if_any
from ..core.format import counted, human_names
from ..core.places import is_url
from .reading import Given
from .shell import Script, ShellCommand, commands_of

_CHIPS_OF_GKE = {"tpu-v4-podslice": "v4", "tpu-v5-lite-podslice": "v5e", "tpu-v5p-slice": "v5p", "tpu-v6e-slice": "v6e",
                 "tpu7x": "tpu7x"}  # fmt: skip
_XLA_VARIABLES = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
_FORMS = {".yml": "yaml", ".yaml": "yaml", ".toml": "toml"}
_READ_FILES = (
    "sed",
    "cat",
    "cp",
    "mv",
    "ls",
    "chmod",
    "grep",
    "vi",
    "vim",
    "nano",
    "wget",
    "curl",
    "git",
)  # and run none
_UNSET = re.compile(r"\$\w+|\$\{[^}]*\}")  # a word that is a variable, and nothing else
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")

ReadText = Callable[[str], str]  # the text of a path or URL; raises ConfigError if it has none


class FormWords(NamedTuple):
    """What the words of a command declare. files: of the peer's own form, which it reads. strays: words after the
    train command that declare nothing."""

    values: dict[str, Any]
    files: Sequence[str] = ()
    strays: Sequence[str] = ()


@dataclass(frozen=True)
class Form:
    """How a peer's declarations look.

    files: the form of its own files, yaml or toml; empty for none. is_train: finds its train command. values: what the
    words of a command declare. of_file: the values of one of its files. wants: a train command of it, for messages.
    key: how a key is written, for messages. ignored_files: those that only have defaults. base_key: of a file, which
    names the file that it changes. file_variables: of the environment, which name a file. hints: what to do about a
    command that has this word. others: how commands of other trainers are found, by their names.
    """

    files: str
    is_train: Callable[[Sequence[str]], bool]
    values: Callable[[Sequence[str]], FormWords]
    of_file: Callable[[Mapping[str, Any]], dict[str, Any]]
    wants: str
    key: str
    ignored_files: tuple[str, ...] = ()
    base_key: str | None = None
    file_variables: tuple[str, ...] = ()
    hints: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, Callable[[Sequence[str]], bool]] = field(default_factory=dict)


def find_declaration(form: Form, words: Sequence[str], read_text: ReadText) -> tuple[Given, Mapping[str, str]]:
    """Returns what the words of a command line declare: a file and changes to it, a command as one word or many, or
    keys alone; and what a launcher says of the machines. Raises ConfigError if nothing is declared."""
    first = words[0]
    if not re.search(r"\s", first) and Path(first).is_dir():
        raise ConfigError([_folder(form, Path(first))])
    if not re.search(r"\s", first) and (is_url(first) or ("=" not in first and _names_a_file(first))):
        given, launcher = _of_file(form, first, read_text)
        changes, _, strays = form.values(words[1:])
        _check_strays(strays, given.place, form)
        return Given(given.place, {**given.values, **changes}, given.flags, given.notes), launcher
    if len(words) == 1 and re.search(r"\s", first):
        return _of_script(form, first, "command", "", read_text)
    return _of_commands(form, [ShellCommand(tuple(words), {})], "command", "", Script(), read_text, is_typed=True)


def _folder(form: Form, folder: Path) -> Problem:
    """Returns the problem of a folder: which of its files a declaration may be in."""
    suffixes = (".sh", ".md", *(suffix for suffix, kind in _FORMS.items() if kind == form.files))
    found = sorted(path for path in folder.iterdir() if path.suffix in suffixes)
    there = human_names([path.name for path in found], 3)
    what = f"is a folder, with {there}" if found else f"is a folder without a file {', '.join(suffixes)}"
    fix = f"name one of its files, such as {found[0]}" if found else "name a file"
    return Problem(str(folder), what, f"{fix}, or give {form.wants}")


def _names_a_file(word: str) -> bool:
    return _kind(word) is not None or PurePosixPath(word).suffix in (".sh", ".md", ".txt") or Path(word).is_file()


def _kind(place: str) -> str | None:
    """Returns the form of a file by its name, yaml or toml; None for a script."""
    path = PurePosixPath(place)
    return _FORMS.get((path.with_suffix("") if path.suffix in _COMPRESSED else path).suffix)


def _of_file(
    form: Form, place: str, read_text: ReadText, above: tuple[str, ...] = ()
) -> tuple[Given, Mapping[str, str]]:  # fmt: skip
    """Reads a file. above: those that name it as the file that they change."""
    text, kind, path = read_text(place), _kind(place), PurePosixPath(place)
    if kind is None:
        script = _fenced(text) if path.suffix == ".md" else text
        return _of_script(form, script, path.name, place.rpartition("/")[0], read_text)
    documents = _parsed(text, kind, place)
    other = {"toml": "torchtitan", "yaml": "maxtext"}[kind]
    if any("apiVersion" in document for document in documents):
        return _of_manifest(form, documents, place, read_text)
    if kind != form.files or len(documents) != 1:
        what = f"is a {kind.upper()} file" if len(documents) == 1 else f"holds {len(documents)} documents"
        fix = (
            f"type: meshloom import {other} {place}; or give {form.wants}" if kind != form.files else "give one of them"
        )
        raise ConfigError([Problem(place, what, fix)])
    values, base = form.of_file(documents[0]), documents[0].get(form.base_key or "")
    if base and PurePosixPath(str(base)).name not in form.ignored_files:
        below = _beside(str(base), place.rpartition("/")[0], path.name)
        if below in (place, *above):
            raise ConfigError([Problem(f"{path.name}: {form.base_key}", "names a file that names it", "correct it")])
        values = {**_of_file(form, below, read_text, (place, *above))[0].values, **values}
    return Given(path.name, values), {}


def _parsed(text: str, kind: str, place: str) -> list[dict[str, Any]]:
    try:
        if kind == "toml":
            return [tomllib.loads(text)]
        documents = [each for each in yaml.safe_load_all(text) if each is not None]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([Problem(place, f"is not valid TOML: {error}", "correct the file")]) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        what = f"is not valid YAML{where}: {getattr(error, 'problem', None) or error}"
        raise ConfigError([Problem(place, what, "correct the file")]) from None
    if not documents or not all(isinstance(each, dict) for each in documents):
        raise ConfigError([Problem(place, "holds no keys with values", "give a file of `key: value` lines")])
    return documents


def _fenced(markdown: str) -> str:
    """Returns the code blocks of a page, as one script."""
    return "\n".join(re.findall(r"^```\w*\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE))


def _of_manifest(
    form: Form, documents: Sequence[Any], place: str, read_text: ReadText
) -> tuple[Given, Mapping[str, str]]:
    """Reads the commands in the strings of a Kubernetes manifest, and its selectors of nodes."""
    texts, found = [], dict[str, str]()
    for key, value in _strings(documents):
        if key == "cloud.google.com/gke-tpu-topology":
            found["topology"] = value
        elif key == "cloud.google.com/gke-tpu-accelerator":
            found["chip"] = _CHIPS_OF_GKE.get(value, value)
        elif re.search(r"\s", value):
            texts.append(value)
    texts += _listed_commands(documents)
    given, launcher = _of_script(form, "\n".join(texts), PurePosixPath(place).name, "", read_text)
    if len(found) == 2:
        launcher = {"device_type": f"{found['chip']}-{found['topology']}", **launcher}
    return given, launcher


def _listed_commands(value: Any) -> Iterator[str]:
    """Yields the commands of containers that are lists of words, with their variables."""
    if isinstance(value, dict):
        words = [word for key in ("command", "args") for word in _texts(value.get(key))]
        if words and not any(re.search(r"\s", word) for word in words):
            variables = [each for each in value.get("env") or () if isinstance(each, dict) and "value" in each]
            set_ = " ".join(f"{each.get('name')}={shlex.quote(str(each['value']))}" for each in variables)
            yield f"{set_} {shlex.join(words)}"
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        yield from _listed_commands(child)


def _texts(value: Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    children = (
        value.items() if isinstance(value, dict) else [(key, each) for each in value] if isinstance(value, list) else ()
    )
    for name, child in children:
        yield from _strings(child, str(name))


def _of_script(form: Form, text: str, place: str, folder: str, read_text: ReadText) -> tuple[Given, Mapping[str, str]]:
    script = Script()
    return _of_commands(form, list(commands_of(text, script)), place, folder, script, read_text)


def _of_commands(
    form: Form,
    commands: Sequence[ShellCommand],
    place: str,
    folder: str,
    script: Script,
    read_text: ReadText,
    *,
    is_typed: bool = False,
) -> tuple[Given, Mapping[str, str]]:
    train = _train_command(form, commands, place, script, is_typed=is_typed)
    values, files, strays = form.values(train.words)
    unset = [word for word in strays if _UNSET.fullmatch(word)]
    _check_strays([word for word in strays if word not in unset], place, form)
    files = [*(train.environment[name] for name in form.file_variables if name in train.environment), *files]
    below: dict[str, Any] = {}
    for name in files:
        if PurePosixPath(name).name not in form.ignored_files:
            below |= _of_file(form, _beside(name, folder, place), read_text)[0].values
    notes = [
        f"${name} is set inside of a condition or a loop: its last value is taken"
        for name in script.branched
        if name in script.used and _is_in(script.variables.get(name, ""), train.words)
    ]
    notes += [f"nothing that was read sets {word}: what it adds is not known" for word in unset]
    flags = [flag for name in _XLA_VARIABLES for flag in train.environment.get(name, "").split()]
    upper = {key.removeprefix("M_").lower(): value for key, value in train.environment.items() if key.startswith("M_")}
    values = {**below, **form.values([f"{key}={value}" for key, value in upper.items()]).values, **values}
    return Given(place, values, tuple(flags), tuple(notes)), _launcher(commands)


def _check_strays(strays: Sequence[str], place: str, form: Form) -> None:
    raise_if_any(Problem(f"{place}: {word}", "declares nothing", f"leave it out; {form.key}") for word in strays)


def _is_in(value: str | list[str], words: Sequence[str]) -> bool:
    """Returns True if a variable's value is in a command. A list is, with any of its words."""
    parts = [value] if isinstance(value, str) else value
    return any(part and part in word for part in parts for word in words)


def _train_command(
    form: Form, commands: Sequence[ShellCommand], place: str, script: Script, *, is_typed: bool
) -> ShellCommand:
    runs = (each for each in commands if each.words[0] not in _READ_FILES and form.is_train(each.words))
    trains = list({each.words: each for each in runs}.values())
    if not trains and is_typed and form.values(commands[0].words).values:
        return commands[0]  # keys alone
    if not trains and not commands:  # keys alone, which a shell reads as variables
        words = [f"{name}={value}" for name, value in script.variables.items() if isinstance(value, str)]
        if form.values(words).values:
            return ShellCommand(tuple(words), {})
    if len(trains) == 1:
        return trains[0]
    for each in commands:
        for word, fix in form.hints.items():
            if not trains and any(word in part for part in each.words):
                raise ConfigError([Problem(place, f"runs {word}, which names no keys", fix)])
    ran = human_names([f"'{' '.join(each.words[:4])}'" for each in commands], 2)
    what, fix = f"has no train command{f', but {ran}' if ran else ''}", f"give {form.wants}"
    for name, is_train in form.others.items():
        if not trains and any(is_train(each.words) for each in commands if each.words[0] not in _READ_FILES):
            fix = f"it has one of another trainer: type meshloom import {name} ..."
    if trains:
        shown = "; ".join(" ".join(each.words[:4]) for each in trains[:3])
        what, fix = f"has {counted(len(trains), 'train command')}: {shown} ..", "give one of them, in quotes"
    raise ConfigError([Problem(place, what, fix)])


def _beside(name: str, folder: str, place: str) -> str:
    """Returns where a file that a command reads is: as it is named, or next to the script."""
    last = PurePosixPath(name).name
    here = [path for path in (name, f"{folder}/{name}", f"{folder}/{last}" if folder else last) if Path(path).is_file()]
    if here:
        return here[0]
    what = f"reads {last}, which is not here, so that its keys are not known"
    raise ConfigError([Problem(place, what, f"put {last} next to it, or name its path: type {last} and then the keys")])


def _launcher(commands: Sequence[ShellCommand]) -> dict[str, str]:
    """Returns what xpk or another launcher says of the machines: device_type, num_slices, num_nodes, nproc_per_node."""
    found: dict[str, str] = {}
    names = {"device_type": "device_type", "tpu_type": "device_type", "num_slices": "num_slices",
             "num_nodes": "num_nodes", "nnodes": "num_nodes", "nproc_per_node": "nproc_per_node"}  # fmt: skip
    for command in commands:
        for word, after in zip(command.words, (*command.words[1:], ""), strict=True):
            name, has_value, value = word.removeprefix("--").partition("=")
            name = names.get(name.replace("-", "_"), "")
            if word.startswith("--") and name:
                found[name] = value if has_value else after
    return {name: value for name, value in found.items() if value and not value.startswith(("$", "-"))}


def yaml_value(text: str) -> Any:
    """Returns the value of a word as YAML reads it; a word that it cannot read is text."""
    try:
        value = yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        return text
    return value if isinstance(value, (bool, int, float, str, list, type(None))) else text
