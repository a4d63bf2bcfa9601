"""Tables of bench/ that `meshloom compile` fills: a row that cannot be compiled is told, and the others are there."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from meshloom.compiler.analysis.program_memory import read_peak
from meshloom.compiler.target.accuracy import ProgramKind
from meshloom.compiler.xla.hlo import parse_module
from support import reports
from support.recorded import recorded_text

FOLDER = Path(__file__).parents[2] / "bench"


@pytest.fixture
def script(monkeypatch) -> Callable[[str], Any]:
    """A module of the folder, where the command fails for what is said to be `broken` and gives a report else."""

    def compiled(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        (run_dir,) = (word.removeprefix("hydra.run.dir=") for word in command if word.startswith("hydra.run.dir="))
        report = reports.fits()[0].model_copy(update={"search": reports.searched()})
        if "broken" in " ".join(command):
            return subprocess.CompletedProcess(command, 2)
        Path(run_dir, "report.json").write_text(report.model_dump_json())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(subprocess, "run", compiled)
    return importlib.import_module


def test_chains_of_imports_are_counted_in_modules(script, tmp_path):
    """By hand: a -> b -> c, and what is imported inside a function or for types alone makes no chain longer."""
    texts = {
        "models/a.py": "from .b import f\nimport os",
        "models/b.py": "from meshloom.models import c",
        "models/c.py": "def f():\n    from . import d",
        "models/d.py": "if TYPE_CHECKING:\n    from .a import f",
    }
    (tmp_path / "models").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    modules = script("modules").read_modules(tmp_path)
    assert modules.longest_chain == ("meshloom.models.a", "meshloom.models.b", "meshloom.models.c")
    assert (modules.median_depth, modules.num_small, len(modules.num_lines)) == (1.5, 4, 4)


def rows_of(path: Path) -> list[str]:
    return [json.loads(line)["name"] for line in path.read_text().splitlines()]


def test_a_recipe_that_cannot_be_compiled_leaves_the_others(script, tmp_path, monkeypatch, capsys):
    published = script("published")
    recipes = [
        published.Recipe("fitted", "first", "here", 100.0, None, "full", ("model=broken", "target=v5e-8")),
        published.Recipe(
            "fitted", "second", "here", 100.0, 0.5, "full", ("model=tiny", "target=v5e-8"), {"xla_broken": True}
        ),
        published.Recipe("checked", "third", "here", None, 0.5, "full", ("model=large", "target=v5e-8")),
    ]
    monkeypatch.setattr(published, "RECIPES", recipes)
    monkeypatch.setattr(sys, "argv", ["published.py", str(tmp_path / "kept.jsonl")])
    assert published.main() == 1
    told = capsys.readouterr()
    failed = [line for line in told.err.splitlines() if line.startswith("not compiled, exit code 2: ")]
    assert [line.split(": ")[1] for line in failed] == ["first", "second"]
    assert rows_of(tmp_path / "kept.jsonl") == ["third"]
    table = [line.split(" | ") for line in told.out.splitlines()[2:5]]
    assert [row[4] for row in table] == ["not compiled", "not compiled", "61.3%"]
    assert table[2][5] == "-18%", "0.5 of the peak as published, 0.613 predicted: the step comes out too short"
    assert all(len(row) == 11 for row in table)

    monkeypatch.setattr(published, "RECIPES", recipes[2:])
    assert published.main() == 0
    assert "compiling" not in capsys.readouterr().err, "it is kept"


def test_a_row_that_cannot_be_compiled_leaves_the_others(script, tmp_path, monkeypatch, capsys):
    rows = script("rows")
    declared = [(model, "v5e-8", 8, 1, 128, (), 4) for model in ("broken", "tiny")]
    monkeypatch.setattr(rows, "OVERLAPPED", declared)
    named = {f"{name}, {mode}": overrides for name, mode, overrides in rows.overlap_rows()}
    monkeypatch.setitem(rows.TABLES, "overlap", replace(rows.OVERLAP, rows=named))
    assert rows.main(["overlap", str(tmp_path / "kept.jsonl")]) == 1
    told = capsys.readouterr()
    assert told.err.count("not compiled, exit code 2: broken, v5e-8") == 3
    assert rows_of(tmp_path / "kept.jsonl") == [name for name in named if name.startswith("tiny")]
    assert [line.split(",")[0] for line in told.out.splitlines() if line.startswith("| tiny")] == ["| tiny"]


def test_what_could_not_be_judged_says_why(script):
    cell = script("rows").figures
    unknown = {"predicted_seconds": None, "fits": True, "why_not": "the program's text cannot be read: line 7"}
    assert cell(unknown) == "the program's text cannot be read: line 7"
    assert cell(unknown | {"fits": False}) == "does not fit"


def test_a_shortened_program_takes_the_same_memory(monkeypatch):
    """What `record_schedules.py` leaves out of a program, the walk of its memory does not read."""
    monkeypatch.syspath_prepend(str(FOLDER))
    without_unread = importlib.import_module("record_schedules").without_unread
    for name in ("v5e_tensor", "h100_fsdp"):
        text = recorded_text(name)
        short = without_unread(text)
        assert len(short) < 0.7 * len(text)
        assert read_peak(parse_module(short)) == read_peak(parse_module(text))
    recorded = recorded_text("llama_v5e8_two_microbatches")
    assert without_unread(recorded) == recorded


def test_deliberate_faults_fit_the_code_and_their_tests(script):
    """Each changes text that its file has once, and names a test that is there; running them is the script's part."""
    faults = script("faults")
    table = faults.read_faults()
    assert len(table) >= 60
    assert faults.mistakes_in(table) == []
    stale = replace(table[0], old="no such text", test="tests/project/test_bench.py::test_nowhere")
    assert [line.split(": ", 1)[1] for line in faults.mistakes_in([stale, table[0]])] == [
        "2 faults have this name",
        "the old text is 0 times in compiler/parallel/weights.py",
        "there is no test tests/project/test_bench.py::test_nowhere",
    ]


def test_the_guard_failed_for_each_regression_that_was_seeded(script):
    """An edit of a file that has changed since would seed nothing."""
    guarded = script("guard_regressions")
    rows = guarded.read_lines(guarded.KEPT)
    assert {each.name for each in guarded.PULL_REQUESTS} <= {row["name"] for row in rows}
    assert [row["name"] for row in rows if not guarded.is_as_seeded(row)] == []
    for request in guarded.PULL_REQUESTS:
        for edit in request.edits:
            assert (guarded.FILES / edit.file).read_text().count(edit.old) == 1, edit


def test_pages_of_results_have_the_tables_that_their_rows_give(script):
    """A page whose rows, or whose way to print them, have changed is stale: `python bench/results.py --write`."""
    results = script("results")
    pages = list(results.pages())
    printed = [name for path in pages for _, name, _ in results.MARKED.findall(path.read_text())]
    assert sorted(printed) == sorted(results.TABLES), "each table is on one page"
    assert [path.name for path in pages if results.filled(path.read_text()) != path.read_text()] == []


def test_predictions_of_presets_are_of_the_presets_as_they_are(script):
    """A preset that was added, changed or removed makes them stale: `python bench/presets.py`."""
    presets = script("presets")
    kept = {row["name"]: row for row in presets.read_lines(presets.KEPT)}
    assert {name: row["declared"] for name, row in kept.items()} == presets.presets()
    assert [name for name, row in kept.items() if not row["fits"] or row["peak_bytes"] > row["limit_bytes"]] == []
    for row in kept.values():
        least, most = row["range_seconds"]
        assert least < row["step_seconds"] < most, row["name"]
        assert set(row["versions"]) == set(presets.PACKAGES), row["name"]


def test_checks_of_presets_are_of_the_presets_as_they_are(script):
    """A preset that was changed or removed makes its check stale: `python bench/preset_checks.py`."""
    checks = script("preset_checks")
    kept = {row["name"]: row for row in checks.read_lines(checks.KEPT)}
    declared = checks.presets()
    assert {name: row["declared"] for name, row in kept.items()} == {name: declared.get(name) for name in kept}
    assert [name for name, row in kept.items() if row["failed"]] == []


def test_half_of_the_recipes_are_only_checked(script):
    published = script("published")
    halves = [recipe.half for recipe in published.RECIPES]
    assert len({recipe.declaration for recipe in published.RECIPES}) == len(halves) >= 24
    assert halves.count("checked") >= len(halves) // 2
    chips = {half: {published.chip_of(each) for each in published.RECIPES if each.half == half} for half in halves}
    assert chips["fitted"] <= chips["checked"], "what one half chooses the other checks, chip by chip"


@pytest.fixture
def kept_runs(script):
    published = script("published")
    kept, estimates = (published.read_kept(path) for path in (published.KEPT, published.ESTIMATES))
    return published.published_runs(kept, estimates)


def test_ranges_are_those_of_the_kept_rows(script, kept_runs):
    published, ranges = script("published"), script("prediction_range")
    best = published.best_mfus(published.read_kept(published.KEPT))
    assert json.loads(published.TABLE.read_text()) == json.loads(json.dumps(ranges.table_of(kept_runs, best)))


@pytest.mark.parametrize("basis", ["compiled", "estimated"])
def test_9_of_10_rows_lie_in_the_range_of_the_others(script, kept_runs, basis):
    """Each row is left out in turn: of dense rows, and of all other kinds together."""
    ranges = script("prediction_range")
    found = {kind: ranges.coverage_of_kind(kept_runs, kind, basis) for kind in get_args(ProgramKind)}
    plain = found.pop("dense")
    assert plain.total >= 30
    assert plain.inside >= 0.9 * plain.total
    others = [each for each in found.values() if each.total > 1]
    assert sum(each.total for each in others) >= 10
    assert sum(each.inside for each in others) >= 0.9 * sum(each.total for each in others)


def test_dense_ranges_hold_left_out_groups(script, kept_runs):
    """Of each source, layout and chip that is left out, 8 of 10 runs lie in the range that the others give; those of
    small groups together, if they are not too few."""
    ranges = script("prediction_range")
    runs = ranges.checked_dense(kept_runs)
    assert len(runs) >= 10
    for basis in ranges.BASES:
        least = ranges.find_least(runs, basis)
        for grouping in ranges.GROUPINGS:
            found = ranges.coverage(runs, basis, grouping, least)
            large = [each for each in found.values() if each.total >= ranges.FEW]
            small = [each for each in found.values() if each.total < ranges.FEW]
            assert all(each.inside >= 0.8 * each.total for each in large), grouping
            num_small = sum(each.total for each in small)
            assert num_small < ranges.FEW or sum(each.inside for each in small) >= 0.8 * num_small, grouping


def test_dense_estimates_have_no_wider_range_than_before_kinds_had_their_own(kept_runs, script):
    factors = script("prediction_range").table_of(kept_runs, {})["kinds"]["dense"]["estimated"]
    assert all(factor <= {"h100": 1.3713}.get(chip, 1.2636) for chip, factor in factors.items())


def test_a_kind_with_few_rows_has_a_wider_range_than_their_errors(script):
    """By hand, of normal errors around zero: two runs that are off by 10 %, and t = 2.92 with two degrees of freedom,
    have a range of 32 %. No kind is narrower than a dense run's, except what few bits gain."""
    ranges = script("prediction_range")
    plain = [ranges.Run(f"run {n}", f"chip {n}", "one", "fully sharded", 1.05, 1.05) for n in range(9)]
    others = [kind for kind in get_args(ProgramKind)[1:] if kind != "several slices"]
    one_each = [ranges.Run(kind, "v5e", "one", kind, 1.001, 1.001) for kind in others]
    few = [ranges.Run(f"few {n}", "v5e", "one", "several slices", 1.01, 1.1) for n in range(2)]
    kinds = ranges.table_of([*plain, *one_each, *few], {})["kinds"]
    assert [kinds["dense"][basis]["*"] for basis in ranges.BASES] == [1.05, 1.05]
    assert [kinds["data parallel"][basis]["*"] for basis in ranges.BASES] == [1.05, 1.05]
    assert kinds["low precision"]["compiled"]["*"] == pytest.approx(1.001**6.314, abs=1e-4)
    assert (len(kinds["dense"]["num_runs"]), kinds["data parallel"]["num_runs"]) == (9, {"v5e": 1})
    assert kinds["several slices"]["num_runs"] == {"v5e": 2}
    assert kinds["several slices"]["compiled"]["*"] == 1.05
    assert kinds["several slices"]["estimated"]["*"] == pytest.approx(1.1**2.92, abs=1e-3)


def test_one_of_ten_runs_may_be_far_off(script):
    """By hand: two runs are off by a factor of 2, each on another chip. Of 20 or 21 runs the range has to hold one of
    them; of 29 runs it is the third largest error, 1.2."""
    ranges = script("prediction_range")
    errors = [2.0, 2.0, 1.2, *[1.1] * 17]
    runs = [ranges.Run(f"run {n}", f"chip {n}", "one", "tensor", error, error) for n, error in enumerate(errors)]
    assert ranges.factor_of(runs, "compiled", "*") == 2.0
    assert ranges.factor_of([*runs, ranges.Run("one more", "chip", "one", "tensor", 1.1, 1.1)], "compiled", "*") == 2.0
    more = [ranges.Run(f"more {n}", f"other {n}", "one", "tensor", 1.1, 1.1) for n in range(9)]
    assert ranges.factor_of([*runs, *more], "compiled", "*") == pytest.approx(1.2)


def test_a_range_covers_a_source_that_is_off_as_a_whole(script):
    """Nine runs of one laboratory are within 2 %, five of another are all 30 % off: left out one by one, the others of
    their kind would vouch for each of them."""
    ranges = script("prediction_range")
    near = [ranges.Run(f"near {n}", "v5e", "near", "tensor", 1.02, 1.02) for n in range(9)]
    far = [ranges.Run(f"far {n}", "h100", "far", "tensor", 1.3, 1.3) for n in range(5)]
    least = ranges.find_least([*near, *far], "compiled")
    assert ranges.coverage([*near, *far], "compiled", "source", least)["far"].inside == 5
    assert ranges.coverage([*near, *far], "compiled", "source", 0.0)["far"].inside == 0


def test_no_published_step_is_shorter_than_its_bound(script):
    published = script("published")
    rows = published.read_kept(published.ESTIMATES).values()
    assert len(rows) >= 30
    shares = {row["name"]: row["bound_seconds"] / row["published_seconds"] for row in rows}
    assert max(shares.values()) < 0.85, "the best published MFU is 71.5 %"
    assert min(shares.values()) > 0.15
