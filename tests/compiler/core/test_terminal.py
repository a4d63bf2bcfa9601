"""What reaches a terminal is what was meant: no value of a user's, a file's or a compiler's acts on it."""

import ast
import io
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_origin

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import BaseModel

from conftest import plan_of
from meshloom.compiler.analysis.schedule_analysis import nothing_timed
from meshloom.compiler.core.console import Column, Console, Table
from meshloom.compiler.core.errors import Problem
from meshloom.compiler.core.visible import visible, write_error
from meshloom.compiler.declare.overrides import in_quotes, override, override_value
from meshloom.compiler.report.diff import Run, diff_runs
from meshloom.compiler.report.explain import explain, plan_as_json
from meshloom.compiler.report.views.diff_text import show_diff
from meshloom.compiler.report.views.summary import show_summary as show_report
from meshloom.runtime.compile.watched import Phases
from meshloom.runtime.data.progress import TextProgress
from meshloom.runtime.processes.distributed import Processes
from meshloom.runtime.processes.process_log import announce, process_log
from meshloom.runtime.train.display import show_rows
from support import reports

ROOT = Path(__file__).parents[3]
# Markup that is not closed and markup that is, an emoji, and what a terminal acts on: a raw escape in 7 and in 8 bits,
# a carriage return, a bell, text that runs backwards; and half of a surrogate pair, which cannot be encoded.
NASTY = "[/y] [bold]b[/] [link=x]:smile: \x1b[2J\x9b31m\r\x07\u202e"
SHOWN = r"[/y] [bold]b[/] [link=x]:smile: \x1b[2J\x9b31m\r\x07\u202e"


def _calls_that_print(tree: ast.AST) -> list[str]:
    """Ways to write to a terminal: `print`, `rich`, and the streams themselves."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            found += [f"{module} imported" for module in modules if module.split(".")[0] in ("rich", "tqdm", "click")]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            found.append("print()")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = ast.unparse(node.func)
            if re.fullmatch(r"(sys\.)?(__)?std(out|err)(__)?(\.buffer)?\.write(lines)?|traceback\.print_\w+", name):
                found.append(f"{name}()")
    return found


def test_nothing_but_two_modules_prints():
    """`abort_watchdog.py` is a script of its own, without our packages; it takes care itself."""
    found = {}
    for folder in ("compiler", "runtime", "models"):
        for path in (ROOT / folder).rglob("*.py"):
            if calls := _calls_that_print(ast.parse(path.read_text())):
                found[path.relative_to(ROOT).as_posix()] = set(calls)
    assert set(found) == {
        "compiler/core/console.py",
        "compiler/core/visible.py",
        "runtime/compile/abort_watchdog.py",
    }, found
    assert _calls_that_print(ast.parse("import sys\nsys.stderr.write(x)\nprint(x)\nfrom rich.text import Text"))[2:]


def _nasty(value: Any) -> Any:
    """A report with all free text in it replaced; closed choices and numbers stay."""
    if isinstance(value, BaseModel):
        fields = {
            name: _nasty(getattr(value, name))
            for name, field in type(value).model_fields.items()
            if get_origin(field.annotation) is not Literal
        }
        return value.model_copy(update=fields)
    if isinstance(value, str):
        return NASTY
    if isinstance(value, tuple):
        return tuple(map(_nasty, value))
    return {key: _nasty(each) for key, each in value.items()} if isinstance(value, dict) else value


def _report(console: Console) -> None:
    report = _nasty(reports.does_not_fit()[0])
    show_report(report.model_copy(update={"compiled": nothing_timed(NASTY)}), console, files=(Path(NASTY),))


def _diff(console: Console) -> None:
    plan = plan_as_json(plan_of())
    runs = [Run(f"{NASTY}{n}", {"notes": {NASTY: f"{NASTY}{n}"}}, plan, None) for n in range(2)]
    show_diff(replace(diff_runs(*runs), notes=(NASTY,)), console)


def _explain(console: Console) -> None:
    plan = plan_of()
    warnings = (Problem(NASTY, NASTY, NASTY),)
    arrays = tuple(replace(p, array=replace(p.array, path=NASTY)) for p in plan.sharding.activations)
    sharding = replace(plan.sharding, warnings=warnings, activations=arrays)
    explain(replace(plan, sharding=sharding, target=replace(plan.target, name=NASTY)), console)


def _progress(console: Console) -> None:
    with TextProgress(console, NASTY, total=10) as progress:
        progress._start = progress._last_line = -1e9  # long ago
        progress.advance(1)


def _phases(console: Console) -> None:
    with Phases(console, NASTY) as phases:
        phases.begin(NASTY)
        console.line(NASTY)


def _bar(console: Console) -> None:
    bar = console.bar(NASTY, "doing", "numbers")
    bar.start()
    bar.update(1, total=2, numbers=NASTY)
    bar.stop()
    console.line(NASTY)


VIEWS: dict[str, Callable[[Console], None]] = {
    "line": lambda console: console.line(NASTY, (NASTY, "bold")),
    "wrapped": lambda console: console.wrapped(NASTY, (NASTY, "bold")),
    "table": lambda console: console.table(Table((Column(NASTY), Column(NASTY)), [(NASTY, [NASTY])], NASTY)),
    "report": _report,
    "diff": _diff,
    "explain": _explain,
    "summary of a run": lambda console: show_rows(console, [("run directory", NASTY)]),
    "say": lambda console: announce(console, NASTY),
    "progress": _progress,
    "phases": _phases,
    "bar": _bar,
}
STYLES = re.compile(r"\x1b\[[\d;]*m|\x1b\[\?25[lh]|\x1b\[\d*[AK]|\r")  # colours, and what a bar moves by


@pytest.mark.parametrize("width", [60, 80, 100])
def test_long_texts_take_no_width_from_numbers(width):
    """As the sources of collectives over tensor are: the column of what is exposed was gone."""
    out = io.StringIO()
    columns = (Column("exposed", justify="right"), Column("collective", overflow="cut"), Column("why", overflow="cut"))
    Console(out, width=width).table(Table(columns, [("70.0 ms", "all-reduce: " + "x" * 90, "outlasts " + "y" * 200)]))
    header, row = out.getvalue().splitlines()
    assert header.split() == ["exposed", "collective", "why"]
    assert re.fullmatch(r"70\.0 ms  all-reduce: x+…  outlasts y+… *", row)
    assert len(row) <= width


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("view", VIEWS)
def test_a_value_is_shown_and_never_obeyed(view, is_terminal):
    out = io.StringIO()
    VIEWS[view](Console(out, is_terminal=is_terminal, width=2000))
    text = STYLES.sub("", out.getvalue())
    assert "[/y] [bold]b[/] [link=x]:smile: " in text
    assert SHOWN in text or view == "report", "the report cuts lines"
    assert all(c.isprintable() or c == "\n" for c in text)
    text.encode()


def test_errors_and_logs_show_what_they_would_obey(tmp_path, capsys):
    write_error(str(Problem(NASTY, NASTY, NASTY)))
    assert capsys.readouterr().err == f"error: {SHOWN}: {SHOWN}\n  fix: {SHOWN}\n"
    with process_log(tmp_path, Processes()) as log:
        announce(Console(io.StringIO()), NASTY)
        logging.getLogger("a library").warning("%s", NASTY)
    assert log.read_text().count(SHOWN) == 2
    assert capsys.readouterr().err == f"{SHOWN}\n", "a library's warning is on the terminal too"


def test_visible_changes_nothing_that_is_printed():
    assert visible("größe 漢字 █▓ µs\n\tx") == "größe 漢字 █▓ µs\n\tx"


def test_a_lone_surrogate_is_an_escape():
    """Of a file name that is not UTF-8. (Not part of NASTY: logs of tests, which have it raw, go between processes.)"""
    assert visible("a\udcffb") == r"a\udcffb"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("ab1.e-'\"\\${}[]=, \n:()%#@/~*?", max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex("[a-z]{1,3}", fullmatch=True), inner),
    max_leaves=5,
)


@settings(max_examples=40)
@given(values)
@example("it's [mine], a=b")
@example("a\\")
@example("${oc.env:HOME}")
@example("12")
@example("true")
@example("a\\'b")
def test_a_value_typed_as_an_override_is_read_back(value):
    parsed = OverridesParser.create().parse_override(override("key", value))
    assert not parsed.is_sweep_override()
    read = OmegaConf.to_container(OmegaConf.create({"key": parsed.value()}), resolve=True)
    assert read == {"key": value}


def test_plain_values_are_typed_without_quotes():
    assert override("artifact", "outputs/2026-01-01/a_b") == "artifact=outputs/2026-01-01/a_b"
    assert override_value(["a/*.txt", "12", 12]) == "[a/*.txt,'12',12]"
    assert in_quotes("it's") == r"'it\'s'"
