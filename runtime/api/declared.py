"""Overrides to a declaration, and a declaration to its plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from os import PathLike, fspath
from typing import TypeVar

from meshloom.compiler import plan as compiler_plan
from meshloom.compiler.config.allowed_code import parse_allowed
from meshloom.compiler.config.compose import Request, read_spec
from meshloom.compiler.config.hydra_settings import SEARCH_PATH, search_path_override
from meshloom.compiler.config.override_parser import overridden_key
from meshloom.compiler.config.spec import Origin, RunSpec
from meshloom.compiler.config.target_spec import LocalTarget
from meshloom.compiler.core.errors import Problem, raise_if_any
from meshloom.compiler.core.format import human_bytes, human_parameters
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.report.views.page import plan_table

from ..processes.devices import start_devices
from ..processes.distributed import Processes
from .guest import as_guest, warn

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Plan(compiler_plan.Plan):
    """What was decided for a declaration before any compiler is called: mesh, layouts with reasons, memory, FLOPs."""

    def __repr__(self) -> str:
        memory = f"{human_bytes(self.memory.state_bytes)} of state per device"
        size = f"{human_parameters(self.num_parameters)} parameters"
        return f"<Plan: {size}, {self.mesh} on {self.target.name}, {memory}>"

    def _repr_html_(self) -> str:
        return plan_table(self, estimate_step(self))


def compose(
    *overrides: str, config_dir: str | PathLike[str] | None = None, allow_code_from: Sequence[str] = ()
) -> RunSpec:
    """Composes a declaration from overrides, as typed after `meshloom train`: "sharding=fsdp", "num_steps=20".

    config_dir: a folder of configs beside ours. allow_code_from: names of modules whose code the declaration may run;
    without it, a config can name classes of installed packages alone. Raises ConfigError with all that is wrong.
    """
    origin = Origin(overrides, None if config_dir is None else fspath(config_dir), tuple(allow_code_from))
    return _read(origin, lambda spec: spec)


def plan(*declared: str | RunSpec) -> Plan:
    """Plans a declaration, or the one that overrides compose, without a device. Raises ConfigError with all that is
    wrong."""
    return with_spec(declared, plan_as_guest)


def plan_as_guest(spec: RunSpec) -> Plan:
    """Returns the same for a caller that is already a guest."""
    if isinstance(spec.target, LocalTarget):
        start_devices(spec.target, Processes(), warn)
    return as_shown(plan_run(spec))


def as_shown(found: compiler_plan.Plan) -> Plan:
    """Returns the same plan, as a terminal and a notebook can show it."""
    return Plan(**{field.name: getattr(found, field.name) for field in fields(found)})


def with_spec(declared: Sequence[str | RunSpec], then: Callable[[RunSpec], T]) -> T:
    """Returns `then` of one declaration, or of the one that overrides compose. What it finds wrong is reported with all
    else that is wrong with these, for which it may be tried on a part of them."""
    overrides = tuple(each for each in declared if isinstance(each, str))
    if len(overrides) == len(declared):
        return _read(Origin(overrides), then)
    spec = declared[0]
    if len(declared) > 1 or not isinstance(spec, RunSpec):
        raise TypeError("give either overrides, such as 'sharding=fsdp', or one declaration")
    with as_guest(spec.origin.code_allowed_from):
        return then(spec)


def specs_of(declared: Sequence[str | RunSpec | compiler_plan.Plan]) -> list[str | RunSpec]:
    """Returns the same with the declaration of each plan."""
    return [each.spec if isinstance(each, compiler_plan.Plan) else each for each in declared]


def request_of_origin(origin: Origin) -> Request:
    """Returns the request of a declaration that was typed."""
    assert origin.overrides is not None
    return Request(tuple(search_path_override(origin.overrides, origin.config_dir)))


def _read(origin: Origin, then: Callable[[RunSpec], T]) -> T:
    overrides, modules = origin.overrides or (), parse_allowed(origin.code_allowed_from, "allow_code_from")
    raise_if_any(_problem_of_hydra(text) for text in overrides if _is_of_hydra(text))
    with as_guest(modules):
        return read_spec(request_of_origin(origin), then=lambda spec: then(spec.with_origin(origin)))


def _is_of_hydra(override: str) -> bool:
    key = overridden_key(override)
    return key.startswith("hydra.") and key != SEARCH_PATH


def _problem_of_hydra(override: str) -> Problem:
    fix = "leave it out; compile and train take the directory of a run as run_dir="
    return Problem(overridden_key(override), "is a setting of the command, and does nothing here", fix)
