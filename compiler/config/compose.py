"""Hydra overrides -> RunSpec, and everything that is wrong with them at once.

Hydra composes untyped YAML and stops at its first error; pydantic checks the whole tree against `RunSpec` and reports
all errors. So overrides reach Hydra as `++key=value` (never refused for the key), and the typed spec is the one judge.
docs/config.md says why.
"""

import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import IConfigRepository
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import ValidationError

from ..core.errors import ConfigError, Problem, raise_if_any, use_one_of
from ..core.key_paths import is_within
from ..core.visible import visible_line
from . import target_names
from .allowed_code import FLAG
from .composition_errors import Groups, reported
from .config_files import problems_of_files, register_sources
from .environment_values import Sources, find_sources, register_resolver
from .hydra_settings import SEARCH_PATH, check_places, check_subdirectories, problems_of_settings
from .override_parser import COMMAND_LINE, MOST_POINTS, key_of, parse_override, parsed_or_none, shortened, sweep_values
from .plain_values import plain_values
from .spec import RunSpec
from .spec_errors import MOST_SHOWN, problems_of
from .user_code import blamed_on_user, spec_class

T = TypeVar("T")
OPT_IN = FLAG.lstrip("-").replace("-", "_")
OPTIONAL = ("experiment",)  # groups of which nothing need be chosen


@dataclass(frozen=True)
class Request:
    """What was asked for: overrides as typed, and where configs are found beside our own."""

    overrides: tuple[str, ...]
    config_name: str = "config"
    config_path: str | None = None  # a directory that takes the place of our own `conf/`

    @property
    def search_path(self) -> list[str]:
        """The override that says where users' configs lie; none where they are ours alone."""
        return [text for text in self.overrides if key_of(text) == SEARCH_PATH]


@contextmanager
def hydra_session(request: Request) -> Iterator[Groups]:
    """Hydra's global state, set up for composing and taken down again; gives the groups that the request can see."""
    register_sources()
    register_resolver()
    GlobalHydra.instance().clear()
    if request.config_path is None:
        session = initialize_config_module("meshloom.conf", version_base="1.3", job_name="meshloom")
    else:
        session = initialize_config_dir(str(Path(request.config_path).resolve()), version_base="1.3")
    with session:
        with reported(Groups()), warnings.catch_warnings(action="ignore"):  # of places, which are checked next
            configs = _repository(request)
            check_places(configs.get_sources())
        outer = [group for group in _options("", configs, ObjectType.GROUP) if group != "hydra"]
        inner = [f"{group}/{part}" for group in outer for part in _options(group, configs, ObjectType.GROUP)]
        found = ((group, _options(group, configs)) for group in sorted(outer + inner))
        groups = Groups({group: options for group, options in found if options})
        groups.appended = _appended(groups, request)
        yield groups


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


def check_config_files(request: Request) -> None:
    """Raise ConfigError for what files of configs may not say; what else may be wrong is not looked at."""
    with hydra_session(request) as groups:
        forced = [_forced(text, groups) for text in request.overrides]
        composed = compose(request.config_name, overrides=forced, return_hydra_config=True)
        raise_if_any(problems_of_files(composed, request.overrides))


def check_sweep(request: Request) -> None:
    """Raise ConfigError for what is wrong with a sweep, whichever points it consists of: each value by itself."""
    base: list[str] = []
    alternatives: list[list[str]] = []
    problems: list[Problem] = []
    for text in request.overrides:
        parsed = parsed_or_none(text)
        if parsed and parsed.is_sweep_override() and not parsed.is_hydra_override():
            try:
                alternatives.append(sweep_values(parsed))
            except ConfigError as error:
                problems += error.problems
        else:
            base.append(text)
    num_points = math.prod(map(len, alternatives))
    if num_points > MOST_POINTS:
        what = f"the sweep has {num_points:,} points, and {MOST_POINTS:,} are the most"
        problems.append(Problem(COMMAND_LINE, what, "sweep over fewer values"))
    raise_if_any(problems)
    first = [values[0] for values in alternatives]
    points = [base + first]
    points += [
        base + first[:i] + [value] + first[i + 1 :] for i, values in enumerate(alternatives) for value in values[1:]
    ]
    for point in points:
        try:
            read_spec(Request(tuple(point), request.config_name, request.config_path), then=lambda spec: spec)
        except ConfigError as error:
            problems += error.problems
    raise_if_any(problems)
    if num_points > 1:
        with hydra_session(request) as groups:
            forced = [_forced(text, groups) for text in points[0]]
            check_subdirectories(compose(request.config_name, overrides=forced, return_hydra_config=True))


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


def _repository(request: Request) -> IConfigRepository:
    """Returns Hydra's view of all places in which the request's configs lie.

    Hydra's public `get_group_options` parses the main config and makes a repository anew for each group that it is
    asked for: a second of processor time where one repository takes a tenth.
    """
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    return loader._parse_overrides_and_create_caching_repo(request.config_name, request.search_path)[1]


def _appended(groups: Groups, request: Request) -> frozenset[str]:
    theirs = {group for group in groups if group.split("/")[0] not in RunSpec.model_fields} - set(OPTIONAL)
    try:
        with reported(groups):
            return frozenset(theirs - set(chosen_options(request))) if theirs else frozenset()
    except ConfigError:  # composing the whole request says what is wrong
        return frozenset()


def config_sources(request: Request) -> Sequence[ConfigSource]:
    """Returns the places where configs are found, the first that has a file winning; within a session."""
    return _repository(request).get_sources()


def chosen_options(request: Request) -> dict[str, str]:
    """Returns the option of each group that the primary config chooses by itself; within a session."""
    composed = compose(request.config_name, overrides=request.search_path, return_hydra_config=True)
    return dict(composed.hydra.runtime.choices)


def _options(group: str, configs: IConfigRepository, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
    """Returns what a group offers; names that begin with `_` are parts of others and are left out."""
    return [name for name in configs.get_group_options(group, kind) if not name.startswith("_")]


def _validate(overrides: Sequence[str], request: Request, groups: Groups) -> tuple[RunSpec | None, list[Problem]]:
    try:
        with reported(groups):
            forced = [_forced(text, groups) for text in overrides]
            composed = compose(request.config_name, overrides=forced, return_hydra_config=True)
            problems = problems_of_files(composed, overrides) + problems_of_settings(composed)
            declared = _without_hydra(composed)
            values, not_plain = plain_values(declared)
            sources = find_sources(declared)
    except ConfigError as error:
        return None, list(error.problems)
    problems += not_plain
    if problems:  # what the files say is not even imported
        return None, problems
    spec_type, problems = spec_class(values)
    try:
        with blamed_on_user("the declaration", "checking it", is_theirs=False):
            spec = spec_type.model_validate_json(json.dumps(values)).with_sources(sources)
        return (None if problems else spec), problems
    except ValidationError as error:
        own_groups = [group for group in groups if "/" not in group]
        found = problems_of(error, spec_type, own_groups)
        return None, problems + [_without_values(problem, values, sources) for problem in found]


def _without_values(problem: Problem, values: dict[str, Any], sources: Sources) -> Problem:
    """The same without the value that came from the environment: a short one is not found by its text."""
    for key, text in sources.items():
        if is_within(problem.where, key):
            shown = str(OmegaConf.select(OmegaConf.create(values), key))
            for value in (shown, shortened(shown, MOST_SHOWN)):
                problem = replace(problem, what=problem.what.replace(value, text), fix=problem.fix.replace(value, text))
    return problem


def _without_hydra(composed: DictConfig) -> DictConfig:
    with open_dict(composed):
        del composed["hydra"]
    return composed


def _forced(text: str, groups: Groups) -> str:
    """`key=value` as `++key=value`; a choice of a group, a deletion and Hydra's own settings as they are."""
    parsed = parsed_or_none(text)
    if parsed is None or parsed.is_delete() or parsed.is_hydra_override():
        return text
    if _is_choice(parsed, groups):
        return f"+{text}" if text[0].isalpha() and parsed.key_or_group in groups.appended else text
    return "++" + text.lstrip("+")


def _is_choice(parsed: Override, groups: Groups) -> bool:
    """`group=option`, as against `key=value`."""
    return parsed.package is not None or "/" in parsed.key_or_group or parsed.key_or_group in groups


def _problems_of_override(text: str, request: Request, groups: Groups) -> list[Problem]:
    """What can be said of one override before composing: its grammar, a sweep outside of one, its group's options."""
    try:
        parsed = parse_override(text)
    except ConfigError as error:
        return list(error.problems)
    group = parsed.key_or_group
    if group == OPT_IN:
        fix = f"type {FLAG}=MODULE, without a space"
        return [Problem(group, "is a flag and not a key, so that no config file can set it", fix)]
    if group == "hydra.job.env_copy":
        fix = "leave it out: the points of a sweep have the environment of the command"
        return [Problem(group, "the values of these variables would be written to .hydra/hydra.yaml", fix)]
    if group == "hydra.job.chdir" and parsed.value() not in (False, None):
        what = "paths of the declaration would be looked for in the run directory"
        return [Problem(group, what, "leave it out: all that a run writes is in its directory as it is")]
    if parsed.is_sweep_override():
        fix = f"add -m to run once per value, or quote it to pass a list or text: '{group}=[...]'"
        return [Problem(group, f"'{shortened(text)}' names several values", fix)]
    if not _is_choice(parsed, groups) or parsed.is_delete():
        return []
    if parsed.value() is None and group in OPTIONAL:
        return [Problem(group, "null chooses nothing, as it is without", "leave it out")]
    name = visible_line(shortened("null" if parsed.value() is None else str(parsed.value())))
    options = groups.get(group) or _options(group, _repository(request))
    if name in options or (group == "target" and target_names.is_sized(name)):
        return []
    if not options:
        return [Problem(group, "there is no such group", use_one_of(group, groups))]
    if group == "target":
        return [target_names.problem_of(name, options)]
    return [Problem(group, f"there is no '{name}' in this group", use_one_of(name, options))]


def _concerns(text: str, problem: Problem) -> bool:
    """True where the override sets what the problem is about, or a part of it, or a node that holds it."""
    key = key_of(text)
    return is_within(problem.where, key) or is_within(key, problem.where)


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
