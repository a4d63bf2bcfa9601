"""One collective has one vocabulary, from the traced step to the report, and its source is a value."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import meshloom.compiler
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.core.traffic import TimedTraffic, Traffic, TrafficSource
from meshloom.compiler.schema import Report
from support import reports
from support.traffic import origin

COMPILER = Path(meshloom.compiler.__file__).resolve().parent
AXES = {"axes", "mesh_axes"}
OF_COMPUTE_TOO = {"KindRow"}  # a row of a profile is of a kind of compute or of collectives


def test_no_other_class_says_which_collective_it_is():
    found = {
        node.name
        for file in COMPILER.rglob("*.py")
        if file != COMPILER / "core" / "traffic.py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and "kind" in fields(node) and AXES & fields(node)
    }
    assert found == OF_COMPUTE_TOO


def test_nobody_reads_the_text_of_a_source():
    """No method of a text is called on one, and nothing is looked for in it. The source of a figure is no text: it has
    fields (compiler/spec/figure_source.py)."""
    found = []
    for file in COMPILER.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            read = node.value if isinstance(node, ast.Attribute | ast.Subscript) else None
            read = node.comparators[-1] if isinstance(node, ast.Compare) and isinstance(node.ops[-1], ast.In) else read
            if isinstance(read, ast.Attribute) and read.attr == "source" and ast.unparse(read.value) != "self":
                found.append(f"{file.relative_to(COMPILER)}: {ast.unparse(node)}")
    assert [each for each in found if "data.source" not in each and not each.endswith("source.assumed")] == []


def fields(node: ast.ClassDef) -> set[str]:
    return {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


@pytest.mark.parametrize(
    "text",
    [
        "made by the compiler",
        "layers/mlp/up_EM, backward",
        "layers/mlp/up_EM and 2 more, recomputed",
        "sum of attention_output, forward",
        "one of layers/a, layers/b and 1 more (inferred from its size)",
    ],
)
def test_a_source_shows_what_it_says(text):
    assert str(origin(text)) == text


def test_a_report_keeps_sources_as_values_and_as_text():
    report = reports.fits()[0]
    read = Report.model_validate_json(report.model_dump_json())
    assert read.collectives == report.collectives
    assert [each.source for each in read.collectives] == [str(each.origin) for each in report.collectives]
    assert {each["source"] for each in report.model_dump()["collectives"]} == {c.source for c in report.collectives}


def test_sums_add_bytes_executions_and_times():
    one = TimedTraffic(
        "all-gather", ("fsdp",), 8, bytes=100, count=2, link="ICI", alone_seconds=3.0, hidden_seconds=2.0,
        exposed_seconds=1.0,
    )  # fmt: skip
    both = one + replace(one, bytes=20, count=3, alone_seconds=4.0, exposed_seconds=Unknown("why"))
    assert (both.bytes, both.count, both.alone_seconds, both.hidden_seconds) == (120, 5, 7.0, 4.0)
    assert both.exposed_seconds == Unknown("why")
    assert (one.times(3).bytes, one.times(3).count, one.times(3).bytes_each) == (300, 6, 50)
    assert (Traffic("all-gather", ("fsdp",), 8, 100) + one).origin == TrafficSource()
