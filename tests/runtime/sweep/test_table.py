"""The table of a sweep on a terminal: the best first, the figures that matter, and reasons counted."""

import csv
import io
import json
import re

import pyarrow.parquet
import pytest

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.known import known
from meshloom.runtime.sweep.rows import Figures, Row
from meshloom.runtime.sweep.table import NUM_SHOWN, count_reasons, show_table, write_csv, write_parquet
from support.sweeps import GIB, figures, point, sweep_file

NASTY = "[bold]b[/] \x1b[2J <i>"


def _shown(rows: list[Row], *, width: int = 160, **more) -> list[str]:
    out = io.StringIO()
    show_table(Console(out, width=width), sweep_file(rows), rows, **more)
    return out.getvalue().splitlines()


def _many(number: int) -> list[Row]:
    return [
        point(n, {"mesh.fsdp": n, "remat": "full"}, figures=figures(step_seconds=1 + (n * 7 % number) / number))
        if n % 3
        else point(n, {"mesh.fsdp": n, "remat": "full"}, status="does_not_fit", why=f"needs {n}.5 GiB of 16.0 GiB")
        for n in range(number)
    ]


def test_points_are_sorted_by_the_objective_and_the_best_is_marked():
    lines = _shown([point(n, {"mesh.fsdp": n}, figures=figures(step_seconds=s)) for n, s in enumerate((3, 1, 2))])
    assert lines[1].split() == ["mesh.fsdp", "step", "MFU", "tokens/s/chip", "exposed", "memory", "of", "the", "memory"]
    assert [line.split()[0] for line in lines[2:5]] == ["*", "2", "0"]
    assert lines[2].split()[1:] == ["1", "1.00", "s", "40.0", "%", "4.10", "k", "20.0", "%", "8.0", "GiB", "50.0", "%"]
    assert lines[-1] == "best by step_seconds: mesh.fsdp=1 at 1.00 s, in mesh.fsdp=1"


def test_it_can_be_sorted_by_any_figure_which_is_then_shown():
    rows = [point(n, {"a": n}, figures=figures(compile_seconds=float(9 - n))) for n in range(3)]
    lines = _shown(rows, sort="compile_seconds")
    assert "compiled in" in lines[1]
    assert lines[2].split()[:2] == ["*", "2"]
    with pytest.raises(ConfigError, match=r"--sort: there is no figure 'mfuu'"):
        _shown(rows, sort="mfuu")


def test_a_long_sweep_shows_its_best_and_counts_the_rest():
    rows = _many(3000)
    lines = _shown(rows)
    steps = [float(re.search(r"([\d.]+) s ", line)[1]) for line in lines if re.match(r"[* ] +\d+ +[\d.]+ s", line)]  # type: ignore[index]
    assert len(steps) == NUM_SHOWN
    assert steps == sorted(steps)
    assert "... 2,980 more points: `meshloom sweep DIR --all` shows them" in lines
    assert "3,000 points: 2,000 done, 1,000 do not fit" in lines
    assert "  1,000 do not fit: needs 0.5 GiB of 16.0 GiB, and alike" in lines
    assert len(_shown(rows, is_whole=True)) > 3000


def test_reasons_that_differ_in_numbers_alone_are_one():
    rows = [point(n, {"a": n}, status="refused", why=f"{n} does not divide 8") for n in (3, 5)]
    rows += [point(9, {"a": 9}, status="failed", why="it had to")]
    assert count_reasons(rows) == [("refused", "3 does not divide 8, and alike", 2), ("failed", "it had to", 1)]


def test_where_nothing_is_done_it_says_so():
    lines = _shown([point(n, {"a": n}, status="failed") for n in range(2)])
    assert lines[-1] == "no point is done with step_seconds"
    assert "  2 failed: it had to" in lines
    assert _shown([]) == ["no point has ended"]


def test_a_sweep_over_no_key_has_one_row():
    assert any(line.startswith("*") for line in _shown([point(0, {})]))


@pytest.mark.parametrize("width", [80, 100, 200])
def test_values_stay_whole_and_act_on_nothing(width):
    rows = [point(n, {"optimizer.learning_rate": f"{n}e-3", "notes.name": NASTY}, figures=figures(peak_bytes=n * GIB))
            for n in range(3)]  # fmt: skip
    text = "\n".join(_shown(rows, width=width))
    assert "\x1b" not in text
    assert all(f"{n}e-3" in text for n in range(3))
    assert max(map(len, text.splitlines()[1:5])) <= width


ROWS = [
    point(0, {"mesh.fsdp": 4, "optimizer": "adamw", "mixed": 1, "rate": 1}, figures=figures(step_seconds=1 / 3)),
    point(1, {"mesh.fsdp": 8, "optimizer": 'a,"b"\n[c]', "mixed": "1e-3", "rate": 0.5}, status="failed",
          why="it, had to", seconds=2.5),
    point(2, {"mesh.fsdp": 16, "optimizer": None, "mixed": [1, 2]}, same_as=0),
]  # fmt: skip


def test_csv_read_back_equals_the_rows(tmp_path):
    write_csv(ROWS, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert len(read) == len(ROWS)
    for row, text in zip(ROWS, read, strict=True):
        assert (int(text["index"]), text["status"], text["why"] or None) == (row.index, row.status, row.why)
        assert tuple(json.loads(text["overrides"])) == row.overrides
        assert text["swept.mesh.fsdp"] == str(row.swept["mesh.fsdp"])
        assert text["swept.optimizer"] == (row.swept["optimizer"] or "")
        for name in Figures.model_fields.keys() - {"exposed_by_axes"}:
            value = known(getattr(row.figures, name, None))
            assert text[f"figures.{name}"] == ("" if value is None else str(value))


def test_parquet_read_back_equals_the_rows_with_their_types(tmp_path):
    write_parquet(ROWS, tmp_path / "rows.parquet")
    read = pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert [row["swept.mesh.fsdp"] for row in read] == [4, 8, 16]
    assert [row["swept.optimizer"] for row in read] == [row.swept["optimizer"] for row in ROWS]
    assert [json.loads(row["swept.mixed"]) for row in read[:2]] == [1, "1e-3"]
    assert [row["swept.rate"] for row in read] == [1.0, 0.5, None]
    assert [row["same_as"] for row in read] == [None, None, 0]
    for name in Figures.model_fields.keys() - {"exposed_by_axes"}:
        assert [row[f"figures.{name}"] for row in read] == [known(getattr(row.figures, name, None)) for row in ROWS]


def test_no_rows_are_a_table_without_rows(tmp_path):
    write_csv([], tmp_path / "rows.csv")
    write_parquet([], tmp_path / "rows.parquet")
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 1
    assert pyarrow.parquet.read_table(tmp_path / "rows.parquet").num_rows == 0


def test_without_pyarrow_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'meshloom\[data\]'"):
        write_parquet(ROWS, tmp_path / "rows.parquet")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be written: No such file or directory\n  fix: .* --csv FILE"):
        write_csv(ROWS, tmp_path / "none" / "rows.csv")


def test_over_chips_it_shows_ranges_and_ties_and_marks_what_no_published_run_has_reached():
    def on(index, chip, seconds, mfu):
        made = figures(chip=chip, target=f"{chip}-16", step_seconds=seconds, mfu=mfu, range_factor=1.25)
        return point(index, {"target": f"{chip}-16"}, figures=made)

    lines = _shown([on(0, "v5p", 1.0, 0.99), on(1, "v6e", 1.4, 0.4), on(2, "h100", 2.0, 0.4)])
    assert [line.split("  ")[2].strip() for line in lines[2:5]] == ["1.00 s", "1.40 s", "2.00 s"]
    assert "800 ms to 1.25 s" in lines[2]
    assert [line.count("%!") for line in lines[2:5]] == [1, 0, 0]
    assert any(line.startswith("! published runs on v5p reached an MFU of ") for line in lines)
    assert lines[-1].startswith("a tie by step_seconds: target=v5p-16, target=v6e-16: ")
    apart = _shown([on(0, "v5p", 1.0, 0.4), on(1, "h100", 2.0, 0.4)])
    assert apart[-1].startswith("best by step_seconds: target=v5p-16 ")
