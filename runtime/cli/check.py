"""Runs `meshloom check`: proves on simulated devices that a declaration computes what one device computes."""

import argparse

from meshloom.compiler.check.check_report import CheckReport
from meshloom.compiler.core.console import Column, Console, Table
from meshloom.compiler.core.errors import WRONG, ConfigError, Problem
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run

from ..check.check import DeclarationCheck
from ..check.runs import ONE_DEVICE
from ..processes.devices import TooFewSimulated, plan_without_devices

_STYLES = {"passed": "green", "failed": "bold red", "differs": "yellow", "not run": "dim"}


def check_command(request: Request, flags: argparse.Namespace) -> int:
    """Checks the declaration, and prints the table. Returns the exit code: WRONG if a line failed. Raises ConfigError
    for a declaration that cannot be planned, or cannot shrink, and for chips that JAX has started."""
    plan = read_spec(request, then=lambda spec: (plan_without_devices(spec.target), plan_run(spec))[1])
    check = DeclarationCheck(
        plan, f"{plan.spec.model.family} of {plan.num_parameters:,} parameters on {plan.target.name}"
    )
    console = Console(off_terminal_width=160)
    console.line(f"checking {check.program} as {check.small}", style="dim")
    bar = console.bar("checking", "spinner", "doing", "numbers", "elapsed", is_transient=True)
    bar.start()
    try:
        report = check.report(lambda doing: bar.update(0, total=None, numbers=doing))
    except TooFewSimulated as error:  # planning for attached chips has started JAX with them
        what = "JAX has started with the attached chips, and a check runs on simulated devices"
        fix = "name the chips, which are then not started, such as target=h100-8, or take target=cpu-8"
        raise ConfigError([Problem("target", what, fix)]) from error
    finally:
        bar.stop()
    flags.result = report.model_dump(mode="json")
    show_check(report, console)
    return 0 if report.passed else WRONG


def show_check(report: CheckReport, console: Console) -> None:
    """Prints a check: a row for each line, then what is wrong, then what runs otherwise."""
    rows = []
    for line in report.lines:
        style = _STYLES[line.status]
        numbers = ("" if x is None else f"{x:.1e}" for x in (line.measured, line.tolerance))
        rows.append([line.name, (line.status, style), *numbers, line.what])
    columns = [Column("", "left"), Column("", "left"), Column("measured", "right"), Column("tolerated", "right"),
               Column("", "left", "fold")]  # fmt: skip
    console.table(Table(columns, rows))
    for line in report.lines:
        if line.status == "failed":
            at = f" most in {line.parameter}, split by {line.split}" if line.split else ""
            at = at or (f" most in {line.parameter}" if line.parameter else "")
            console.wrapped(
                (f"{line.name}: ", "bold red"), f"{line.what}:{at}{'; ' if at and line.why else ' '}{line.why}"
            )
        elif line.why == ONE_DEVICE:
            console.wrapped((f"{line.name}: ", "yellow"), line.why)
        elif line.status == "differs":
            console.wrapped((f"{line.name}: ", "yellow"), f"not as declared: {line.why}")
    for text in report.replaced:
        console.wrapped((f"not as declared: {text}", "yellow"))
    failed = sum(line.status == "failed" for line in report.lines)
    result = "all lines pass" if not failed else f"{failed} of {len(report.lines)} lines fail"
    console.wrapped((f"{report.program}: {result}", "bold red" if failed else "bold green"),
                    f", as {report.small}, in {report.seconds:.0f} s")  # fmt: skip
