"""`meshloom explain`: the plan in words, without a device."""

import argparse

from meshloom.compiler.config.compose import Request, read_spec
from meshloom.compiler.config.spec import RunSpec
from meshloom.compiler.core.console import Console
from meshloom.compiler.driver import plan_run
from meshloom.compiler.plan import Plan
from meshloom.compiler.report.explain import explain

from ..processes.devices import plan_without_devices


def explain_command(request: Request, flags: argparse.Namespace) -> int:  # noqa: ARG001 (as all commands)
    """Prints the plan. Raises ConfigError for a declaration that cannot be planned."""
    explain(read_spec(request, then=_plan), Console(off_terminal_width=240))
    return 0


def _plan(spec: RunSpec) -> Plan:
    plan_without_devices(spec.target)
    return plan_run(spec)
