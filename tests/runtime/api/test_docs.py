"""docs/python.md works: its examples, one after the other, as a reader would run them."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "python.md"


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)


def run(texts: list[str]) -> None:
    names: dict[str, object] = {}
    for text in texts:
        exec(compile(text, str(PAGE), "exec"), names)


def test_examples_that_train_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    quick = [text for text in blocks() if "meshloom.compile(" not in text]
    assert len(quick) == len(blocks()) - 1 == 5
    run(quick)
    told = capfd.readouterr()
    assert "<Plan: 8.03 B parameters, fsdp=64 on v5p-128" in told.out
    assert "seed\n  'x' is not a whole number" in told.out
    assert told.err == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci
def test_all_examples(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    run(blocks())
    told = capfd.readouterr()
    assert "<TrainedRun: 4 of 4 steps, loss" in told.out
    assert told.err == ""
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
