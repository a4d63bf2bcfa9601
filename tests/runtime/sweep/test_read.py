"""A sweep that ran, runs or was killed is read back; what is not a sweep is refused with what to do."""

import pytest

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.runtime.core.exclusive import alone, is_held
from meshloom.runtime.sweep.read import read_sweep
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


def test_a_row_that_came_twice_is_shown_once_and_noted(tmp_path):
    sweep = read_sweep(write_sweep(tmp_path / "sweep", [*ROWS, ROWS[0]], sweep_file(ROWS)))
    assert list(sweep.rows) == ROWS
    assert "1 row of" in sweep.notes[0]


def test_a_sweep_that_runs_says_how_much_is_left(tmp_path):
    directory = write_sweep(tmp_path / "sweep", ROWS[:1], sweep_file(ROWS))
    assert not read_sweep(directory).is_running
    with alone(directory, Problem("here", "is busy", "wait")):
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
    path.write_text(text.replace('"schema_version": 1', '"schema_version": 99'))
    assert "schema_version is 99, and this version of meshloom reads 1" in _told(path.parent)
    path.write_text(text[:-5])
    assert "is damaged: it is not valid JSON" in _told(path.parent)
    path.write_text(text.replace("step_seconds", "step_second"))
    assert "there is no figure 'step_second'" in _told(path.parent)
    assert "did you mean 'step_seconds'?" in _told(path.parent)
