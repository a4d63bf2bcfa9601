"""Translates what Hydra, OmegaConf, YAML and pydantic raise about a declaration into Problems."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ..core.errors import ConfigError, Problem, meant_by, use_one_of
from ..core.format import counted
from ..core.key_paths import is_within
from ..core.visible import visible_line
from ..spec import target_names
from .overrides import COMMAND_LINE, parsed_or_none, shortened
from .peer_names import meant_by_peers
from .run_spec import RunSpec


class ConfigGroups(dict[str, list[str]]):
    """The options of each config group. appended: users' groups for which the primary config has no default, so that
    Hydra requires `+` before a choice."""

    appended: frozenset[str] = frozenset()


OF_HYDRA = (HydraException, OmegaConfBaseException)
MISTAKES = (ConfigError, *OF_HYDRA, OSError)  # what a user can fix
LOOK = "see `meshloom train --help` and `--cfg job`"


@contextmanager
def reported(groups: ConfigGroups) -> Iterator[None]:
    """Turns any exception about a user's input into ConfigError.

    Hydra and its libraries raise far more than their own classes: RecursionError, ValueError, TypeError, KeyError.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError([composition_problem(error, groups)]) from error


def as_config_error(error: Exception) -> ConfigError:
    """Returns one of the MISTAKES as a ConfigError."""
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, OSError):
        fix = "free space there, give this process access to it, or choose another hydra.run.dir"
        if isinstance(error, FileExistsError | IsADirectoryError | NotADirectoryError):
            fix = "move the file that is there, or choose another hydra.run.dir"
        return ConfigError([Problem(str(error.filename or "disk"), error.strerror or str(error), fix)])
    return ConfigError([composition_problem(error, groups=ConfigGroups())])


def composition_problem(error: Exception, groups: ConfigGroups) -> Problem:
    """Returns an error of Hydra, OmegaConf or YAML as a Problem."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return Problem(f"{mark.name}:{mark.line + 1}", f"is not valid YAML: {error.problem}", "correct the file")
    if setting := re.match(r"Could not override '(hydra\.[^']+)'", str(error)):
        what = "there is no such setting of Hydra, or of the launcher or sweeper that is chosen"
        return Problem(setting[1], what, "`--cfg hydra` prints all that there are")
    if isinstance(error, RecursionError):
        what = "a value is nested too deeply, or the `defaults` lists of files form a cycle"
        return Problem("configs", what, "check the files that you chose last, and break the cycle")
    text = str(error) or str(error.__cause__ or type(error).__name__)
    if match := re.search(r"Error merging override (?P<override>.*)", text, re.S):
        override = match["override"]
        parsed = parsed_or_none(override)
        why = shortened(str(error.__cause__).partition("\n")[0] or type(error.__cause__).__name__, 200)
        what = f"'{visible_line(shortened(override.lstrip('+')))}' cannot be set: {why}"
        fix = r"write \${ for text with ${ in it" if "${" in override else LOOK
        return Problem(parsed.key_or_group if parsed else COMMAND_LINE, what, fix)
    if match := re.search(r"Could not delete from config. '(?P<key>[^']+)'", text):
        return Problem(match["key"], "does not exist, so it cannot be deleted", "leave the ~ override out")
    if match := re.search(r"Could not find '(?P<group>[^/']+)/(?P<option>[^']+)'", text):
        group, option = match["group"], match["option"]
        if group == "target":
            return target_names.problem_of(option, groups.get("target", []))
        if group not in groups:
            return Problem(group, "there is no such group", use_one_of(group, groups) if groups else LOOK)
        fix = f"choose {group}=...: {use_one_of(option, groups[group])}"
        return Problem(group, f"there is no '{option}' in this group", fix)
    key = re.search(r"full_key: (\S+)", text)
    if variable := re.search(r"Environment variable '([^']*)' not found", text):
        what = f"the environment variable {variable[1]} is not set"
        fix = f"export {variable[1]}=..., or give a default: ${{oc.env:{variable[1]},...}}"
        return Problem(key[1] if key else COMMAND_LINE, what, fix)
    return Problem(key[1] if key else COMMAND_LINE, shortened(text.partition("\n")[0], 300), LOOK)


MOST_SHOWN = 60  # characters of a value
MOST_PROBLEMS = 100  # at once: each lists the keys that exist
_EXAMPLES = {  # what to type for a key without a value, by its last part
    "paths": "'{}=[FILE,...]': files, or patterns such as corpus/**/*.txt", "path": "{}=FILE", "directory": "{}=DIR"
}  # fmt: skip
_EXPECTED = {
    "int_type": "a whole number", "int_from_float": "a whole number", "int_parsing": "a whole number",
    "float_type": "a number", "finite_number": "a finite number", "bool_type": "true or false", "string_type": "text",
    "tuple_type": "a list", "list_type": "a list", "model_type": "a group of keys", "dict_type": "a group of keys",
    "model_attributes_type": "a group of keys",
}  # fmt: skip
_BOUNDS = {"greater_than": ("gt", "more than"), "greater_than_equal": ("ge", "at least"),
           "less_than": ("lt", "less than"), "less_than_equal": ("le", "at most")}  # fmt: skip


def validation_problems(
    error: ValidationError, spec_type: type[RunSpec], groups: Sequence[str], keys: Sequence[str] = ()
) -> list[Problem]:
    """Returns one Problem per finding about a `spec_type`. groups: names of config groups, for suggestions at the
    top. keys: those of the declaration, also wrong ones."""
    details = error.errors(include_url=False)
    wrong = [_key(_walk(each["loc"], spec_type)[1]) for each in details if each["type"] == "extra_forbidden"]
    known = [key for key in keys if not any(is_within(key, one) for one in wrong)]
    problems = [_problem(detail, spec_type, groups, known) for detail in details[:MOST_PROBLEMS]]
    if (num_left := len(details) - MOST_PROBLEMS) > 0:
        problems.append(Problem("the declaration", f"has {counted(num_left, 'more problem')}", "correct these first"))
    # sharding.optimizer may repeat the rules of the parameters: a mistake in both is reported once.
    originals = [p for p in problems if p.where.startswith("sharding.parameters")]
    echoes = [replace(p, where=p.where.replace("parameters", "optimizer", 1)) for p in originals]
    return [problem for problem in problems if problem not in echoes]


def _problem(
    detail: ErrorDetails, spec_type: type[RunSpec], groups: Sequence[str], known_keys: Sequence[str]
) -> Problem:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    node, path = _walk(detail["loc"], spec_type)
    key = _key(path)
    if kind == "extra_forbidden":
        if node is spec_type and path[-1] in groups and path[-1] not in node.model_fields:
            what = "a group of your own sets keys that the declaration does not have"
            own = f"`# @package run.extra.{path[-1]}`"
            fix = f"begin its files with {own}, or `# @package _global_` for keys that there are"
            return Problem(key, what, fix)
        if words := meant_by_peers(key, value, known_keys, is_loose=node is spec_type):
            return Problem(key, "there is no such key", f"type {words}")
        offered = [name for name, field in node.model_fields.items() if field.repr] if node else []
        known = dict.fromkeys([*offered, *(groups if node is spec_type else ())])
        typed = shortened(str(path[-1]))
        fix = use_one_of(typed, known)
        if node is spec_type and not meant_by(typed, known):
            fix += f"; a key of your own goes into run.extra: run.extra.{shortened(str(path[-1]), MOST_SHOWN)}=..."
        return Problem(key, "there is no such key", fix)
    if kind == "missing" and key == "mesh":
        own = "`override /mesh@_global_.mesh: fsdp` at the end of its defaults"
        return Problem(key, "has no value: the sharding names no mesh", f"add mesh=..., such as mesh=fsdp, or {own}")
    if kind == "missing" and any(isinstance(element, int) for element in path):  # a list is set as a whole
        return Problem(key, "has no value", f"add {path[-1]}: ... to {_key(path[:-1])}")
    if kind == "missing":
        return Problem(key, "has no value", f"set {_EXAMPLES.get(str(path[-1]), '{}=...').format(key)}")
    if kind == "literal_error" and path[-1] == "[key]":  # as pydantic names the place of a dict's key
        typed = str(path[-2])
        key, words = _key(path[:-1]), meant_by_peers(_key(path[:-1]), value, (), is_loose=False)
        fix = f"type {words}" if words else use_one_of(typed, _quoted(context["expected"]))
        return Problem(key, "there is no such key", fix)
    if kind == "literal_error":
        return Problem(
            key, f"{_shown(value)} is not allowed", use_one_of(shortened(str(value)), _quoted(context["expected"]))
        )
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        key = f"{key}.{_quoted(context['discriminator'])[0]}"
        if kind == "union_tag_not_found":
            return Problem(key, "has no value", f"set {key}=...")
        tag = shortened(context["tag"], MOST_SHOWN)
        return Problem(key, f"'{tag}' is not allowed", use_one_of(tag, _quoted(context["expected_tags"])))
    if kind in _EXPECTED and (choices := _choices(node, path[-1])):
        return Problem(key, f"{_shown(value)} is not {_EXPECTED[kind]}", f"set {key}.{choices}")
    if kind in _EXPECTED and (keys := _group_of(node, path[-1])):
        return Problem(key, f"{_shown(value)} is not {_EXPECTED[kind]}", _fix_of_group(key, keys, value))
    if kind in _EXPECTED:
        return Problem(key, f"{_shown(value)} is not {_EXPECTED[kind]}", _fix_of_type(kind, value, path), kind)
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return Problem(key, f"{_shown(value)} is out of range", f"give {words} {context[bound]}")
    if kind == "too_short":
        return Problem(key, "is empty", f"give at least {context['min_length']}")
    if kind == "string_too_short":
        field = node.model_fields.get(str(path[-1])) if node else None
        or_null = ", or null" if field is not None and NoneType in _members(field.annotation) else ""
        return Problem(key, "is empty", f"give text{or_null}")
    where = f"{key}.{context['key']}" if "key" in context else key
    return Problem(where, detail["msg"], str(context.get("fix", "see the file in conf/ that sets it")))


def _fix_of_type(kind: str, value: Any, path: Sequence[int | str]) -> str:
    """Returns the fix of a value of another type, with the word to type if it is known."""
    if isinstance(value, float) and "whole" in _EXPECTED[kind] and value.is_integer() and abs(value) < 2**53:
        return f"give a whole number: {int(value)}"
    if kind == "string_type" and isinstance(path[-1], int) and isinstance(value, bool | int | float):
        return f'quote it: "{value}"'
    return f"give {_EXPECTED[kind]}"


def _group_of(holder: type[BaseModel] | None, name: int | str) -> Mapping[str, Any]:
    """Returns the fields of the group of keys that a field is, by their name; none for any other field."""
    field = holder.model_fields.get(str(name)) if holder else None
    members = [one for one in _members(field.annotation) if one is not NoneType] if field else []
    if len(members) != 1 or not isinstance(members[0], type) or not issubclass(members[0], BaseModel):
        return {}
    return members[0].model_fields


def _fix_of_group(key: str, fields: Mapping[str, Any], value: Any) -> str:
    """Returns what to type for a group of keys. A text that was typed may have been meant for the first that takes
    text: nf4 for element."""
    is_text = isinstance(value, str) and value
    meant = next((name for name, field in fields.items() if is_text and str in _members(field.annotation)), None)
    whole = ", ".join(f"{name}: {value if name == meant else '...'}" for name in fields)
    one = f", or {key}.{meant}={value} where it has the others" if meant else ""
    return f"give its keys: '{key}={{{whole}}}'{one}"


def _walk(loc: tuple[int | str, ...], spec_type: type[RunSpec]) -> tuple[type[BaseModel] | None, list[int | str]]:
    """Returns the config class that has the last element of `loc`, and `loc` without the tags of unions."""
    node: Any = spec_type
    holder: type[BaseModel] | None = spec_type
    path: list[int | str] = []
    for element in loc:
        tagged = [member for member in _members(node) if element in _tags(member)]
        if tagged:
            node = tagged[0]
            continue
        one, *others = [member for member in _members(node) if member is not NoneType]
        node = node if others else one
        path.append(element)
        holder = node if isinstance(node, type) and issubclass(node, BaseModel) else None
        if holder and element in holder.model_fields:
            node = holder.model_fields[str(element)].annotation
        else:  # the elements of a list, the values of a dict
            values = [argument for argument in get_args(node) if argument is not Ellipsis]
            node = values[-1] if values else None
    return holder, path


def _members(node: Any) -> list[Any]:
    """Returns the classes of a union, without `None` and annotations."""
    if get_origin(node) is Annotated:
        return _members(get_args(node)[0])
    if get_origin(node) in (Union, UnionType):
        return [member for argument in get_args(node) for member in _members(argument)]
    return [node]


def _tags(config: Any) -> list[object]:
    """Returns the tags that distinguish a class from the others of its union: fields with one allowed value."""
    literals = [field.annotation for field in getattr(config, "model_fields", {}).values()]
    return [get_args(kind)[0] for kind in literals if get_origin(kind) is Literal and len(get_args(kind)) == 1]


def _choices(holder: type[BaseModel] | None, name: int | str) -> str | None:
    """Returns `kind=... to one of ...` for a field with a tagged union; None for any other field."""
    field = holder.model_fields.get(str(name)) if holder else None
    members = [member for member in _members(field.annotation) if _tags(member)] if field else []
    if len(members) < 2 or not field or not field.discriminator:
        return None
    return f"{field.discriminator}=... to one of {', '.join(str(_tags(member)[0]) for member in members)}"


def _quoted(text: object) -> list[str]:
    return re.findall(r"'([^']*)'", str(text))


def _key(path: Sequence[int | str]) -> str:
    text = "".join(f"[{element}]" if isinstance(element, int) else f".{element}" for element in path)
    return text.removeprefix(".")


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(shortened(value, MOST_SHOWN)) if isinstance(value, str) else shortened(str(value), MOST_SHOWN)
