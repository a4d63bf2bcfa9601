"""`meshloom explain`: the plan in words, without a device; that of a restore, too."""

import argparse

from meshloom.compiler.config.compose import Request, read_spec
from meshloom.compiler.config.spec import RunSpec
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import all_of
from meshloom.compiler.driver import plan_run
from meshloom.compiler.plan import Plan
from meshloom.compiler.report.explain import explain

from ..checkpoint.restore_plan import plan_restore
from ..checkpoint.start import Start, check_checkpoint, find_restorable
from ..processes.devices import plan_without_devices


def explain_command(request: Request, flags: argparse.Namespace) -> int:  # noqa: ARG001 (as all commands)
    """Prints the plan. Raises ConfigError for a declaration that cannot be planned, or a checkpoint that it cannot
    restore."""
    plan, start = read_spec(request, then=_plan)
    console = Console(off_terminal_width=240)
    explain(plan, console)
    if start is not None:
        console.line()
        for line in plan_restore(start, plan).lines():
            console.line(line)
    return 0


def _plan(spec: RunSpec) -> tuple[Plan, Start | None]:
    plan_without_devices(spec.target)
    plan, _ = all_of(lambda: plan_run(spec), lambda: check_checkpoint(spec))
    return plan, find_restorable(spec, plan.abstract)
