"""A terminal of 80 columns shows what a wide one does: no word is cut or broken, and no number is lost."""

import io
import re
from collections import Counter
from collections.abc import Callable

import pytest

from conftest import plan_of
from meshloom.compiler.core.console import Column, Console, Table
from meshloom.compiler.report.diff import Run, diff_runs
from meshloom.compiler.report.explain import explain, plan_as_json
from meshloom.compiler.report.views.diff_text import show_diff
from meshloom.compiler.report.views.summary import show_summary
from support import reports

STYLES = re.compile(r"\x1b\[[\d;]*m")
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


def shown_at(width: int, view: str) -> list[str]:
    out = io.StringIO()
    VIEWS[view](Console(out, width=width, is_terminal=True))
    return STYLES.sub("", out.getvalue()).splitlines()


@pytest.mark.parametrize("view", VIEWS)
def test_80_columns_show_the_words_of_240(view):
    narrow, wide = shown_at(80, view), shown_at(240, view)
    words = [Counter(word.strip(";") for line in lines for word in line.split()) for lines in (narrow, wide)]
    for counts in words:
        del counts[""]
    assert words[0] == words[1]
    assert max(map(len, wide)) > 80, "it would fit anyway"
    assert max(len(line.rstrip()) for line in narrow) <= 80
    assert "…" not in "".join(narrow)
