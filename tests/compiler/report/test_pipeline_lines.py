"""A pipeline's table on a terminal: what is shown in which width."""

import io

import pytest

from conftest import plan_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.pipeline.schedules import SCHEDULES, build_table
from meshloom.compiler.pipeline.table import TickForm
from meshloom.compiler.report.explain import MOST_STAGES, explain, pipeline_lines


def texts(table, width):
    return [
        "".join(part if isinstance(part, str) else part[0] for part in line) for line in pipeline_lines(table, width)
    ]


def test_stages_have_their_ticks_below_each_other():
    assert texts(build_table("1f1b", 2, 1, 3, TickForm.MULTI), 80) == [
        "  stage 0 F0 F1     F2+BW0 BW1    BW2",
        "  stage 1    F0+BW0 F1+BW1 F2+BW2",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_line_fits_and_says_how_many_ticks_it_leaves_out(name, width):
    table = build_table(name, 4, SCHEDULES[name].num_chunks or 2, 16, TickForm.UNIT)
    lines = texts(table, width)
    assert max(map(len, lines)) <= width
    shown = len(lines[0].partition(" .. ")[0][len("  stage 0") :].split())
    more = lines[0].partition(" .. ")[2].split()
    ticks_left = int(more[0]) if more else 0
    cells = sum(bool(row[0]) for row in table.rows[: table.num_ticks - ticks_left])
    assert shown == cells


def test_a_second_chunk_is_behind_a_dot():
    assert "F0.1" in texts(build_table("zb_v", 2, 2, 4, TickForm.UNIT), 200)[1]


def test_of_many_stages_the_first_are_shown():
    lines = texts(build_table("gpipe", MOST_STAGES + 4, 1, 2, TickForm.MULTI), 80)
    assert len(lines) == MOST_STAGES + 1
    assert lines[-1] == "  .. 4 more stages"


@pytest.mark.ci
def test_explain_shows_the_table_of_the_plan():
    plan, told = plan_of("mesh.stage=2", "num_microbatches=4", "model.num_layers=4"), io.StringIO()
    assert plan.pipeline
    console = Console(told, width=120)
    explain(plan, console)
    assert "\n".join(texts(plan.pipeline.table, console.width)) in told.getvalue()
