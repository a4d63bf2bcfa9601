"""Targets compared: which of them are a tie."""

from types import SimpleNamespace
from typing import Any

from meshloom.compiler.target.accuracy import Accuracy
from meshloom.runtime.tune import targets
from meshloom.runtime.tune.targets import OnTarget, tied_with_best


def _on(name: str, seconds: float, factor: float) -> OnTarget:
    figures = SimpleNamespace(step_seconds=seconds)
    row: Any = SimpleNamespace(figures=figures)
    found: Any = SimpleNamespace(answer=SimpleNamespace(target=factor))
    return OnTarget(name, row, found)


def test_targets_whose_ranges_overlap_are_a_tie(monkeypatch):
    """3 % apart at errors of 20 %: a tie. Twice as long: not one. The order in which they are named does not matter."""
    monkeypatch.setattr(targets, "accuracy_of", lambda factor, _: Accuracy("v5e", factor, 10, 3, "estimated"))
    ones = [_on("v5p-128", 1.03, 1.2), _on("v6e-64", 1.0, 1.2), _on("v5e-256", 2.0, 1.2)]
    assert [one.name for one in tied_with_best(ones, "step_seconds")] == ["v6e-64", "v5p-128"]
    assert [one.name for one in tied_with_best(ones[1:], "step_seconds")] == ["v6e-64"]
    near = [_on("v6e-64", 1.0, 1.01), _on("v5p-128", 1.03, 1.01)]
    assert [one.name for one in tied_with_best(near, "step_seconds")] == ["v6e-64"]
