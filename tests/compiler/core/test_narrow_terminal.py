"""A terminal of 80 columns shows what a wide one does: no word is cut or broken, and no number is lost."""

import io
import shlex
import subprocess
from collections.abc import Callable

import pytest

from conftest import plan_of
from meshloom.compiler.core.console import Column, Console, Table
from meshloom.compiler.core.errors import Problem
from meshloom.compiler.core.folding import folded, folded_problems, width_of
from meshloom.compiler.report.diff import Run, diff_runs
from meshloom.compiler.report.explain import explain, plan_as_json
from meshloom.compiler.report.views.diff_text import show_diff
from meshloom.compiler.report.views.summary import show_summary
from support import reports
from support.narrow import check_fits_80, shown_at, words_of

NUMBERS = Column("seconds", justify="right")
TEXTS = (Column("collective"), NUMBERS, Column("source"), Column("rule"))


def _diff(console: Console) -> None:
    a, b = (
        Run(name, spec, plan_as_json(plan_of(*words)), report)
        for name, spec, words, report in (
            ("a", {"mesh": {"fsdp": 8}}, (), reports.fits()[0]),
            ("b", {"mesh": {"fsdp": 4}}, ("sharding=fsdp_tensor", "mesh.tensor=2"), reports.does_not_fit()[0]),
        )
    )
    show_diff(diff_runs(a, b), console)


VIEWS: dict[str, Callable[[Console], None]] = {
    "explain": lambda console: explain(
        plan_of("target=v5p-16", "sharding=fsdp_tensor", "mesh.tensor=2", "num_microbatches=2"), console
    ),
    "report": lambda console: show_summary(reports.fits()[0], console, files=()),
    "report of what does not fit": lambda console: show_summary(reports.does_not_fit()[0], console, files=()),
    "diff": _diff,
    "texts": lambda console: console.table(
        Table(TEXTS, [("reduce-scatter", "39.4 GiB", "layers/mlp/down_XME, " * 3, "sharding.parameters[2]")] * 2)
    ),
}


@pytest.mark.parametrize("view", VIEWS)
def test_80_columns_show_the_words_of_240(view):
    narrow, wide = shown_at(80, VIEWS[view]), shown_at(240, VIEWS[view])
    assert words_of(narrow) == words_of(wide)
    assert max(map(len, wide)) > 80, "it would fit anyway"
    check_fits_80(narrow)


def test_a_command_of_several_lines_is_read_by_a_shell_as_of_one():
    words = [
        "meshloom",
        "train",
        "optimizer.learning_rate=3e-4",
        "run.name='my run'",
        *(f"a.b.c{n}={n}" for n in range(20)),
    ]
    whole = shown_at(1000, lambda console: console.command("train it", words))
    label, *lines = shown_at(60, lambda console: console.command("train it", words))
    assert whole == [f"train it: {shlex.join(words)}"]
    assert label == "train it:"
    assert len(lines) > 4
    assert max(map(len, lines)) <= 60
    pasted = "set -- " + "\n".join(lines) + "; printf '%s\\n' \"$@\""
    assert subprocess.run(["sh", "-c", pasted], capture_output=True, text=True).stdout.splitlines() == words


FIX = "type meshloom train model=from_hf model.path=DIR data=chats data.source.paths=[chats.jsonl] adapter=lora"
ERROR = Problem("model.path", "names a folder without the file that " + "each " * 9 + "run wants", FIX)


@pytest.mark.parametrize("width", [40, 60, 80, 1000])
def test_an_error_is_folded_between_words_and_its_command_can_be_copied(width):
    lines = folded_problems(str(ERROR), width).split("\n")
    assert max(map(len, lines)) <= width
    assert words_of(lines) == words_of(str(ERROR).split("\n"))
    if width < 1000:
        assert lines[1].startswith("  ")
    copied = "\n".join(lines).partition("fix: type ")[2]
    shown = subprocess.run(["sh", "-c", f"set -- {copied}; printf '%s ' \"$@\""], capture_output=True, text=True)
    assert shown.stdout.split() == FIX.split()[1:]


@pytest.mark.parametrize(("text", "is_command"), [
    ("set model.path=DIRECTORY or data.source.paths=[FILE]", False), ("add `--cfg job --resolve x` to it", True),
    ("use model.path=DIRECTORY, model.vocab_size=auto", False), ("type model.path=DIRECTORY data.seed=3", True),
    ("it is meshloom that says which of the names these are", False),
])  # fmt: skip
def test_a_line_ends_in_a_backslash_only_within_a_command(text, is_command):
    assert any(folded(text, width, 0).count("\\") for width in range(21, 45)) == is_command


def test_what_is_no_terminal_gets_whole_lines():
    assert folded_problems(str(ERROR), width_of(io.StringIO())) == str(ERROR)


def test_a_path_that_is_wider_than_the_terminal_stays_whole():
    path = f"runs/{'a-long-name/' * 9}report.html"
    lines = shown_at(60, lambda console: console.wrapped(f"written to {path}, and to nothing else"))
    assert [line.strip() for line in lines] == ["written to", f"{path},", "and to nothing else"]
