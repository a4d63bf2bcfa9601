"""Runs `meshloom launch`: checks the declaration here, then has an engine start it on every host of its target."""

import argparse

from meshloom.compiler.core.errors import all_of
from meshloom.compiler.core.visible import write_error
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.model_choice import model_of
from meshloom.compiler.declare.user_code import allowed_modules
from meshloom.compiler.driver import plan_run
from meshloom.compiler.spec.spec import RunSpec
from meshloom.compiler.spec.target_spec import LocalTarget

from ..data.splits import warnings_of_demo_data
from ..launch.engines import run_launch
from ..launch.plan import LaunchPlan, flags_of_artifact, plan_launch
from ..processes.devices import plan_without_devices


def launch_command(request: Request, flags: argparse.Namespace) -> int:  # noqa: ARG001 (as all commands)
    """Starts the run, or prints the commands that would. Raises ConfigError if the hosts would refuse the
    declaration."""
    spec = read_spec(request, then=lambda spec: _checked(spec, request))
    model, _, _ = (model_of(request) or spec.model.family).partition(" (")
    label = spec.run.name or f"{model}-{spec.target.name}"
    return run_launch(spec, _plan(spec, request, label))


def _checked(spec: RunSpec, request: Request) -> RunSpec:
    all_of(lambda: _plan(spec, request, "run"), lambda: _check_plan(spec))
    return spec


def _plan(spec: RunSpec, request: Request, label: str) -> LaunchPlan:
    variables = flags_of_artifact(spec.artifact) if spec.artifact else {}
    return plan_launch(spec, request, label=label, allowed=allowed_modules(), environment=variables)


def _check_plan(spec: RunSpec) -> None:
    """Plans the run, unless only its hosts have its devices. Prints warnings about its data; the hosts print others."""
    if not isinstance(spec.target, LocalTarget):
        plan_without_devices(spec.target)
        for warning in warnings_of_demo_data(plan_run(spec)):
            write_error(warning.as_warning())
