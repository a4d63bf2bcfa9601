"""Composes a RunSpec from Hydra overrides, and reports everything that is wrong with them at once.

Hydra composes untyped YAML and stops at its first error; pydantic checks the whole tree against `RunSpec` and reports
all errors. So overrides reach Hydra as `++key=value` (never refused for the key), and only the typed spec checks keys.
docs/config.md explains this.
"""

import json
import os
import re
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import ValidationError

from ..core.errors import ConfigError, Problem, raise_if_any, use_one_of
from ..core.key_paths import is_within, leaves
from ..core.user_code import FLAG, allowed_modules, blamed_on_user
from ..core.visible import visible_line
from ..spec import target_names
from ..spec.calibration_spec import AUTO_CHIP, GROUP
from ..spec.secrets import Sources
from . import task
from .compositions import compose_kept, compositions_kept, kept_groups
from .config_files import TargetNames, plain_values, problems_of_files, register_sources, unresolved
from .environment import IN_DEFAULTS, find_sources, register_resolver
from .hydra_private import IConfigRepository, config_repository
from .hydra_settings import (
    DIRECTORIES,
    RUN_DIR,
    SEARCH_PATH,
    SUBDIRECTORY,
    SWEEP_DIR,
    SWEEPER_PARAMS,
    check_places,
    problems_of_settings,
    with_home,
    without_plugin,
)
from .overrides import overridden_key, parse_override, quoted, shortened, with_quoted_homes
from .peer_names import meant_choice
from .pinned import Pinned
from .problems import MOST_SHOWN, ConfigGroups, reported, validation_problems
from .processor import on_processor
from .published_model import with_published_model
from .run_spec import RunSpec
from .user_code import spec_class

T = TypeVar("T")
OPT_IN = FLAG.lstrip("-").replace("-", "_")
OPTIONAL = ("experiment",)  # groups that need no choice
MESHES = {"fsdp": "fsdp", "data": "ddp", "tensor": "tensor"}  # by mesh axis; the first two have all devices along it
NO_AXIS = "ddp"  # nothing is split but the batch


@dataclass(frozen=True)
class Request:
    """A request holds what the user typed: the overrides, and where to look for configs besides Meshloom's own."""

    overrides: tuple[str, ...]
    config_name: str = "config"
    config_path: str | None = None  # a directory that replaces Meshloom's own `conf/`
    pinned: Pinned | None = None  # what the weights mean that are opened
    predicts: bool = False  # and runs nothing: by the calibrations that the user keeps, unless another one is declared

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", tuple(map(with_quoted_homes, self.overrides)))

    @property
    def config_words(self) -> tuple[str, ...]:
        """Returns the command-line arguments that name the config, unless it is Meshloom's own."""
        name = ("--config-name", self.config_name) if self.config_name != "config" else ()
        return (*name, "--config-path", self.config_path) if self.config_path else name

    @property
    def search_path(self) -> list[str]:
        """Returns the override that says where users' configs are; empty if there are only Meshloom's."""
        return [text for text in self.overrides if overridden_key(text) == SEARCH_PATH]


@contextmanager
def hydra_session(request: Request) -> Iterator[ConfigGroups]:
    """Sets up Hydra's global state for composing within the `with`; yields the groups that the request can see."""
    register_sources()
    register_resolver()
    GlobalHydra.instance().clear()
    if request.config_path is None:
        session = initialize_config_module("meshloom.conf", version_base="1.3", job_name="meshloom")
    else:
        session = initialize_config_dir(str(Path(request.config_path).resolve()), version_base="1.3")
    with session:
        yield kept_groups(request.config_name, request.config_path, request.search_path, lambda: _groups(request))


def _groups(request: Request) -> ConfigGroups:
    """Returns the groups that the request can see; only within a session."""
    with reported(ConfigGroups()), warnings.catch_warnings(action="ignore"):  # of missing places, checked next
        configs = _repository(request)
        check_places(configs.get_sources())
    outer = [group for group in _options("", configs, ObjectType.GROUP) if group != "hydra"]
    inner = [f"{group}/{part}" for group in outer for part in _options(group, configs, ObjectType.GROUP)]
    found = ((group, _options(group, configs)) for group in sorted(outer + inner))
    groups = ConfigGroups({group: options for group, options in found if options})
    if theirs := {group for group in groups if group.split("/")[0] not in RunSpec.model_fields} - set(OPTIONAL):
        with suppress(ConfigError), reported(groups):  # composing the whole request reports it
            groups.appended = frozenset(theirs - set(chosen_options(request)))
    return groups


@dataclass(frozen=True)
class Reading:
    """The declaration of a request. problems: all that is wrong with it. spec: valid, made without the overrides that
    are dropped because of a problem; None if it is not valid without them either."""

    spec: RunSpec | None
    problems: tuple[Problem, ...]
    dropped: tuple[str, ...]

    @property
    def is_refused(self) -> bool:
        """Returns True if there are problems, and planning the rest can find no other: all that it finds rests on the
        target."""
        return bool(self.problems) and (self.spec is None or "target" in _roots(self.dropped))


def read_request(request: Request) -> Reading:
    """Returns what a request declares, and what is wrong with it."""
    with compositions_kept() as memory:
        asked = request, allowed_modules()
        last, reading = memory.last
        if last != asked:
            reading = _read(request)
            memory.last = asked, reading
        return reading


def _read(request: Request) -> Reading:
    with hydra_session(request) as groups:
        kept, problems = list[Override](), list[Problem]()
        for text in request.overrides:
            found = _problems_of_override(text, request, groups)
            problems += found
            kept += [] if found else [parse_override(text)]
        spec, wrong = _validate(kept, request, groups)
        problems += wrong
        if wrong:
            kept = [each for each in kept if not any(_concerns(each.key_or_group, p.where) for p in wrong)]
            spec, _ = _validate(kept, request, groups)
    valid = {each.input_line for each in kept}
    return Reading(spec, tuple(problems), tuple(text for text in request.overrides if text not in valid))


def _concerns(key: str, where: str) -> bool:
    """Returns True if an override of the key sets the place of a problem, a key below it or a node that holds it."""
    return is_within(where, key) or is_within(key, where)


def read_spec(request: Request, then: Callable[[RunSpec], T]) -> T:
    """Returns `then(RunSpec)` for a valid request. Raises ConfigError with all problems otherwise.

    Problems that `then` finds are reported together with wrong keys and types, unless they depend on those.
    """
    reading = read_request(request)
    if not reading.problems:
        assert reading.spec is not None
        return then(reading.spec)
    if reading.spec is None or reading.is_refused:
        raise ConfigError(reading.problems)
    more, dropped = list[Problem](), _roots(reading.dropped)
    try:
        then(reading.spec)
    except ConfigError as error:
        more = [problem for problem in error.problems if not dropped & _rests_on(problem)]
    raise ConfigError([*reading.problems, *more])


def check_config_files(request: Request) -> None:
    """Raises ConfigError for settings that config files may not make; checks nothing else."""
    with hydra_session(request) as groups:
        composed = _compose(request, groups)
        raise_if_any(problems_of_files(composed, list(map(parse_override, request.overrides))))


def compose_hydra(request: Request) -> DictConfig:
    """Returns Hydra's own node of the request, unresolved. Raises ConfigError for overrides that it does not take."""
    with hydra_session(request) as groups, reported(groups):
        raise_if_any(chain.from_iterable(_problems_of_override(text, request, groups) for text in request.overrides))
        return _compose(request, groups).hydra


def hydra_arguments(request: Request) -> list[str]:
    """Returns the overrides in a form for which Hydra refuses no key: the spec checks all keys at once."""
    with hydra_session(request) as groups:
        return _all_forced(list(map(parse_override, request.overrides)), request, groups)


def _compose(request: Request, groups: ConfigGroups, *more: str) -> DictConfig:
    forced = _all_forced(list(map(parse_override, request.overrides)), request, groups)
    return compose(request.config_name, overrides=[*forced, *more], return_hydra_config=True)


def hydra_run_dir(request: Request) -> Path:
    """Returns the run directory that Hydra will make for the request, with today's date and time in it; makes
    nothing."""
    return Path(os.path.realpath(_resolved(request, RUN_DIR)))  # `resolve` raises of a link to itself


def hydra_sweep_dir(request: Request) -> Path:
    """Returns the directory that Hydra will make for a sweep. request: its overrides without swept keys."""
    return Path(os.path.realpath(_resolved(request, SWEEP_DIR)))


def hydra_sweep_subdir(request: Request, index: int) -> str:
    """Returns the directory of a point, relative to that of its sweep. request: the point's."""
    return _resolved(request, SUBDIRECTORY, f"++hydra.job.num={index}", f"++hydra.job.id='{index}'")


def _resolved(request: Request, key: str, *more: str) -> str:
    """Returns one of Hydra's own settings, with today's date and time in it."""
    with hydra_session(request) as groups:
        return str(OmegaConf.select(_compose(request, groups, *more), key))


def _repository(request: Request) -> IConfigRepository:
    """Returns Hydra's view of all places that hold the request's configs."""
    return config_repository(request.config_name, request.search_path)


def config_sources(request: Request) -> Sequence[ConfigSource]:
    """Returns the places of configs, in order of precedence; only within a session."""
    return _repository(request).get_sources()


def chosen_options(request: Request) -> dict[str, str]:
    """Returns the option of each group that the primary config chooses by default; only within a session."""
    composed = compose(request.config_name, overrides=request.search_path, return_hydra_config=True)
    return dict(composed.hydra.runtime.choices)


def _options(group: str, configs: IConfigRepository, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
    """Returns the options of a group. Names that begin with `_` are parts of other files and are left out, as are
    targets that are made of a kind and a size: to find them takes longer than to read all other names."""
    if group == "target":
        sources = [
            each for each in configs.get_sources() if each.scheme() != TargetNames.scheme() and each.is_group(group)
        ]
        names = sorted({name for source in sources for name in source.list(group, kind)})
    else:
        names = configs.get_group_options(group, kind)
    return [name for name in names if not name.startswith("_")]


def _validate(
    overrides: Sequence[Override], request: Request, groups: ConfigGroups
) -> tuple[RunSpec | None, list[Problem]]:
    try:
        with reported(groups):
            forced = _all_forced(overrides, request, groups)
            composed = compose_kept(request.config_name, request.config_path, forced, groups)
            problems = problems_of_files(composed, overrides) + problems_of_settings(composed)
            choices = dict(composed.hydra.runtime.choices)
            with open_dict(composed):
                del composed["hydra"]
            texts = unresolved(composed)
            values, not_plain = plain_values(composed, texts)
            sources = find_sources(composed, texts)
    except ConfigError as error:
        return None, list(error.problems)
    problems += not_plain
    if problems:  # nothing that the files name is imported
        return None, problems
    typed_keys = [each.key_or_group for each in overrides]
    values, chosen_here = on_processor(values, choices, typed_keys)
    values = request.pinned.applied(values) if request.pinned else values
    values, problems = with_published_model(values, typed_keys)
    is_counted, values = task.counts_epochs(values), task.settled(values)
    if not request.predicts and (kept := _without_own_calibration(values)) is not values:
        values, said = kept, CALIBRATION_LEFT if GROUP in typed_keys else None
        chosen_here = "; ".join(filter(None, (chosen_here, said))) or None
    spec_type, not_loaded = spec_class(values)
    problems += not_loaded
    try:
        with blamed_on_user("the declaration", "checking it", is_theirs=False):
            spec = spec_type.model_validate_json(json.dumps(values)).with_sources(sources)
            spec = (spec.counting_epochs() if is_counted else spec).choosing_here(chosen_here)
        return (None if problems else spec), problems
    except ValidationError as error:
        own_groups = [group for group in groups if "/" not in group]
        keys = [key for key, _ in leaves(values)]
        found = validation_problems(error, spec_type, own_groups, keys)
        typed = {each.key_or_group: str(each.input_line) for each in overrides}
        found = [_with_typed_fix(problem, typed.get(problem.where, "")) for problem in found]
        return None, problems + [_without_values(problem, values, sources) for problem in found]


CALIBRATION_LEFT = (
    f"{GROUP}={AUTO_CHIP} is left out, since the program of a run must not depend on what a home directory keeps: "
    f"explain and compile use it; {GROUP}=NAME names one for this run, too"
)


def _without_own_calibration(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a run, whose program must not depend on what is in a home directory."""
    found = values.get(GROUP)
    if isinstance(found, dict) and found.get("chip") == AUTO_CHIP:
        return values | {GROUP: found | {"chip": None}}
    return values


def _with_typed_fix(problem: Problem, text: str) -> Problem:
    """Returns the problem of an override whose value is of another type, with the word that works as its fix."""
    key, _, value = text.partition("=")
    if text and problem.kind == "string_type":
        return replace(problem, fix=f"quote it: {quoted(text)}")
    variable = re.fullmatch(r"""['"]?(\$\{oc\.env:[^{}]+\})['"]?""", value)
    if variable and problem.kind:  # a variable is text, whatever it holds
        decoded = f'{key}="${{oc.decode:{variable[1]}}}"'  # read as YAML
        return replace(problem, fix=f"read its value: {shlex.quote(decoded)}")
    return problem


def _without_values(problem: Problem, values: dict[str, Any], sources: Sources) -> Problem:
    """Returns the problem without the value that came from the environment: text search does not find a short one."""
    for name in IN_DEFAULTS:
        if os.environ.get(name) and os.environ[name] in problem.what:
            problem = replace(problem, where=f"{problem.where} (by the variable {name})")
    for key, text in sources.items():
        if is_within(problem.where, key):
            shown = str(OmegaConf.select(OmegaConf.create(values), key))
            for value in (shown, shortened(shown, MOST_SHOWN)):
                problem = replace(problem, what=problem.what.replace(value, text), fix=problem.fix.replace(value, text))
    return problem


def _all_forced(overrides: Sequence[Override], request: Request, groups: ConfigGroups) -> list[str]:
    """Returns the overrides as Hydra takes them, with a mesh for a typed sharding that names none."""
    forced = [_forced(each, groups) for each in overrides]
    typed = {each.key_or_group: str(each.value()) for each in overrides}
    name, meshes = typed.get("sharding", ""), groups.get("mesh", [])
    if "mesh" in typed or name not in groups.get("sharding", ()):
        return forced
    if not (request.search_path or request.config_path):  # Meshloom's own name their meshes
        return forced
    own = compose_kept(request.config_name, request.config_path, [*request.search_path, f"sharding={name}"], groups)
    if own.hydra.runtime.choices.get("mesh") is not None:
        return forced
    rules = OmegaConf.to_container(own.sharding)
    mesh = name if name in meshes else mesh_for(rules) if isinstance(rules, dict) else ""
    return [*forced, f"mesh={mesh}"] if mesh in meshes else forced


def mesh_for(sharding: Mapping[Any, Any]) -> str:
    """Returns the mesh of a sharding by its rules: "fsdp" of {"parameters": [{"logical": [..], "mesh": ["fsdp"]}]}.

    Of several axes it is the first one of fsdp, data and tensor; how many devices the others get is the user's choice.
    """
    tables = [table for table in sharding.values() if isinstance(table, list)]
    rules = [rule for table in tables for rule in table if isinstance(rule, Mapping)]
    # Every mesh splits the batch.
    named = {axis for rule in rules if "batch" not in (rule.get("logical") or ()) for axis in rule.get("mesh") or ()}
    used = sharding.get("mesh_axes")
    named &= set(used) if isinstance(used, list) else named
    return next((mesh for axis, mesh in MESHES.items() if axis in named), NO_AXIS)


def _forced(override: Override, groups: ConfigGroups) -> str:
    """Returns `key=value` as `++key=value`; choices of groups, deletions and Hydra's own settings stay as they are."""
    text, key = str(override.input_line), override.key_or_group
    if override.is_delete():
        return text
    if key in DIRECTORIES:
        return with_home(text)
    if override.is_hydra_override():  # Hydra refuses a new key below, which is what this one is for
        return "++" + text.lstrip("+") if key.startswith(SWEEPER_PARAMS) else text
    if _is_choice(override, groups):
        return f"+{text}" if text[0].isalpha() and key in groups.appended else text
    return "++" + text.lstrip("+")


def _is_choice(parsed: Override, groups: ConfigGroups) -> bool:
    """Returns True for `group=option`, as opposed to `key=value`."""
    return parsed.package is not None or "/" in parsed.key_or_group or parsed.key_or_group in groups


def _problems_of_override(text: str, request: Request, groups: ConfigGroups) -> list[Problem]:
    """Returns the problems of one override that are found before composing: its grammar, a sweep without -m, its
    group's options."""
    try:
        parsed = parse_override(text)
    except ConfigError as error:
        return list(error.problems)
    group = parsed.key_or_group
    if group == OPT_IN:
        fix = f"type {FLAG}=MODULE, without a space"
        return [Problem(group, "is a flag, not a key, so that no config file can set it", fix)]
    if group == "hydra.job.env_copy":
        fix = "leave it out: the points of a sweep inherit the environment of the command"
        return [Problem(group, "the values of these variables would be written to .hydra/hydra.yaml", fix)]
    if group == "hydra.job.chdir" and parsed.value() not in (False, None):
        what = "relative paths of the declaration would be resolved in the run directory"
        return [Problem(group, what, "leave it out: a run already writes everything to its directory")]
    if parsed.is_sweep_override():
        fix = f"add -m to run once per value, or pass a list: '{group}=[...]', or text: {quoted(shortened(text, 200))}"
        return [Problem(group, f"'{shortened(text)}' names several values", fix)]
    if not _is_choice(parsed, groups) or parsed.is_delete():
        return []
    if parsed.value() is None and group in OPTIONAL:
        return [Problem(group, "null chooses nothing, which is the default", "leave it out")]
    name = visible_line(shortened("null" if parsed.value() is None else str(parsed.value())))
    options = groups.get(group) or _options(group, _repository(request))
    if name in options or (group == "target" and target_names.is_sized(name)):
        return []
    if not options:
        return [Problem(group, "there is no such group", use_one_of(group, groups))]
    if missing := without_plugin(group, name):
        return [missing]
    if group == "target":
        return [target_names.problem_of(name, options)]
    fix = f"type {words}" if (words := meant_choice(group, name)) else use_one_of(name, options)
    return [Problem(group, f"there is no '{name}' in this group", fix)]


# Keys that a pass's finding depends on: it means nothing while one of these is wrong. Every finding but those about the
# target depends on the keys of the mesh.
_RESTS_ON = {"target": {"target"}, "mesh": {"mesh", "target", "sharding"}}
_RESTS_ON_PLAN = {"mesh", "target", "sharding", "model", "experiment", "num_microbatches"}


def _roots(overrides: Iterable[str]) -> set[str]:
    """Returns the top-level keys of overrides, and the keys that misspelled ones may have meant."""
    roots = {re.split(r"[.=@/]", text.lstrip("+~"))[0] for text in overrides}
    return roots | {near for root in roots for near in get_close_matches(root, RunSpec.model_fields, n=1)}


def _rests_on(problem: Problem) -> set[str]:
    """Returns the top-level keys that the problem depends on. A place that is not a key is a file of the data."""
    root = re.split(r"[.\[]", problem.where)[0]
    data = set() if root in RunSpec.model_fields else {"data"}
    return {root} | data | _RESTS_ON.get(root, _RESTS_ON_PLAN)
