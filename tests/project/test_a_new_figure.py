"""A figure of a step is declared once, and each file and view has it: here the energy of a step, added from outside."""

import io
import json

import pytest

from conftest import LINEAR_STACK, SMALL, plan_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.known import Unknown, all_known
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.figures import FIGURES, Figure, StepFigures, StepWork, register
from meshloom.compiler.report.diff import Run, diff_runs
from meshloom.compiler.report.explain import explain, plan_as_json
from meshloom.compiler.report.views.diff_text import show_diff
from meshloom.compiler.report.views.page import render_page
from meshloom.compiler.report.views.summary import show_summary
from meshloom.compiler.schema import Report
from meshloom.runtime.rundir.folders import ROWS_FILE
from meshloom.runtime.sweep.outcomes import outcome_of_plan
from meshloom.runtime.sweep.read import read_sweep
from meshloom.runtime.sweep.rows import Point
from meshloom.runtime.sweep.table import show_table
from support import reports
from support.sweeps import sweep_file, write_sweep

WATTS = 500


def energy_of(step: StepFigures, work: StepWork) -> float | Unknown:
    return all_known((step.step_seconds,), lambda known: known[0] * work.num_chips * WATTS)


@pytest.fixture(autouse=True)
def energy():
    """Declares the figure, in one place."""
    register(Figure("energy_joules", "energy", "less", "count", energy_of))
    yield
    del FIGURES["energy_joules"]


def shown(show) -> str:
    out = io.StringIO()
    show(Console(out, width=300, is_terminal=False))
    return out.getvalue()


def compiled(seconds_more: float = 0.0) -> Report:
    report = reports.fits()[0]
    step = report.compiled
    step = step.model_copy(update={"step_seconds": (step.step_seconds or 0.0) + seconds_more}).rated(report.work)
    return report.model_copy(update={"compiled": step})


def test_it_is_in_the_report_and_its_views():
    report, joules = compiled(), (reports.fits()[0].compiled.step_seconds or 0.0) * 256 * WATTS
    written = json.loads(report.model_dump_json())
    assert written["compiled"]["energy_joules"] == pytest.approx(joules)
    assert Report.model_validate_json(report.model_dump_json()) == report
    assert f"energy {FIGURES['energy_joules'].human(joules)}" in shown(lambda c: show_summary(report, c, files=()))
    assert "<h2>energy</h2>" in render_page(report, reports.fits()[1])


def test_it_is_in_a_diff():
    runs = [Run(name, {}, {}, report) for name, report in (("a", compiled()), ("b", compiled(1.0)))]
    found = diff_runs(*runs)
    (change,) = (each for each in found.sections["step"] if each.where == "energy_joules")
    assert change.after - change.before == pytest.approx(256 * WATTS)
    assert "energy" in shown(lambda console: show_diff(found, console))


def test_it_is_in_the_plan_and_in_a_row_of_a_sweep(tmp_path):
    plan = plan_of(*SMALL, *LINEAR_STACK, "target=v5e-8", "sharding=fsdp", "precision=bfloat16")
    estimate = estimate_step(plan)
    joules = (estimate.figures.step_seconds or 0.0) * 8 * WATTS
    assert joules > 0
    assert plan_as_json(plan)["estimated"]["energy_joules"] == pytest.approx(joules)
    assert "energy" in shown(lambda console: explain(plan, console, estimate))
    outcome = outcome_of_plan(plan, estimate, "small")
    point = Point(0, ("target=v5e-8",), {"target": "v5e-8"}, "point")
    row = outcome.row(point, has_directory=False)
    write_sweep(tmp_path, [row], sweep_file([row], objective="energy_joules"))
    assert json.loads((tmp_path / ROWS_FILE).read_text())["figures"]["energy_joules"] == pytest.approx(joules)
    sweep = read_sweep(tmp_path)
    table = shown(lambda console: show_table(console, sweep.file, sweep.rows, directory=tmp_path))
    assert FIGURES["energy_joules"].human(joules) in table
