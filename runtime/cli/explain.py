"""`meshloom explain`: the plan in words, without a device; that of a restore, too. `--check` gives an exit code."""

import argparse

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import DOES_NOT_FIT, all_of
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.plan import Plan
from meshloom.compiler.report.explain import explain
from meshloom.compiler.spec.spec import RunSpec

from ..checkpoint.restore_plan import plan_restore
from ..checkpoint.start import Start, check_checkpoint, find_restorable
from ..processes.devices import plan_without_devices


def explain_command(request: Request, flags: argparse.Namespace) -> int:
    """Prints the plan; returns 3 if it does not fit, by the estimate, and `--check` asks for that. Raises ConfigError
    for a declaration that cannot be planned, or a checkpoint that it cannot restore."""
    plan, start = read_spec(request, then=_plan)
    console, estimate = Console(off_terminal_width=240), estimate_step(plan)
    if start is not None:
        for line in plan_restore(start, plan).lines():
            console.wrapped(line)
        console.line()
    explain(plan, console, estimate)
    does_not_fit = False in (estimate.memory.fits, estimate.memory.host_fits)
    return DOES_NOT_FIT if flags.check and does_not_fit else 0


def _plan(spec: RunSpec) -> tuple[Plan, Start | None]:
    plan_without_devices(spec.target)
    plan, _ = all_of(lambda: plan_run(spec), lambda: check_checkpoint(spec))
    return plan, find_restorable(spec, plan.abstract)
