"""The page of pipelines: its examples run as typed, and print what it says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from conftest import plan_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.user_code import code_allowed_from
from meshloom.compiler.pipeline.schedules import SCHEDULES, build_table
from meshloom.compiler.pipeline.table import TickForm, max_in_flight_of
from meshloom.compiler.pipeline.table_file import parse_table

PAGE = (Path(__file__).parents[3] / "docs" / "pipeline_tables.md").read_text()


def blocks(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.M | re.S)


def test_examples_run_as_typed_and_print_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        exec("\n".join(blocks("python")), {})
    assert told.getvalue() == blocks("text")[0]
    assert [path.name for path in tmp_path.iterdir()] == ["zb_h1.csv"]


def test_the_class_of_the_page_is_a_schedule_that_a_declaration_names(tmp_path, monkeypatch):
    """By its command: the last stage runs all microbatches forward, and then backward, the last one first."""
    (text,) = (each for each in blocks("python") if each.startswith("# my_schedules.py"))
    (tmp_path / "my_schedules.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    (words,) = re.findall("meshloom explain --allow-code-from=my_schedules (.*)", PAGE)
    with code_allowed_from(["my_schedules"]):
        plan = plan_of(*words.split(), "model.num_layers=4")
    assert plan.pipeline is not None
    orders = [[str(slot) for row in plan.pipeline.table.rows for slot in row[stage]] for stage in range(4)]
    for order in orders:
        assert order == [
            *(f"F of microbatch {number} in chunk 0" for number in range(8)),
            *(f"BW of microbatch {number} in chunk 0" for number in reversed(range(8))),
        ]
    assert "my_schedules:LastFirst" in plan.pipeline.how


def test_the_table_of_the_page_is_1f1b():
    (text,) = blocks("csv")
    assert parse_table(text, "own.csv", "own").rows == build_table("1f1b", 2, 1, 4, TickForm.MULTI).rows


def test_the_message_of_the_page_is_that_of_a_table_that_cannot_run():
    with pytest.raises(ConfigError) as raised:
        parse_table("0F0,,0B0\n,1B0,1F0\n", "own.csv", "own")
    assert str(raised.value.problems[0]) + "\n" in blocks("text")[1]


def test_schedules_of_the_page_are_those_that_there_are():
    listed = re.findall(r"^\| `(\w+)` \| (\d|v)", PAGE, re.M)
    assert {name: None if chunks == "v" else int(chunks) for name, chunks in listed} == {
        name: kind.num_chunks for name, kind in SCHEDULES.items()
    }


def test_microbatches_in_flight_are_those_of_the_page():
    p, m = 4, 16

    def first(name, chunks, form):
        return max_in_flight_of(build_table(name, p, chunks, m, form))[0]

    assert first("gpipe", 1, TickForm.MULTI) == m
    assert (first("1f1b", 1, TickForm.MULTI), first("1f1b", 1, TickForm.UNIT)) == (2 * p - 1, p)
    assert (first("zb_h1", 1, TickForm.UNIT), first("zb_h2", 1, TickForm.UNIT)) == (p, 2 * p - 1)
    assert (first("zb_v", 2, TickForm.UNIT), first("dualpipe_v", 2, TickForm.UNIT)) == (2 * p, 2 * p + 1)
