"""Options of XLA: those that a declaration names, sets of them that go together for a chip, and what the installed
compiler makes of them. The sets are data, conf/overlap/_compiler_options.yaml."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal, Self

import jax
import yaml
from jax.sharding import SingleDeviceSharding
from pydantic import model_validator

from meshloom.models.config import Record

from ..config.spec import CompilerOption
from ..core.collectives import CollectiveKind
from ..core.errors import ConfigError, Problem, raise_if_any, use_one_of
from .target import TargetPlan

_NO_SUCH_OPTION = re.compile(r"No such compile option: '(?P<name>[^']*)'")
_WRONG_VALUE = re.compile(r"setting option (?P<name>\w+), (?P<what>.*?)\.?$", re.M)

Moved = Literal["weights", "activations"]
Options = Mapping[str, CompilerOption]


class OptionNote(Record):
    """One option. since: the oldest compiler that it was seen in. hazard: what it may cost or break; None: not known to
    do either."""

    what: str
    why: str
    since: str
    hazard: str | None


class EnvironmentNote(Record):
    """A setting that only the environment of a process can make, for whoever launches it."""

    what: str
    why: str


class OptionSet(Record):
    """values: options by chip or platform, the chip's before its platform's. hides: kinds of collectives that run
    beside arithmetic with it. begins_early: of them what a trip of a loop needs first begins in the trip before.
    tried_for: what `overlap.search` hopes to hide with it; empty: never tried."""

    what: str
    tried_for: tuple[Moved, ...]
    hides: tuple[CollectiveKind, ...]
    begins_early: bool
    values: dict[str, dict[str, CompilerOption]]

    def values_for(self, target: TargetPlan) -> Options | None:
        """None where there are none for this target."""
        return _for_target(self.values, target)


class OptionTable(Record):
    """What is known of compilers, by chip or platform, and the options that they have.

    hides_by_default: kinds of collectives of weights that are asynchronous without any option.
    copies_carried: what a loop carries to its next trip is copied.
    gathers_before_loops: a gather is waited for in front of a loop that stands before it.
    reduce_scatters_up_to: the most devices, times the odd part of a dimension that is not scattered, of which a
        reduce-scatter stays one.
    unroll_aborts: the process ends at several layers in a trip where a mesh axis splits matmuls.
    waits_for_all: collectives are waited for whatever the options: one that is made in vain takes its time.
    sums_each_matmul: partial results of each matmul are added up for itself, whole; else of several at once, in shards.
    permutes_beside_matmuls: permutes run beside what does not need them; not on more chips than permutes_wait_above.
    collectives_in_any_order: devices may run those that do not need each other in different orders, and wait for ever.
    """

    hides_by_default: dict[str, tuple[CollectiveKind, ...]]
    copies_carried: tuple[str, ...]
    gathers_before_loops: tuple[str, ...]
    reduce_scatters_up_to: dict[str, int]
    unroll_aborts: tuple[str, ...]
    waits_for_all: tuple[str, ...]
    sums_each_matmul: tuple[str, ...]
    permutes_beside_matmuls: tuple[str, ...]
    permutes_wait_above: dict[str, int]
    collectives_in_any_order: tuple[str, ...]
    sets: dict[str, OptionSet]
    options: dict[str, OptionNote]
    environment: dict[str, EnvironmentNote]

    @model_validator(mode="after")
    def _check(self) -> Self:
        used = {name for one in self.sets.values() for values in one.values.values() for name in values}
        if used != set(self.options):
            raise ValueError(f"described, or in a set, and not both: {sorted(used ^ set(self.options))}")
        return self

    def sets_for(self, target: TargetPlan) -> dict[str, OptionSet]:
        """Those that have values for this target."""
        return {name: one for name, one in self.sets.items() if one.values_for(target) is not None}

    def aborts_unrolled(self, split_axes: Sequence[str], target: TargetPlan) -> bool:
        """True where the compiler would abort at several layers in a trip. split_axes: that matmuls are split over."""
        return bool(split_axes) and target.platform in self.unroll_aborts

    def why_permutes_wait(self, target: TargetPlan) -> str | None:
        """None where they run beside matmuls."""
        most = _for_target(self.permutes_wait_above, target)
        if target.platform not in self.permutes_beside_matmuls:
            return f"the compiler for {target.name} runs no permutes beside matmuls"
        if most is not None and target.num_chips > most:
            return f"the compiler for {target.name} runs no permutes beside matmuls on more than {most} chips"
        return None

    def most_odd(self, num_devices: int, target: TargetPlan) -> int | None:
        """The largest odd part of a dimension of which so many devices reduce-scatter another; None: any, or none."""
        most = _for_target(self.reduce_scatters_up_to, target)
        return most // num_devices or None if most else None

    def hides(self, names: Sequence[str], moved: Moved, target: TargetPlan) -> frozenset[CollectiveKind]:
        """Kinds of collectives of weights, or of activations, that run beside arithmetic with these sets."""
        other: Moved = "activations" if moved == "weights" else "weights"
        chosen = [self.sets[name].hides for name in names if self.sets[name].tried_for != (other,)]
        if moved == "weights" and not chosen:
            chosen = [_for_target(self.hides_by_default, target) or ()]
        return frozenset(kind for kinds in chosen for kind in kinds)


@cache
def option_table() -> OptionTable:
    """The table of conf/."""
    text = files("meshloom.conf").joinpath("overlap", "_compiler_options.yaml").read_text()
    return OptionTable.model_validate_json(json.dumps(yaml.safe_load(text)))


def plan_set_options(names: Sequence[str], target: TargetPlan) -> Options:
    """The options of these sets for this target; what a later set says wins. Raises ConfigError for sets that do not
    exist, or have nothing for the target."""
    table, problems, found = option_table(), list[Problem](), dict[str, CompilerOption]()
    choices = table.sets_for(target)
    for index, name in enumerate(names):
        if name in choices:
            found |= choices[name].values_for(target) or {}
            continue
        what = f"'{name}' has no options for {target.name}" if name in table.sets else f"there is no set '{name}'"
        fix = use_one_of(name, list(choices)) if choices else "leave it out"
        problems.append(Problem(f"overlap.option_sets[{index}]", what, fix))
    raise_if_any(problems)
    return found


def check_unroll(num_layers: int, split_axes: Sequence[str], target: TargetPlan) -> None:
    """Raise ConfigError where the compiler would abort the process. num_layers: in a trip. split_axes: mesh axes that
    matmuls are split over."""
    if num_layers > 1 and option_table().aborts_unrolled(split_axes, target):
        what = f"the compiler for {target.name} aborts at {num_layers} layers in a trip where {', '.join(split_axes)}"
        raise_if_any([Problem("overlap.layers.unroll", f"{what} splits matmuls", "set overlap.layers.unroll=1")])


def refused_options(options: Options, device: Any) -> dict[str, Problem]:
    """Those that the compiler of this device does not take, each with its Problem: tried on a program that does
    nothing. Raises ConfigError for options that it knows and does not take together, or for such a chip."""
    refused: dict[str, Problem] = {}
    left: dict[str, Any] = dict(options)
    nothing = jax.jit(lambda: 0, out_shardings=SingleDeviceSharding(device)).lower() if left else None
    while left and nothing is not None:
        try:
            nothing.compile(compiler_options=left)
            break
        except jax.errors.JaxRuntimeError as error:
            problem = option_problem(str(error), device.platform)
            name = problem.where.partition(".")[2] if problem else ""
            if problem is None or left.pop(name, None) is None:
                what = f"the compiler for {device.platform} refuses them: {str(error).splitlines()[0]}"
                fix = "leave out the option that it speaks of, or set what it asks for"
                raise ConfigError([*refused.values(), Problem("compiler_options", what, fix)]) from error
            refused[name] = problem
    return refused


def check_compiler_options(options: Options, device: Any) -> None:
    """Raise ConfigError with every option that the compiler of this device does not take."""
    raise_if_any(list(refused_options(options, device).values()))


def option_problem(said: str, platform: str) -> Problem | None:
    """The Problem with a compiler option in an error of XLA's; None for any other error."""
    if match := _NO_SUCH_OPTION.search(said):
        fix = "see the spelling; options come and go with versions of the compiler"
        return Problem(f"compiler_options.{match['name']}", f"the compiler for {platform} has no such option", fix)
    if match := _WRONG_VALUE.search(said):
        return Problem(f"compiler_options.{match['name']}", match["what"], "give a value of the option's type")
    return None


def _for_target(values: Mapping[str, Any], target: TargetPlan) -> Any:
    """What there is for the target's chip, else for its platform, else None."""
    names = [target.chip.name] if target.chip else []
    return next((values[name] for name in (*names, target.platform) if name in values), None)
