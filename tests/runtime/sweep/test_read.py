"""A sweep that ran, runs or was killed is read back; what is not a sweep is refused with what to do."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.runtime.core.files import is_held, locked
from meshloom.runtime.sweep.read import MOST, read_curves, read_sweep, thinned
from support.sweeps import point, sweep_file, write_sweep

ROWS = [point(index, {"mesh.fsdp": 2**index}) for index in range(3)]


def _told(directory):
    with pytest.raises(ConfigError) as error:
        read_sweep(directory)
    return str(error.value)


def test_what_was_written_is_read_back(tmp_path):
    sweep = read_sweep(write_sweep(tmp_path / "sweep", ROWS))
    assert sweep.file == sweep_file(ROWS)
    assert list(sweep.rows) == ROWS
    assert sweep.notes == ()


@pytest.mark.parametrize("num_bytes", [1, 20, 200])
def test_a_last_row_that_is_cut_off_is_left_out_with_a_note(tmp_path, num_bytes):
    path = write_sweep(tmp_path / "sweep", ROWS) / "sweep.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:num_bytes])
    sweep = read_sweep(path.parent)
    assert list(sweep.rows) == ROWS[:2]
    assert sweep.notes[0] == f"the last row of {path} is cut off, and left out"
    assert sweep.notes[1].startswith("1 point has no row: the sweep was stopped")


def test_a_last_row_that_lacks_its_line_break_alone_counts(tmp_path):
    path = write_sweep(tmp_path / "sweep", ROWS) / "sweep.jsonl"
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert list(read_sweep(path.parent).rows) == ROWS


def test_a_damaged_row_in_the_middle_is_named_by_its_line(tmp_path):
    path = write_sweep(tmp_path / "sweep", ROWS) / "sweep.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1].replace('"done"', '"dune"'), lines[2], ""]))
    assert _told(path.parent).startswith(f"error: {path}: is damaged: line 2: status: input should be 'done'")


def test_figures_that_are_none_are_damage(tmp_path):
    path = write_sweep(tmp_path / "sweep", ROWS) / "sweep.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | {"figures": 5}) + "\n" for line in lines))
    assert "is damaged: line 1" in _told(path.parent)


def test_a_row_that_came_twice_is_shown_once_and_noted(tmp_path):
    sweep = read_sweep(write_sweep(tmp_path / "sweep", [*ROWS, ROWS[0]], sweep_file(ROWS)))
    assert list(sweep.rows) == ROWS
    assert "1 row of" in sweep.notes[0]


def test_a_sweep_that_runs_says_how_much_is_left(tmp_path):
    directory = write_sweep(tmp_path / "sweep", ROWS[:1], sweep_file(ROWS))
    assert not read_sweep(directory).is_running
    with locked(directory, Problem("here", "is busy", "wait")):
        sweep = read_sweep(directory)
        assert is_held(directory)
    assert sweep.is_running
    assert sweep.notes == ("the sweep is running, 2 points left",)
    assert not is_held(directory)


def test_a_sweep_whose_first_point_is_not_done_yet_has_no_rows(tmp_path):
    directory = write_sweep(tmp_path / "sweep", [], sweep_file(ROWS))
    (directory / "sweep.jsonl").unlink()
    assert read_sweep(directory).rows == ()


def test_what_is_no_sweep_is_told_with_what_to_do(tmp_path):
    sweep = write_sweep(tmp_path / "2026-11-23" / "10-00-00", ROWS)
    assert f"the newest sweep in it is {sweep}" in _told(tmp_path)
    assert f"did you mean '{sweep}'?" in _told(sweep.with_name("10-00-01"))
    assert "this is a file" in _told(sweep / "sweep.json")
    run = tmp_path / "run"
    run.mkdir()
    assert "`meshloom runs` lists the sweeps" in _told(run)
    (run / "spec.yaml").write_text("")
    assert f"it is that of one run\n  fix: try `meshloom runs {run}`" in _told(run)


def test_damage_and_another_version_of_sweep_json_are_told_apart(tmp_path):
    path = write_sweep(tmp_path / "sweep", ROWS) / "sweep.json"
    text = path.read_text()
    path.write_text(text.replace('"schema_version": 2', '"schema_version": 99'))
    assert "schema_version is 99, and this version of meshloom reads 2" in _told(path.parent)
    path.write_text(text[:-5])
    assert "is damaged: it is not valid JSON" in _told(path.parent)
    path.write_text(text.replace("step_seconds", "step_second"))
    assert "there is no figure 'step_second'" in _told(path.parent)
    assert "did you mean 'step_seconds'?" in _told(path.parent)


@given(st.integers(0, 900), st.integers(24, 60), st.integers(0, 3), st.randoms(use_true_random=False))
def test_a_thinned_curve_has_the_same_extremes_ends_and_gaps(length, most, num_gaps, random):
    values: list[float | None] = [random.uniform(-5, 5) for _ in range(length)]
    for gap in random.sample(range(length), min(num_gaps, length)):
        values[gap] = None
    kept = thinned(values, most)
    known = [value for value in values if value is not None]
    seen = [value for n in kept if (value := values[n]) is not None]
    assert len(kept) <= most
    assert kept == sorted(set(kept))
    assert (min(seen, default=None), max(seen, default=None)) == (min(known, default=None), max(known, default=None))
    assert any(values[n] is None for n in kept) == any(value is None for value in values)
    assert not values or (kept[0], kept[-1]) == (0, len(values) - 1)


def test_a_run_that_goes_on_shows_what_it_has_and_one_without_metrics_nothing(tmp_path):
    rows = [point(n, {"a": n}) for n in range(2)]
    lines = [json.dumps({"step": n, "loss": None if n == 7 else 9.0 - n, "eval_loss": 3.5 if n == 5 else None})
             for n in range(1, 1001)]  # fmt: skip
    (tmp_path / "a=0").mkdir()
    (tmp_path / "a=0" / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 10')
    (curve,) = read_curves(tmp_path, rows)
    assert len(curve.steps) <= MOST
    assert (curve.index, curve.tokens_per_step, curve.held_out) == (0, 65536, ((5, 3.5),))
    assert (curve.steps[0], curve.losses[0], curve.steps[-1], curve.losses[-1]) == (1, 8.0, 1000, -991.0)
    assert None in curve.losses
