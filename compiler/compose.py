"""Hydra overrides -> RunSpec, and everything that is wrong with them at once.

Hydra composes untyped YAML and stops at its first error; pydantic checks the whole tree against `RunSpec` and reports
all errors. So overrides reach Hydra as `++key=value` (never refused for the key), and the typed spec is the one judge.
docs/config.md says why.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from . import target_names
from .problems import ConfigError, Problem, raise_if_any, use_one_of
from .spec import RunSpec
from .spec_errors import problems_of
from .user_code import spec_class

T = TypeVar("T")
COMMAND_LINE = "command line"
MISTAKES = (ConfigError, HydraException, OmegaConfBaseException, OSError)  # what a user can set right
OPTIONAL = ("experiment",)  # groups of which nothing need be chosen


@dataclass(frozen=True)
class Request:
    """What was asked for: overrides as typed, and where configs are found beside our own."""

    overrides: tuple[str, ...]
    config_name: str = "config"
    config_path: str | None = None  # a directory that takes the place of our own `conf/`


Groups = dict[str, list[str]]  # the options of each config group


@contextmanager
def hydra_session(request: Request) -> Iterator[Groups]:
    """Hydra's global state, set up for composing and taken down again; gives the groups that the request can see."""
    target_names.register()
    GlobalHydra.instance().clear()
    if request.config_path is None:
        session = initialize_config_module("meshloom.conf", version_base="1.3", job_name="meshloom")
    else:
        session = initialize_config_dir(str(Path(request.config_path).resolve()), version_base="1.3")
    with session:
        outer = [group for group in _options("", request, ObjectType.GROUP) if group != "hydra"]
        inner = [f"{group}/{part}" for group in outer for part in _options(group, request, ObjectType.GROUP)]
        yield {group: options for group in sorted(outer + inner) if (options := _options(group, request))}


def read_spec(request: Request, then: Callable[[RunSpec], T]) -> T:
    """`then(RunSpec)` for a request that is right; else ConfigError with all problems.

    What `then` finds wrong is in the same report as wrong keys and types, wherever it does not rest on them.
    """
    with hydra_session(request) as groups:
        judged = [(text, _problems_of_override(text, request, groups)) for text in request.overrides]
        problems = list(chain.from_iterable(found for _, found in judged))
        kept = [text for text, found in judged if not found]
        spec, wrong = _validate(kept, request, groups)
        problems += wrong
        if wrong:
            kept = [text for text in kept if not any(_concerns(text, problem) for problem in wrong)]
            spec, _ = _validate(kept, request, groups)
    if not problems:
        assert spec is not None
        return then(spec)
    if spec is not None:
        dropped = [text for text in request.overrides if text not in kept]
        problems += _independent_problems(spec, then, dropped)
    raise ConfigError(problems)


def check_sweep(request: Request) -> None:
    """Raise ConfigError for what is wrong with a sweep, whichever points it consists of: each value by itself."""
    base: list[str] = []
    alternatives: list[list[str]] = []
    for text in request.overrides:
        parsed = _parse(text)
        if parsed and parsed.is_sweep_override() and not parsed.is_hydra_override():
            values = [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]
            alternatives.append(values)
        else:
            base.append(text)
    first = [values[0] for values in alternatives]
    points = [base + first]
    points += [
        base + first[:i] + [value] + first[i + 1 :] for i, values in enumerate(alternatives) for value in values[1:]
    ]
    problems: list[Problem] = []
    for point in points:
        try:
            read_spec(Request(tuple(point), request.config_name, request.config_path), then=lambda spec: spec)
        except ConfigError as error:
            problems += error.problems
    raise_if_any(problems)


def hydra_arguments(request: Request) -> list[str]:
    """The overrides in the form in which Hydra never refuses a key: the spec judges it, with all the others."""
    with hydra_session(request) as groups:
        return [_forced(text, groups) for text in request.overrides]


def hydra_run_dir(request: Request) -> Path:
    """The run directory that Hydra will make for the request, with today's date and time in it; makes nothing."""
    with hydra_session(request) as groups:
        overrides = [_forced(text, groups) for text in request.overrides]
        composed = compose(request.config_name, overrides=overrides, return_hydra_config=True)
        return Path(str(OmegaConf.select(composed, "hydra.run.dir"))).resolve()


def search_path_override(overrides: Sequence[str], config_dir: str | None) -> list[str]:
    """The overrides with one `hydra.searchpath` that holds the user's places, `config_dir` and our own."""
    kept, places = [], [target_names.SEARCH_PATH]
    for text in overrides:
        parsed = _parse(text)
        if parsed and parsed.key_or_group == "hydra.searchpath":
            places += [str(place) for place in parsed.value()]  # type: ignore[union-attr]
        else:
            kept.append(text)
    places += [f"file://{Path(config_dir).resolve()}"] if config_dir else []
    quoted = ",".join("'" + place.replace("'", "\\'") + "'" for place in dict.fromkeys(places))
    return [*kept, f"hydra.searchpath=[{quoted}]"]


def _options(group: str, request: Request, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
    """What a group offers, in all places that the request adds; names with a first `_` are parts of others."""
    places = [text for text in request.overrides if text.startswith("hydra.searchpath=")]
    loader = GlobalHydra.instance().config_loader()
    names = loader.get_group_options(group, kind, config_name=request.config_name, overrides=places)
    return [name for name in names if not name.startswith("_")]


def _validate(overrides: Sequence[str], request: Request, groups: Groups) -> tuple[RunSpec | None, list[Problem]]:
    try:
        composed = compose(request.config_name, overrides=[_forced(text, groups) for text in overrides])
        values = _without_missing(composed)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        return None, [composition_problem(error, groups)]
    spec_type, problems = spec_class(values)
    try:
        spec = spec_type.model_validate_json(json.dumps(values))
        return (None if problems else spec), problems
    except ValidationError as error:
        own_groups = [group for group in groups if "/" not in group]
        return None, problems + problems_of(error, spec_type, own_groups)


def _without_missing(composed: DictConfig) -> dict[str, Any]:
    """Plain values with interpolations resolved; keys that are still `???` left out, so that they count as missing."""

    def strip(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: strip(value) for key, value in node.items() if value != "???"}
        return [strip(value) for value in node] if isinstance(node, list) else node

    return strip(OmegaConf.to_container(composed, resolve=True))


def _parse(text: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def _forced(text: str, groups: Groups) -> str:
    """`key=value` as `++key=value`; a choice of a group, a deletion and Hydra's own settings as they are."""
    parsed = _parse(text)
    if parsed is None or parsed.is_delete() or parsed.is_hydra_override() or _is_choice(parsed, groups):
        return text
    return "++" + text.lstrip("+")


def _is_choice(parsed: Override, groups: Groups) -> bool:
    """`group=option`, as against `key=value`."""
    return parsed.package is not None or "/" in parsed.key_or_group or parsed.key_or_group in groups


def _problems_of_override(text: str, request: Request, groups: Groups) -> list[Problem]:
    """What can be said of one override before composing: its grammar, a sweep outside of one, its group's options."""
    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException as error:
        what = f"'{text}' is no override: {str(error).splitlines()[0]}"
        return [Problem(COMMAND_LINE, what, "write key=value; quote values with spaces: 'key=\"a b\"'")]
    group = parsed.key_or_group
    if parsed.is_sweep_override():
        fix = f"add -m to run once per value, or quote it to pass a list or text: '{group}=[...]'"
        return [Problem(group, f"'{text}' names several values", fix)]
    if not _is_choice(parsed, groups) or parsed.is_delete():
        return []
    if parsed.value() is None and group in OPTIONAL:
        return [Problem(group, "null chooses nothing, as it is without", "leave it out")]
    name = "null" if parsed.value() is None else str(parsed.value())
    options = groups.get(group) or _options(group, request)
    if name in options or (group == "target" and target_names.is_sized(name)):
        return []
    if not options:
        return [Problem(group, "there is no such group", use_one_of(group, groups))]
    if group == "target":
        return [target_names.problem_of(name, options)]
    return [Problem(group, f"there is no '{name}' in this group", use_one_of(name, options))]


def composition_problem(error: Exception, groups: Groups) -> Problem:
    """One of Hydra's, OmegaConf's or YAML's errors in our words."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return Problem(f"{mark.name}:{mark.line + 1}", f"not YAML: {error.problem}", "mend the file")
    text = str(error)
    if match := re.search(r"Could not find '(?P<group>[^/']+)/(?P<option>[^']+)'", text):
        if match["group"] == "target":
            return target_names.problem_of(match["option"], groups.get("target", []))
        fix = f"choose {match['group']}=...: {use_one_of(match['option'], groups.get(match['group'], []))}"
        return Problem(match["group"], f"there is no '{match['option']}' in this group", fix)
    key = re.search(r"full_key: (\S+)", text)
    return Problem(key[1] if key else COMMAND_LINE, text.split("\n")[0], "see `meshloom train --help` and `--cfg job`")


def as_config_error(error: Exception) -> ConfigError:
    """One of the MISTAKES as what it is to the user."""
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, OSError):
        fix = "make room there or give this process access to it, or choose another hydra.run.dir"
        return ConfigError([Problem(str(error.filename or "disk"), error.strerror or str(error), fix)])
    return ConfigError([composition_problem(error, groups={})])


def _concerns(text: str, problem: Problem) -> bool:
    """True where the override sets what the problem is about, or a part of it, or a node that holds it."""
    parsed = _parse(text)
    key = parsed.key_or_group if parsed else ""
    return _is_within(problem.where, key) or _is_within(key, problem.where)


def _is_within(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith((f"{outer}.", f"{outer}["))


# What a finding of a pass rests on beside its own key: it says nothing while one of these is wrong.
_RESTS_ON = {"target": {"target"}, "mesh": {"mesh", "target", "sharding"}}
_RESTS_ON_PLAN = {"mesh", "target", "sharding", "model", "experiment", "num_microbatches"}


def _independent_problems(spec: RunSpec, then: Callable[[RunSpec], Any], dropped: Sequence[str]) -> list[Problem]:
    """Problems that `then` finds in the spec without the dropped overrides, and would find with them too."""
    try:
        then(spec)
    except ConfigError as error:
        roots = {re.split(r"[.=@/]", text.lstrip("+~"))[0] for text in dropped}
        roots |= {near for root in roots for near in get_close_matches(root, RunSpec.model_fields, n=1)}
        return [problem for problem in error.problems if not roots & _rests_on(problem)]
    return []


def _rests_on(problem: Problem) -> set[str]:
    """The top-level keys without which a pass would not have found it; a place that is no key is a file of the data."""
    root = _root(problem)
    data = set() if root in RunSpec.model_fields else {"data"}
    return {root} | data | _RESTS_ON.get(root, _RESTS_ON_PLAN)


def _root(problem: Problem) -> str:
    return re.split(r"[.\[]", problem.where)[0]
