"""A step against that of its base: what is worse fails and is named, and what is not passes."""

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from meshloom.compiler.analysis import lint
from meshloom.compiler.core.errors import MISTAKE, WORSE
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.report.diff import Run
from meshloom.compiler.report.guard import Tolerances, judge, problems_of_base
from meshloom.compiler.report.views.guard import as_markdown
from meshloom.compiler.schema import LINT_RULES, Finding, Report
from meshloom.runtime.cli.main import run as command
from support import reports
from support.recorded import recorded_text
from support.seeded import doubled, synchronous

GATHER = "all-gather-start.2"  # of mlp/down_ME in a loop of 3 iterations, hidden


def worse(base: Report, head: Report, **tolerances) -> list[str]:
    """Returns the rules of which the step is worse than its base."""
    verdict = judge(run_of(base), run_of(head), Tolerances(**tolerances))
    found = [each.rule for each in (*verdict.checks, *verdict.concerns) if each.is_worse]
    assert verdict.is_worse == bool(found)
    return found


def run_of(report: Report, name: str = "run") -> Run:
    return Run(name, {}, {}, report)


@pytest.mark.parametrize("case", reports.CASES)
def test_a_step_is_no_worse_than_itself(case):
    report = reports.CASES[case]()[0]
    assert worse(report, report, slower=0, part=0, exposed=0, memory=0, traffic=0) == []


def slower_attention(report: Any, factor: float) -> Report:
    kinds = report.compiled.compute_seconds_by_kind
    more = (factor - 1) * kinds["attention"]
    return reports.with_figures(
        report,
        compute_seconds_by_kind={**kinds, "attention": kinds["attention"] + more},
        compute_seconds=report.compiled.compute_seconds + more,
        step_seconds=report.compiled.step_seconds + more,
    )


def test_slower_attention_is_found_though_the_step_hardly_is():
    report: Any = reports.fits()[0]
    kinds = report.compiled.compute_seconds_by_kind
    share = kinds["attention"] / report.compiled.step_seconds
    assert 0.15 * share < 0.02 < share, "of the whole step it is within the tolerance"
    assert worse(report, slower_attention(report, 1.15)) == ["slower-part"]
    assert worse(report, slower_attention(report, 1.15), part=0.16) == []
    assert worse(report, slower_attention(report, 0.85)) == []
    assert worse(slower_attention(report, 1.15), report) == []


def test_a_step_at_its_tolerance_passes_and_one_beyond_does_not():
    report: Any = reports.fits()[0]
    step = report.compiled.step_seconds
    for factor, expected in ((1.019, []), (1.021, ["slower"]), (0.5, [])):
        assert worse(report, reports.with_figures(report, step_seconds=factor * step)) == expected
    peak = report.compiled.peak_bytes
    larger = reports.with_figures(report, peak_bytes=round(1.02 * peak))
    assert worse(report, larger) == ["more-memory"]
    assert worse(report, larger, memory=0.03) == worse(report, larger, allowed=frozenset({"more-memory"})) == []


def test_a_step_that_no_longer_fits_or_is_no_longer_known_is_worse():
    report: Any = reports.fits()[0]
    assert worse(report, reports.with_figures(report, fits=False)) == ["does-not-fit"]
    assert worse(reports.with_figures(report, fits=False), reports.with_figures(report, fits=False)) == []
    assert worse(report, reports.with_figures(report, step_seconds=Unknown("a test"))) == ["unknown"]


def test_a_new_warning_is_worse_and_a_new_note_is_named():
    report: Any = reports.fits()[0]
    cases: tuple[tuple[Literal["warning", "note"], list[str]], ...] = (("warning", ["too-hot"]), ("note", []))
    for severity, expected in cases:
        finding = Finding(rule="too-hot", severity=severity, what="2 chips", where="a place", fix="cool it")
        head = report.model_copy(update={"findings": (*report.findings, finding)})
        assert worse(report, head) == expected
        verdict = judge(run_of(report), run_of(head), Tolerances())
        assert "too-hot" in [each.rule for each in verdict.concerns]
        assert worse(head, report) == []


def test_collectives_that_only_have_other_names_are_not_worse():
    report: Any = reports.fits()[0]
    renamed = [replace(c, origin=replace(c.origin, activation=f"other {n}")) for n, c in enumerate(report.collectives)]
    assert worse(report, report.model_copy(update={"collectives": tuple(renamed)})) == []


def test_a_model_that_computes_more_is_judged_by_its_time():
    """As where its code pads each group of heads: it is the same declaration, and a mistake would hide the reason."""
    report: Any = reports.fits()[0]
    more = report.program.model_copy(update={"model_flops_per_step": round(1.05 * report.program.model_flops_per_step)})
    head = slower_attention(report, 1.15).model_copy(update={"program": more})
    assert list(problems_of_base(run_of(report), run_of(head))) == []
    assert worse(report, head) == ["slower-part"]
    (note,) = judge(run_of(report), run_of(head), Tolerances()).notes
    assert "+5.0 %" in note


def test_another_version_of_the_compiler_is_named():
    report: Any = reports.fits()[0]
    older = report.model_copy(
        update={"build": report.build.model_copy(update={"jax": "0.9.1", "plugin": "libtpu 0.0.40"})}
    )
    (note,) = judge(run_of(older), run_of(report), Tolerances()).notes
    assert "jax 0.9.1" in note
    assert "libtpu 0.0.40" in note
    assert judge(run_of(report), run_of(report), Tolerances()).notes == ()


def test_a_base_of_other_work_is_one_problem():
    report: Any = reports.fits()[0]
    for update in ({"model": "llama3_8b"}, {"tokens_per_step": 1}):
        other = report.model_copy(update={"program": report.program.model_copy(update=update)})
        (problem,) = problems_of_base(run_of(other, "there"), run_of(report))
        assert problem.where == "there"
        assert str(next(iter(update.values()))) in problem.what
    assert not [*problems_of_base(run_of(report), run_of(report))]


def test_nothing_in_a_name_is_markup_in_the_comment():
    report: Any = reports.fits()[0]
    finding = Finding(rule="too-hot", severity="warning", what="<img src=x> @you |", where="[a](b)", fix="*cool*\nit")
    head = report.model_copy(update={"findings": (*report.findings, finding)})
    text = as_markdown(judge(run_of(report, "a`b|c"), run_of(head), Tolerances()))
    assert r"\<img src=x\> \@you \|; \[a\](b)<br>fix: \*cool\* it" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {7}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A program of FSDP on 8 GPUs, and the same with a gather that waits, and with one that runs twice."""
    folder, text = tmp_path_factory.mktemp("programs"), recorded_text("h100_fsdp")
    for name, seeded in (("base", text), ("lost", synchronous(text, GATHER)), ("doubled", doubled(text, GATHER))):
        (folder / f"{name}.txt").write_text(seeded)
    return folder


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize(
    ("name", "rules", "shown"),
    [
        ("base", set(), ""),
        ("lost", {"slower", "more-exposed", "lost-async", "synchronous-collective"}, "asynchronous 3 of 3 → 0 of 3"),
        ("doubled", {"more-traffic", "more-collectives"}, "3 → 6 times, 24.0 MiB → 48.0 MiB"),
    ],
)
def test_a_seeded_regression_of_a_program_fails_and_names_its_collective(name, rules, shown, programs, capsys):
    words = ["guard", f"{programs}/{name}.txt", "target=h100-8", "--base", f"{programs}/base.txt"]
    comment = programs / f"{name}.md"
    assert command([*words, "--json", "--markdown", str(comment)]) == (WORSE if rules else 0)
    verdict = json.loads(capsys.readouterr().out)
    assert {each["rule"] for each in verdict["checks"] + verdict["concerns"] if each["is_worse"]} == rules
    told = comment.read_text()
    assert shown in told
    assert ("down" in told) == bool(rules), "the parameter whose gather it is"
    if rules:
        assert command([*words, "--allow", ",".join(rules)]) == 0


@pytest.mark.cases(plain=4)
@pytest.mark.parametrize(
    ("words", "where", "what"),
    [
        (("nothing.txt", "target=h100-8", "--base", "base.txt"), "nothing.txt", "there is no such file"),
        (("base.txt", "--base", "base.txt"), "target", "it is missing"),
        (("base.txt", "target=v5e-8", "--base", "base.txt"), "target", "was compiled for GPUs"),
        (("base.txt", "target=h100-8", "--base", "base.txt", "--max-slower", "much"), "--max-slower", "not a number"),
        (("base.txt", "target=h100-8", "--base", "base.txt", "--allow", "lost-asinc"), "--allow", "'lost-asinc'"),
        (("base.txt", "target=h100-8"), "command line", "--base is missing"),
        (("base.txt", "target=h100-8", "--base", "other.json"), "other.json", "not a report.json or a plan.json"),
        (("base.txt", "target=h100-8", "--base", "renamed.txt"), "renamed.txt", "model jit_other there"),
    ],
)
def test_each_mistake_is_one_error_with_a_fix(words, where, what, programs, capsys, monkeypatch):
    monkeypatch.chdir(programs)
    (programs / "other.json").write_text('{"traceEvents": []}')
    text = (programs / "base.txt").read_text()
    (programs / "renamed.txt").write_text(text.replace("HloModule jit_train_step", "HloModule jit_other", 1))
    assert command(["guard", *words]) == MISTAKE
    told = capsys.readouterr().err
    assert told.startswith(f"error: {where}: ")
    assert what in told
    assert told.count("error: ") == told.count("fix: ") == 1


def test_every_rule_of_the_lint_can_be_allowed():
    """Their names are what the code gives findings; each name in the list is given somewhere."""
    analysis = Path(lint.__file__).parent
    files = [*analysis.glob("*.py"), analysis.parent / "report/build_report.py"]
    named = set(re.findall(r'"([a-z0-9]+(?:-[a-z0-9]+)+)"', "".join(file.read_text() for file in files)))
    named |= {f"{kind}-inside-tiles" for kind in ("update", "slice")}
    assert set(LINT_RULES) <= named
    calls = [call for file in files for call in ast.walk(ast.parse(file.read_text())) if isinstance(call, ast.Call)]
    given = {word.value.value for call in calls for word in call.keywords
             if word.arg == "rule" and isinstance(word.value, ast.Constant)}  # fmt: skip
    given |= {call.args[2].value for call in calls if isinstance(call.func, ast.Name) and call.func.id == "_costly"
              and isinstance(call.args[2], ast.Constant)}  # fmt: skip
    assert {"memory-by-text", "repeated-gather"} <= given <= set(LINT_RULES)


@pytest.mark.ci
def test_an_estimate_is_judged_by_an_estimate(tmp_path, capsys):
    """What `explain --json` prints is a base; nothing is compiled."""
    declared = ["target=v5e-8", "sequence_length=512", "precision=bfloat16"]
    assert command(["explain", *declared, "remat=full", "--json"]) == 0
    base = tmp_path / "base.json"
    base.write_text(capsys.readouterr().out)
    assert command(["guard", *declared, "remat=full", "--base", str(base)]) == 0
    assert "only estimates are compared" in capsys.readouterr().out
    assert command(["guard", *declared, "--base", str(base), "--json"]) == WORSE
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["is_estimated"]
    assert "more-memory" in [each["rule"] for each in verdict["checks"] if each["is_worse"]]
    assert command(["guard", *declared, "model.num_layers=3", "--base", str(base)]) == MISTAKE
    assert "is of another declaration" in capsys.readouterr().err
