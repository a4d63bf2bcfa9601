"""Reads the values of a sweep, and checks them before any point runs.

Each value is checked by itself, not each combination: a point that cannot run is a row of the sweep with its reason.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from hydra.core.override_parser.types import Glob
from omegaconf import DictConfig, OmegaConf

from ..core.errors import COMMAND_LINE, ConfigError, Problem, raise_if_any
from ..core.key_paths import is_within, leaves
from .compose import Request, compose_hydra, hydra_session, read_spec
from .compositions import compositions_kept
from .hydra_settings import SEARCH_PATH, SWEEPER_PARAMS, check_subdirectories
from .overrides import MOST_POINTS, overridden_key, parse_override, parsed_or_none, sweep_values
from .run_spec import RunSpec

MOST_CHECKED = 40  # values of one key, spread over all that there are; each takes 0.05 s, or 0.3 s for a group
GRIDS = ("hydra_plugins.meshloom_sweeps.sweeper.GridSweeper", "hydra._internal.core_plugins.basic_sweeper.BasicSweeper")


@dataclass(frozen=True)
class SweepRequest:
    """A checked sweep.

    request: as typed, with each `glob` replaced by its options. fixed: the overrides that all points share, as typed.
    settled: the same with Hydra's own settings. axes: the overrides of each swept key's values; empty if a sweeper
    chooses them as it goes. spec: the first point's. hydra: Hydra's own node, unresolved. is_grid: all combinations are
    run; otherwise a sweeper chooses.
    """

    request: Request
    fixed: tuple[str, ...]
    settled: tuple[str, ...]
    axes: Mapping[str, tuple[str, ...]]
    spec: RunSpec
    hydra: DictConfig
    is_grid: bool

    @property
    def launcher(self) -> dict[str, Any]:
        """Returns the settings of the launcher."""
        values: Any = OmegaConf.to_container(self.hydra.launcher, resolve=True)
        return values

    @property
    def directory(self) -> str:
        """Returns how the directory of the sweep is named, unresolved."""
        return _unresolved(self.hydra.sweep)["dir"]

    @property
    def subdirectory(self) -> str:
        """Returns how the directories of points are named, unresolved."""
        return _unresolved(self.hydra.sweep)["subdir"]

    @property
    def num_points(self) -> int | None:
        """Returns the number of points; None if the sweeper decides as it goes."""
        return math.prod(map(len, self.axes.values())) if self.is_grid else None


def read_sweep_request(request: Request) -> SweepRequest:
    """Returns the sweep of a request. Raises ConfigError with everything that is wrong with any of its values."""
    with compositions_kept():
        typed = [text for text in request.overrides if not _is_of_sweeper(text)]
        try:
            hydra = compose_hydra(_replaced(request, [text for text in request.overrides if _is_of_hydra(text)]))
            problems = list[Problem]()
        except ConfigError as error:  # the other problems are found without these settings
            hydra, problems = compose_hydra(_replaced(request, request.search_path)), list(error.problems)
        is_grid = str(hydra.sweeper.get("_target_")) in GRIDS
        written = list[str]()
        axes, base = dict[str, tuple[str, ...]](), list[str]()
        params = list(_params(hydra, request))
        for text in [*params, *typed]:
            try:
                values = _values(text, request, is_grid=is_grid)
            except ConfigError as error:
                problems += error.problems
                continue
            if values is None:
                base.append(text)
            else:
                axes[_name(text)] = values
            if is_grid or text not in params:  # another sweeper reads its parameters itself
                if values is not None and isinstance((parsed := parse_override(text)).value(), Glob):  # its options
                    text = f"{parsed.get_key_element()}=choice({','.join(each.partition('=')[2] for each in values)})"
                written.append(text)
        num_points = math.prod(map(len, axes.values()))
        if num_points > MOST_POINTS:
            what = f"the sweep has {num_points:,} points, more than the maximum of {MOST_POINTS:,}"
            raise ConfigError([*problems, Problem(COMMAND_LINE, what, "sweep over fewer values")])
        first = list[RunSpec]()
        problems += _check_values(request, base, list(axes.values()), first)
        raise_if_any(problems)
        if num_points > 1:
            check_subdirectories(_unresolved(hydra.sweep)["subdir"])
    fixed = tuple(text for text in base if not _is_of_hydra(text) or overridden_key(text) == SEARCH_PATH)
    asked = [text for text in request.overrides if _is_of_sweeper(text) and not is_grid]
    return SweepRequest(_replaced(request, [*asked, *written]), fixed, tuple(base), axes, first[0], hydra, is_grid)


@cache
def value_of(override: str) -> Any:
    """Returns the value that an override sets: "mesh.tensor=4" -> 4."""
    return parse_override(override).value()


def _replaced(request: Request, overrides: Sequence[str]) -> Request:
    return replace(request, overrides=tuple(overrides))


def _is_of_hydra(text: str) -> bool:
    return overridden_key(text).startswith(("hydra.", "hydra/"))


def _is_of_sweeper(text: str) -> bool:
    """Returns True for the sweeper's own parameters, which are read after they are composed."""
    return is_within(overridden_key(text), SWEEPER_PARAMS)


def _params(hydra: DictConfig, request: Request) -> Iterator[str]:
    """Returns `hydra.sweeper.params` as overrides, without those that are typed too."""
    typed = {_name(text) for text in request.overrides}
    params = _unresolved(hydra.sweeper).get("params")
    for key, value in leaves(params) if params else ():
        if _name(text := f"{key}={value}") not in typed:
            yield text


def _unresolved(node: DictConfig) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(node, resolve=False)
    return values


def _name(text: str) -> str:
    """Returns the key as it is typed, without `+`: "++a.b=1,2" -> "a.b"."""
    parsed = parsed_or_none(text)
    return parsed.get_key_element().lstrip("+~") if parsed else text


def _values(text: str, request: Request, *, is_grid: bool) -> tuple[str, ...] | None:
    """Returns the overrides of a swept key; None for one that is not swept."""
    parsed = parsed_or_none(text)
    if parsed is None or not parsed.is_sweep_override() or parsed.is_hydra_override():
        return None
    if parsed.is_interval_sweep() and not is_grid:
        return ()
    options: list[str] = []
    if isinstance(parsed.value(), Glob):
        with hydra_session(request) as groups:
            options = groups.get(parsed.key_or_group, [])
    return tuple(sweep_values(parsed, options))


def _check_values(
    request: Request, base: list[str], axes: list[tuple[str, ...]], read: list[RunSpec]
) -> Iterator[Problem]:
    """Reads the first point, and each other value with the first values of all other keys."""
    first = [value for values in axes for value in values[:1]]
    points = [base + first]
    for values in filter(None, axes):
        rest = [value for value in first if value != values[0]]
        every = math.ceil(len(values[1:]) / MOST_CHECKED) or 1  # evenly spread, with the last one
        points += [[*base, *rest, value] for value in values[1:][::-every][::-1]]
    for point in points:
        try:
            read_spec(_replaced(request, point), then=read.append)
        except ConfigError as error:
            yield from error.problems
