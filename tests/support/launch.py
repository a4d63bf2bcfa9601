"""Launches of small runs."""

from functools import cache

from conftest import SMALL
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.runtime.launch.engines import Rendering, render
from meshloom.runtime.launch.plan import LaunchPlan, plan_launch


def launched(*overrides: str, allowed: tuple[str, ...] = ()) -> LaunchPlan:
    """Returns the plan of a launch."""
    return _read(*overrides, allowed=allowed)[1]


def rendered(*overrides: str) -> Rendering:
    """Returns what the engine of a launch is told."""
    spec, plan = _read(*overrides)
    return render(spec.launch, plan)


@cache
def _read(*overrides: str, allowed: tuple[str, ...] = ()) -> tuple[RunSpec, LaunchPlan]:
    request = Request((*SMALL, *overrides))
    return read_spec(request, then=lambda spec: (spec, plan_launch(spec, request, label="test", allowed=allowed)))
