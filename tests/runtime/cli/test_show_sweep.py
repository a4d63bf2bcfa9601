"""`meshloom sweep DIR` as its users type it."""

import json
from pathlib import Path

import pytest

from meshloom.runtime.cli.main import run
from support.sweeps import figures, point, sweep_file, write_sweep

ROWS = [point(n, {"mesh.fsdp": 2**n}, figures=figures(step_seconds=1.0 / (n + 1), mfu=0.1 * (3 - n))) for n in range(3)]


@pytest.fixture
def sweep(tmp_path) -> Path:
    return write_sweep(tmp_path / "sweep", ROWS)


def _told(capsys, *words: object) -> tuple[int, str, str]:
    exit_code = run(["sweep", *map(str, words)])
    out, err = capsys.readouterr()
    return exit_code, out, err


def test_it_shows_the_table_and_writes_the_page(sweep, capsys):
    exit_code, out, err = _told(capsys, sweep)
    assert exit_code == 0
    assert out.splitlines()[2].split()[:2] == ["*", "4"]
    assert err == f"page: {sweep}/sweep.html\n"
    assert "<!doctype html>" in (sweep / "sweep.html").read_text()


def test_json_has_every_row_in_the_order_asked_for(sweep, capsys):
    exit_code, out, err = _told(capsys, sweep, "--json", "--sort", "mfu")
    assert (exit_code, err) == (0, "")
    told = json.loads(out)
    assert told["sweep"] == sweep_file(ROWS).model_dump(mode="json")
    assert told["rows"] == [row.model_dump(mode="json") for row in ROWS]
    assert [row["index"] for row in json.loads(_told(capsys, sweep, "--json")[1])["rows"]] == [2, 1, 0]
    assert not (sweep / "sweep.html").exists()


def test_files_go_where_they_are_asked_for(sweep, tmp_path, capsys):
    places = [tmp_path / name for name in ("rows.csv", "rows.parquet", "page.html")]
    exit_code, _, err = _told(capsys, sweep, f"--csv={places[0]}", "--parquet", places[1], "--page", places[2])
    assert exit_code == 0
    assert err == f"3 rows: {places[0]}\n3 rows: {places[1]}\npage: {places[2]}\n"
    assert all(place.stat().st_size for place in places)


def test_all_mistakes_of_a_line_are_told_at_once(capsys, sweep):
    exit_code, out, err = _told(capsys, "--cvs", "--json=yes", "--sort")
    assert (exit_code, out, err.count("error: ")) == (2, "", 4)
    assert "there is no flag '--cvs'\n  fix: did you mean '--csv'? use one of --sort, --all, --csv" in err
    assert "--json takes no value" in err
    assert "--sort lacks its value\n  fix: type --sort FIGURE" in err
    assert "DIR is missing\n  fix: type: meshloom sweep DIR" in err
    exit_code, out, err = _told(capsys, sweep, "--sort", "step")
    assert (exit_code, out) == (2, "")
    assert "there is no figure 'step'" in err


def test_a_directory_that_is_no_sweep_is_one_error(tmp_path, capsys):
    assert _told(capsys, tmp_path / "none")[0] == 2
    exit_code, _, err = _told(capsys, tmp_path)
    assert (exit_code, err.count("error: ")) == (2, 1)


def test_a_page_that_cannot_be_written_is_told_after_the_table(sweep, capsys):
    exit_code, out, err = _told(capsys, sweep, "--page", sweep / "none" / "page.html")
    assert exit_code == 2
    assert "best by step_seconds" in out
    assert "cannot be written: No such file or directory\n  fix: name a file that can be written: --page FILE" in err
