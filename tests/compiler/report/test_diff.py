"""What changed between two runs: nothing of a compiler's naming, everything of the step; and the command."""

import io
import json
import random
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.plan import Plan
from meshloom.compiler.report.diff import Difference, Run, diff_runs
from meshloom.compiler.report.explain import plan_as_json
from meshloom.compiler.report.views.diff_text import show_diff
from meshloom.compiler.schema import Finding, Report
from meshloom.runtime.cli.main import run as command
from meshloom.runtime.rundir.run_dir import write_report
from meshloom.runtime.train.train import write_declaration
from support import reports

MIRRORED = {"appeared": "gone", "gone": "appeared", "grown": "shrunk", "shrunk": "grown", "changed": "changed"}


def run_of(report: Report | None, *, name: str = "run", plan: Plan | None = None) -> Run:
    plan = plan or reports.llama_plan()
    if id(plan) not in _TOLD:
        _TOLD[id(plan)] = plan, json.dumps(plan_as_json(plan))
    return Run(name, plan.spec.model_dump(mode="json"), json.loads(_TOLD[id(plan)][1]), report)


_TOLD: dict[int, tuple[Plan, str]] = {}  # by the identity of a plan, which is kept alive: its estimate takes a while


@cache
def other_plan() -> Plan:
    overrides = (*reports.OVERRIDES, "target=cpu-64", "sharding=fsdp_tensor", "mesh.tensor=8", "data=synthetic")
    return read_spec(Request(overrides), then=plan_run)


def recompiled(report: Report, seed: int) -> Report:
    """The same step from another compiler: other names, another order, times of another rounding."""
    rng = random.Random(seed)

    def renamed(c):
        activation = c.origin.activation.replace("psum", f"psum.{rng.randrange(99)}")
        times = {key: value for key, value in vars(c).items() if key.endswith("_seconds")}
        seconds = {key: value * (1 + rng.uniform(-3e-4, 3e-4)) for key, value in times.items()}
        return replace(c, name=f"{c.kind}-start.{rng.randrange(9999)}", origin=replace(c.origin, activation=activation),
                       hidden_behind=(f"fusion.{rng.randrange(999)}",), **seconds)  # fmt: skip

    collectives = [renamed(c) for c in report.collectives]
    rng.shuffle(collectives)
    findings = [
        f.model_copy(update={"where": f.where.replace("fusion.7", f"fusion.{rng.randrange(999)}")})
        for f in report.findings
    ]
    rng.shuffle(findings)
    assert report.build
    build = report.build.model_copy(update={"compile_seconds": rng.uniform(1, 99), "fingerprint": str(rng.random())})
    return report.model_copy(update={"collectives": tuple(collectives), "findings": tuple(findings), "build": build})


@pytest.mark.parametrize("case", reports.CASES)
def test_a_run_against_itself_is_empty(case):
    run = run_of(reports.CASES[case]()[0])
    assert diff_runs(run, run).is_empty


@pytest.mark.parametrize("seed", range(5))
def test_another_naming_and_order_of_the_same_step_are_no_difference(seed):
    report = reports.gpu()[0]
    findings = [f.model_copy(update={"where": f"{f.where} fusion.7"}) for f in report.findings]
    report = report.model_copy(update={"findings": tuple(findings)})
    plan = run_of(report).plan
    rows = {table: random.Random(seed).sample(rows, len(rows)) for table, rows in plan["arrays"].items()}
    shuffled = replace(run_of(recompiled(report, seed)), plan=dict(plan) | {"arrays": rows})
    assert diff_runs(run_of(report), shuffled).is_empty


def _mirror(change: Any) -> Any:
    verdict: Any = {"better": "worse", "worse": "better", None: None}[change.verdict]
    return replace(change, way=MIRRORED[change.way], before=change.after, after=change.before, verdict=verdict)


def _assert_mirrored(a: Run, b: Run) -> None:
    there, back = diff_runs(a, b), diff_runs(b, a)
    for name, value in there.sections.items():
        assert tuple(map(_mirror, value)) == back.sections[name], name


def test_the_way_back_mirrors_the_way_there():
    runs = [run_of(make()[0]) for make in reports.CASES.values()]
    runs += [run_of(reports.gpu()[0], plan=other_plan()), run_of(None)]
    for a in runs:
        for b in runs:
            _assert_mirrored(a, b)


def test_what_gets_worse_is_called_so_whatever_its_sign():
    """Fewer bytes that compute waits for are worse; so are fewer tokens, and more seconds."""
    before = reports.fits()[0]
    hidden = next(c for c in before.collectives if not c.exposed_seconds)
    exposed = replace(hidden, bytes=hidden.bytes // 2, exposed_seconds=0.05)
    worse = {"step_seconds": 9.0, "least_seconds": 9.0, "mfu": 0.01, "tokens_per_second_per_chip": 5.0}
    step = before.compiled.model_copy(update={**worse, "peak_bytes": 1})
    others = tuple(c for c in before.collectives if c is not hidden)
    after = before.model_copy(update={"collectives": (*others, exposed), "compiled": step})
    found = diff_runs(run_of(before), run_of(after)).as_json()
    verdicts = {each["where"]: each["verdict"] for each in found["step"]}
    assert verdicts == {
        "step_seconds": "worse", "mfu": "worse", "tokens_per_second_per_chip": "worse", "peak_bytes": "better"
    }  # fmt: skip
    (collective,) = found["collectives"]
    assert (collective["way"], collective["verdict"]) == ("shrunk", "worse")


def test_an_operation_is_named_in_words():
    plan = run_of(None).plan
    other = json.loads(json.dumps(plan))
    row = next(row for row in other["operations"] if row["site"] != row["operation"])
    row |= {"strategy": "another", "what": "in another way", "rejected": [{"strategy": "x", "cost": None}]}
    (change,) = diff_runs(run_of(None), replace(run_of(None), plan=other)).sections["plan"]
    assert change.where == f"operations.{row['operation']} {row['site']} in {row['piece']}.strategy"
    assert change.after == "another: in another way"


def test_the_least_that_a_step_takes_is_compared_where_the_step_is_not_whole():
    whole = reports.fits()[0]
    longer = whole.compiled.model_copy(update={"step_seconds": 9.0, "least_seconds": 9.0})
    part = whole.compiled.model_copy(update={"step_seconds": Unknown("no price"), "least_seconds": 2.0})
    for step, names in ((longer, ["step_seconds"]), (part, ["least_seconds", "step_seconds"])):
        found = diff_runs(run_of(whole), run_of(whole.model_copy(update={"compiled": step})))
        assert sorted(change.where for change in found.sections["step"]) == names


POOL = [c for make in (reports.fits, reports.gpu, reports.unknowns) for c in make()[0].collectives]
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(0, 3), st.floats(0, 1), st.sampled_from("ab"))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
        st.lists(LEAVES, max_size=2),
        st.lists(st.dictionaries(st.sampled_from("xyz"), LEAVES, min_size=1, max_size=2), max_size=2),
    ),
    max_leaves=8,
)
RUNS = st.builds(
    lambda picked, spec, plan: Run(
        "run", spec, {"arrays": {}, "table": plan}, reports.fits()[0].model_copy(update={"collectives": tuple(picked)})
    ),
    st.lists(st.sampled_from(POOL), max_size=8),
    st.dictionaries(st.sampled_from("abc"), TREES, max_size=3),
    TREES,
)


@settings(max_examples=150)
@given(RUNS, RUNS)
def test_of_any_runs_the_way_back_mirrors_and_the_same_is_empty(a, b):
    assert diff_runs(a, a).is_empty
    _assert_mirrored(a, b)


@settings(max_examples=100)
@given(RUNS, RUNS)
def test_no_byte_of_a_collective_is_lost(a, b):
    """What the changes add up to is the difference of the totals."""
    told = sum((c.after or {}).get("bytes", 0) - (c.before or {}).get("bytes", 0) for c in diff_runs(a, b).sections["collectives"])  # fmt: skip  # noqa: E501
    sums = [sum(c.bytes for c in run.report.collectives) for run in (a, b)]
    assert told == sums[1] - sums[0]


def test_what_appeared_went_grew_and_became_synchronous():
    report = reports.fits()[0]
    first, second, third, *rest = report.collectives
    grown = replace(second, bytes=2 * second.bytes)
    sync = replace(third, is_async=not third.is_async, exposed_seconds=1.0)
    new = replace(first, kind="all-to-all")
    found = diff_runs(run_of(report), run_of(report.model_copy(update={"collectives": (new, grown, sync, *rest)})))
    told = {c.where: c for c in found.sections["collectives"]}
    assert len(told) == 4
    assert told[f"all-to-all over fsdp, {first.source}"].way == "appeared"
    assert told[f"{first.kind} over fsdp, {first.source}"].way == "gone"
    assert told[f"{second.kind} over fsdp, {second.source}"].way == "grown"
    change = told[f"{third.kind} over fsdp, {third.source}"]
    assert change.before
    assert change.after
    assert (change.before["num_async"], change.after["num_async"]) in ((0, third.count), (third.count, 0))
    assert found.sections["collectives"][0] == change, "the largest difference in exposed time is told first"


def gradient(where: str, size: str = "64.0 MiB", rule: str = "gradient-not-scattered") -> Finding:
    what = f"an all-reduce of {size} where the plan has reduce-scatters: half of the traffic is redundant"
    return Finding(rule=rule, severity="warning", what=what, where=where, fix="sharding=hsdp")


NINE = "9 places: layers/mlp/up_EM, backward (all-reduce.4, once); layers/mlp/gate_EM, backward (all-reduce.5, once)"
EIGHT = "8 places: layers/mlp/gate_EM, backward (all-reduce.7, once)"
UP, HEAD = "layers/mlp/up_EM and 8 more, backward (all-reduce.4, once)", "head/kernel_EV, backward (all-reduce.5, once)"


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ([gradient(NINE)], [gradient(NINE.replace("e.4", "e.44"))], []),
        ([gradient(NINE)], [gradient(EIGHT)], [("changed", "9 places", "8 places")]),
        ([gradient(UP)], [gradient(UP, "32.0 MiB")], [("changed", "of 64.0 MiB", "of 32.0 MiB")]),
        ([gradient(NINE)], [gradient(UP, "32.0 MiB")],
         [("changed", "of 64.0 MiB", "of 32.0 MiB"), ("changed", "9 places", "layers/mlp/up_EM and 8")]),
        ([gradient(UP), gradient(HEAD, "500.0 MiB")], [gradient(HEAD, "250.0 MiB"), gradient(UP, "32.0 MiB")],
         [("changed", "of 500.0 MiB", "of 250.0 MiB"), ("changed", "of 64.0 MiB", "of 32.0 MiB")]),
        ([gradient(UP)], [gradient(HEAD, "500.0 MiB")], [("appeared", "", "of 500.0"), ("gone", "of 64.0", "")]),
        ([gradient(UP)], [gradient(UP, rule="other-rule")], [("appeared", "", "of 64.0"), ("gone", "of 64.0", "")]),
        ([gradient(UP)], [gradient(UP), gradient(UP)], [("appeared", "", "of 64.0")]),
    ],
)  # fmt: skip
def test_a_finding_is_the_same_in_other_places_and_figures(before, after, told):
    sides = [reports.fits()[0].model_copy(update={"findings": tuple(found)}) for found in (before, after)]
    a, b = (run_of(report) for report in sides)
    found = sorted(diff_runs(a, b).sections["findings"], key=lambda change: change.way)
    assert [change.way for change in found] == [way for way, *_ in told]
    for change, (_, *words) in zip(found, told, strict=True):
        assert all(word in (value or "") for word, value in zip(words, (change.before, change.after), strict=True))
    _assert_mirrored(a, b)


def test_what_a_finding_is_about_may_be_named_in_its_words():
    """The rule that lays it out is another: its place says so."""
    reports_of = []
    for place, size in (("embed over fsdp by parameters[0]", 500), ("embed over tensor by parameters[1]", 63)):
        held = [Finding(rule="held-whole", severity="note", where=f"parameters: {place} (copy.{size})", fix="none",
                        what=f"{name} is whole in memory throughout a loop that does not read it: {size}.0 MiB")
                for name in ("embed/table_VE", "head/kernel_EV")]  # fmt: skip
        reports_of.append(reports.fits()[0].model_copy(update={"findings": tuple(held)}))
    found = diff_runs(*map(run_of, reports_of)).sections["findings"]
    assert [change.way for change in found] == ["changed"] * 4
    words = [change.before.split()[0] for change in found if "is whole in memory" in change.before]
    assert sorted(words) == ["embed/table_VE", "head/kernel_EV"]
    assert all(change.after.split()[0] == change.before.split()[0] for change in found)


def test_the_order_of_sharding_rules_is_a_difference():
    run = run_of(None)
    turned = json.loads(json.dumps(run.spec))
    turned["sharding"]["parameters"].reverse()
    assert {change.where for change in diff_runs(run, replace(run, spec=turned)).sections["config"]} >= {
        "sharding.parameters[0].logical",
        "sharding.parameters[1].mesh",
    }


def test_an_absent_key_is_told_apart_from_null():
    a, b = Run("a", {"x": None, "y": 1}, {"arrays": {}}, None), Run("b", {"y": 1, "z": None}, {"arrays": {}}, None)
    both = (Difference("x", "gone", None, None), Difference("z", "appeared", None, None))
    assert diff_runs(a, b).sections["config"] == both


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """compiled and compiled-otherwise, with reports; trained, with none."""
    folder = tmp_path_factory.mktemp("runs")
    for name, plan, made in (("compiled", reports.llama_plan(), reports.fits()),
                             ("otherwise", other_plan(), reports.gpu()), ("trained", other_plan(), None)):  # fmt: skip
        (folder / name).mkdir()
        write_declaration(plan, folder / name)
        if made:
            write_report(made[0], plan, folder / name, events=made[1])
    return folder


def test_the_command_tells_each_kind_of_change(runs, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    assert command(["diff", "compiled", "otherwise"]) == 0
    text = capsys.readouterr().out
    for words in (
        "mesh.tensor                      1 → 8", "memory per chip       7.2 GiB → 52.0 GiB  +622.3 %",
        "worse     all-gather over fsdp, layers/mlp/gate_EM, backward: exposed 0 s → 58.2 ms",
        "MFU, predicted         61.3 % → 46.9 %", "matmul     2.38 s → 2.05 s  -14.0 %",
        "parameters.embed/table_VE                                 (whole, fsdp) → (tensor, fsdp)",
        "target: chip                  v5e → h100",
    ):  # fmt: skip
        assert " ".join(words.split()) in " ".join(text.split()), words
    _, _, blank, title, first, *_ = text.splitlines()
    assert (blank, title.strip()) == ("", "in short")
    assert first.startswith("step, predicted")
    assert command(["diff", "compiled", "compiled"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing changed"


def test_better_is_green_and_worse_is_red():
    a, b = (Run(name, {}, {"arrays": {}}, reports.fits()[0]) for name in "ab")
    assert b.report
    worse = b.report.compiled.model_copy(update={"step_seconds": 9.9, "mfu": 0.9})
    out = io.StringIO()
    show_diff(
        diff_runs(a, replace(b, report=b.report.model_copy(update={"compiled": worse}))), Console(out, is_terminal=True)
    )
    assert re.search(r"step, predicted\x1b\[0m +\x1b\[31m", out.getvalue())
    assert re.search(r"MFU, predicted\x1b\[0m +\x1b\[32m", out.getvalue())


def test_plans_are_compared_where_a_report_is_missing(runs, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    assert command(["diff", "compiled", "trained", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["notes"] == ["trained has no report.json: plans are compared alone"]
    assert not found["step"]
    assert not found["collectives"]
    assert any(change["where"].startswith("memory") for change in found["plan"])
    assert any(change["where"] == "parameters.layers/mlp/up_EM" for change in found["shardings"])
    assert command(["diff", "otherwise", "trained", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not any(found[name] for name in ("config", "plan", "shardings"))


def _edited(text: str, **values: Any) -> str:
    return json.dumps(json.loads(text) | values)


DAMAGE = {
    ("report.json", "cut off"): (lambda t: t[:500], "report.json: is damaged: it is not valid JSON, line"),
    ("report.json", "another version"): (lambda t: _edited(t, schema_version=16), "schema_version is 16, and this version of meshloom reads 17"),  # noqa: E501
    ("report.json", "no version"): (lambda t: "[]", "is damaged: it has no schema_version"),
    ("report.json", "a key less"): (lambda t: _edited(t, compiled={}), "is damaged: compiled.step_seconds: field required, and"),  # noqa: E501
    ("plan.json", "cut off"): (lambda t: t[:500], "plan.json: is damaged: it is not valid JSON, line"),
    ("plan.json", "another version"): (lambda t: _edited(t, schema_version=99), "schema_version is 99"),
    ("spec.yaml", "no YAML"): (lambda t: "model: [", "spec.yaml: is damaged: it is not valid YAML, line"),
    ("plan.json", "deep"): (lambda t: "[" * 100_000, "plan.json: is damaged: its JSON cannot be read"),
    ("spec.yaml", "deep"): (lambda t: "[" * 500, "spec.yaml: is damaged: it holds no declaration"),
    ("spec.yaml", "a cycle"): (lambda t: "a: &a [*a]", "spec.yaml: is damaged: it holds no declaration"),
    ("spec.yaml", "a date"): (lambda t: "a: 2001-01-01", "spec.yaml: is damaged: it holds no declaration"),
    ("spec.yaml", "no mapping"): (lambda t: "[1]", "spec.yaml: is damaged: it holds no declaration"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "how"), DAMAGE)
def test_a_damaged_file_is_one_clear_error(runs, tmp_path, capsys, name, how):
    damage, words = DAMAGE[name, how]
    for file in ("spec.yaml", "plan.json", "report.json"):
        text = (runs / "compiled" / file).read_text()
        (tmp_path / file).write_text(damage(text) if file == name else text)
    assert command(["diff", str(runs / "compiled"), str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("error: ") == told.err.count("  fix: ") == 1
    assert words in told.err


def test_binary_files_and_unreadable_ones_are_told(runs, tmp_path, capsys):
    for file in ("spec.yaml", "plan.json"):
        (tmp_path / file).write_bytes((runs / "trained" / file).read_bytes())
    (tmp_path / "report.json").write_bytes(b"\xff\xfe\x00")
    assert command(["diff", str(runs / "trained"), str(tmp_path)]) == 2
    assert "is damaged: it is not UTF-8 text" in capsys.readouterr().err
    (tmp_path / "report.json").unlink()
    (tmp_path / "plan.json").unlink()
    (tmp_path / "plan.json").mkdir()
    assert command(["diff", str(runs / "trained"), str(tmp_path)]) == 2
    assert "cannot be read: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "RUN_A and RUN_B are missing\n  fix: type: meshloom diff RUN_A RUN_B"),
        (["compiled"], "RUN_B is missing"),
        (["compiled", "trained", "otherwise"], "'otherwise' is too much"),
        (["compiled", "otherwise", "--jsn"], "there is no flag '--jsn'"),
        (["compiled", "trainde"], "trainde: there is no such directory\n  fix: name a run directory, one with "
                                  "spec.yaml and plan.json (did you mean 'trained'?)"),
        (["compiled", "compiled/spec.yaml"], "compiled/spec.yaml: this is a file"),
        (["compiled", "."], "spec.yaml: there is no such file, so this is not a run directory"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_told(runs, capsys, monkeypatch, args, words):
    monkeypatch.chdir(runs)
    assert command(["diff", *args]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert words in told.err


def test_mistakes_in_both_runs_are_told_at_once(runs, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    assert command(["diff", "nowhere", "elsewhere"]) == 2
    assert capsys.readouterr().err.count("error: ") == 2


def test_spec_files_hold_what_was_compared(runs):
    assert yaml.safe_load((runs / "compiled" / "spec.yaml").read_text()) == dict(run_of(None).spec)
