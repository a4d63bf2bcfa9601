"""Rows as CSV and Parquet: read back by other readers, they say what sweep.jsonl says."""

import csv
import json

import pyarrow.parquet
import pytest

from meshloom.compiler.core.errors import ConfigError
from meshloom.runtime.sweep.rows import Figures
from meshloom.runtime.sweep.table import write_csv, write_parquet
from support.sweeps import figures, point

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
        for name in Figures.model_fields:
            value = getattr(row.figures, name, None)
            assert text[f"figures.{name}"] == ("" if value is None else str(value))


def test_parquet_read_back_equals_the_rows_with_their_types(tmp_path):
    write_parquet(ROWS, tmp_path / "rows.parquet")
    read = pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert [row["swept.mesh.fsdp"] for row in read] == [4, 8, 16]
    assert [row["swept.optimizer"] for row in read] == [row.swept["optimizer"] for row in ROWS]
    assert [json.loads(row["swept.mixed"]) for row in read[:2]] == [1, "1e-3"]
    assert [row["swept.rate"] for row in read] == [1.0, 0.5, None]
    assert [row["same_as"] for row in read] == [None, None, 0]
    for name in Figures.model_fields:
        assert [row[f"figures.{name}"] for row in read] == [getattr(row.figures, name, None) for row in ROWS]


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
