"""Turns overrides into a declaration, and a declaration into a plan and its explanation.

The program that calls belongs to someone else, so the state of the process is restored around each call of the Python
interface. While Meshloom works, it changes Hydra's state, environment variables, the settings of JAX's compilation
cache and the level of a logger. One thing cannot be restored: JAX has started, with simulated devices if the target has
them.
"""

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from os import PathLike, fspath
from typing import Any, TypeVar

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from meshloom.compiler import plan as compiler_plan
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any
from meshloom.compiler.core.format import human_bytes, human_parameters
from meshloom.compiler.core.user_code import code_allowed_from, parse_allowed
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.hydra_private import hydra_state_put_back
from meshloom.compiler.declare.hydra_settings import SEARCH_PATH, search_path_override
from meshloom.compiler.declare.overrides import overridden_key
from meshloom.compiler.declare.problems import OF_HYDRA, as_config_error
from meshloom.compiler.declare.run_spec import Origin, RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.report.explain import explain as print_plan
from meshloom.compiler.report.explain import plan_as_json
from meshloom.compiler.report.views.page import plan_table
from meshloom.compiler.spec.target_spec import LocalTarget, TargetSpec
from meshloom.compiler.target.topology import CUDA_ENVIRONMENT, LIBTPU_ENVIRONMENT

from ..processes.devices import start_as_found, start_devices
from ..processes.distributed import Processes

CACHE_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
T = TypeVar("T")
WIDTH = 200  # of tables, in characters


@contextmanager
def library_call(modules: Sequence[str] = ()) -> Iterator[None]:
    """Within the `with`, declarations can be read, and code of these modules may run."""
    with hydra_state_put_back(), code_allowed_from(modules):
        try:
            yield
        except OF_HYDRA as error:
            raise as_config_error(error) from error


@contextmanager
def settings_put_back() -> Iterator[None]:
    """Within the `with`, programs can be compiled and run; afterwards environment, JAX and loggers are as before."""
    with _environment_put_back(), _cache_put_back(), _orbax_is_silent():
        yield


def start_for_compile(target: TargetSpec) -> None:
    """Starts JAX as compiling for the target needs it. Raises ConfigError if it has started in another way."""
    if target.kind == "cpu" or isinstance(target, LocalTarget):
        start_devices(target, Processes(), warn)
    else:
        start_as_found()


def warn(text: str) -> None:
    """Issues a Python warning, which a program can filter."""
    warnings.warn(text.removeprefix("warning: "), stacklevel=2)


@contextmanager
def _environment_put_back() -> Iterator[None]:
    names = (*LIBTPU_ENVIRONMENT, *CUDA_ENVIRONMENT)
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}


@contextmanager
def _cache_put_back() -> Iterator[None]:
    """Within the `with`, JAX may use another compilation cache. JAX opens a cache once, so it is closed on both
    changes."""
    before = {name: getattr(jax.config, name) for name in CACHE_SETTINGS}
    reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        reset_cache()


@contextmanager
def _orbax_is_silent() -> Iterator[None]:
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True, repr=False)
class Plan(compiler_plan.Plan[RunSpec]):
    """The decisions that precede any compiler: mesh, layouts with reasons, memory, FLOPs.

    The compiler's own class cannot show itself in a notebook: the views of a report are made from plans.
    """

    def __repr__(self) -> str:
        memory = f"{human_bytes(self.memory.state_bytes)} of state per device"
        size = f"{human_parameters(self.num_parameters)} parameters"
        return f"<Plan: {size}, {self.mesh} on {self.target.name}, {memory}>"

    def _repr_html_(self) -> str:
        return plan_table(self, estimate_step(self))


@dataclass(frozen=True, repr=False)
class Explanation:
    """A plan in words, as JSON, and as a table in a notebook: where each array lies and why, bytes per device,
    communication, and the shortest possible step."""

    plan: Plan

    @cached_property
    def text(self) -> str:
        """Returns what `meshloom explain` prints."""
        out = io.StringIO()
        print_plan(self.plan, Console(out, width=WIDTH, is_terminal=False))
        return out.getvalue()

    @cached_property
    def json(self) -> dict[str, Any]:
        """Returns the content of a run's plan.json."""
        return plan_as_json(self.plan, chosen_here=self.plan.spec.chosen_here)

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()


def compose(
    *overrides: str, config_dir: str | PathLike[str] | None = None, allow_code_from: Sequence[str] = ()
) -> RunSpec:
    """Composes a declaration from overrides, as typed after `meshloom train`: "sharding=fsdp", "num_steps=20".

    config_dir: a folder of configs beside ours. allow_code_from: names of modules whose code the declaration may run;
    without it, a config can only name classes of installed packages. Raises ConfigError with all problems.
    """
    origin = Origin(
        check_overrides(overrides), None if config_dir is None else fspath(config_dir), tuple(allow_code_from)
    )
    return _read(origin, lambda spec: spec)


def plan(*declared: str | RunSpec) -> Plan:
    """Plans a declaration, or the one that overrides compose, without a device. Raises ConfigError with all
    problems."""
    return with_spec(declared, _plan_from_library, predicts=True)


def explain(*declared: str | RunSpec | Plan) -> Explanation:
    """Explains a plan, a declaration, or the declaration that overrides compose. Raises ConfigError with all
    problems."""
    if len(declared) == 1 and isinstance(declared[0], Plan):
        return Explanation(declared[0])
    return Explanation(with_spec(declared, _plan_from_library, predicts=True))


def _plan_from_library(spec: RunSpec) -> Plan:
    if isinstance(spec.target, LocalTarget):
        start_devices(spec.target, Processes(), warn)
    return shown_as(Plan, plan_run(spec))


def shown_as(kind: type[T], found: Any, **more: Any) -> T:
    """Returns the same dataclass as one of `kind`, which can show itself. more: fields that only `kind` has."""
    return kind(**{field.name: getattr(found, field.name) for field in fields(found)} | more)


def with_spec(
    declared: Sequence[str | RunSpec | compiler_plan.Plan[RunSpec]],
    then: Callable[[RunSpec], T],
    *,
    predicts: bool = False,
) -> T:
    """Returns `then` of one declaration, of the one of a plan, or of the one that overrides compose. predicts: as in a
    `Request`.

    Its problems are reported together with all others of the overrides; for that it may be tried on a part of them.
    """
    overrides = tuple(each for each in declared if isinstance(each, str))
    if len(overrides) == len(declared):
        return _read(Origin(overrides, predicts=predicts), then)
    spec = declared[0].spec if isinstance(declared[0], compiler_plan.Plan) else declared[0]
    if len(declared) > 1 or not isinstance(spec, RunSpec):
        raise _no_overrides(declared)
    with library_call(spec.origin.code_allowed_from):
        return then(spec)


def check_overrides(given: Sequence[Any]) -> tuple[str, ...]:
    """Returns the overrides that a function was given. Raises ConfigError if they are not all texts."""
    if all(isinstance(each, str) for each in given):
        return tuple(given)
    raise _no_overrides(given)


def _no_overrides(given: Sequence[Any]) -> ConfigError:
    other = next(each for each in given if not isinstance(each, str))
    is_list = isinstance(other, list | tuple)
    fix = (
        "unpack it: compose(*overrides)"
        if is_list
        else "give either texts, such as 'sharding=fsdp', or one declaration"
    )
    return ConfigError([Problem("overrides", f"one of them is a {type(other).__name__}, not a text", fix)])


def request_of_origin(origin: Origin) -> Request:
    """Returns the request of a declaration that was composed from overrides."""
    assert origin.overrides is not None
    return Request(tuple(search_path_override(origin.overrides, origin.config_dir)), predicts=origin.predicts)


def _read(origin: Origin, then: Callable[[RunSpec], T]) -> T:
    overrides, modules = origin.overrides or (), parse_allowed(origin.code_allowed_from, "allow_code_from")
    raise_if_any(_problem_of_hydra(text) for text in overrides if _is_of_hydra(text))
    with library_call(modules):
        return read_spec(request_of_origin(origin), then=lambda spec: then(spec.with_origin(origin)))


def _is_of_hydra(override: str) -> bool:
    key = overridden_key(override)
    return key.startswith("hydra.") and key != SEARCH_PATH


def _problem_of_hydra(override: str) -> Problem:
    fix = "leave it out; compile and train take the directory of a run as run_dir="
    return Problem(overridden_key(override), "is a setting of the command, and does nothing here", fix)
