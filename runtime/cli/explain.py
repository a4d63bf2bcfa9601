"""Runs `meshloom explain`: shows the plan, without the declared devices and without compiling."""

import argparse
from dataclasses import replace

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import DOES_NOT_FIT, all_of
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.plan import Plan
from meshloom.compiler.report.explain import explain, plan_as_json
from meshloom.compiler.report.views.summary import change_lines
from meshloom.compiler.search.candidates import suggest_changes

from ..processes.devices import plan_without_devices
from ..start.start import RunStart, check_checkpoint, declared_start


def explain_command(request: Request, flags: argparse.Namespace) -> int:
    """Prints the plan and what would be restored. Returns the exit code: 3 if the estimate does not fit and `--check`
    is given. Raises ConfigError for a declaration that cannot be planned, or a checkpoint that it cannot restore."""

    def replan(more: tuple[str, ...]) -> Plan:
        return read_spec(replace(request, overrides=(*request.overrides, *more)), then=plan_run)

    plan, start, chosen_here = read_spec(request, then=_plan)
    estimate = estimate_step(plan)
    exit_code = DOES_NOT_FIT if flags.check and estimate.figures.runs is False else 0
    if flags.json:
        flags.result = plan_as_json(plan, chosen_here=chosen_here)
        return exit_code
    console = Console(off_terminal_width=240)
    lines = [*([chosen_here] if chosen_here else []), *start.lines()]
    for line in lines:
        console.wrapped(line)
    if lines:
        console.line()
    explain(plan, console, estimate)
    needed, limit = estimate.memory.peak_bytes, plan.target.hbm_bytes_per_device
    if estimate.figures.fits is False and limit is not None:
        for line in change_lines(suggest_changes(plan, needed, limit, replan)):
            console.wrapped(*line)
    return exit_code


def _plan(spec: RunSpec) -> tuple[Plan, RunStart, str | None]:
    plan_without_devices(spec.target)
    plan, _ = all_of(lambda: plan_run(spec), lambda: check_checkpoint(spec))
    return plan, declared_start(plan), spec.chosen_here
