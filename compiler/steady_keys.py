"""The keys of report.json and plan.json that tools have read since before a step's figures had one form.

A figure is in `compiled` or `estimated` (figures.py). These keys repeat some figures where they were, under the names
that they had. They are written, and never read back.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from .core.known import Unknown
from .figures import StepFigures

if TYPE_CHECKING:
    from .schema import Report

STEP = {
    "compute_seconds": "compute_seconds", "compute_seconds_by_kind": "compute_seconds_by_kind",
    "exposed_seconds": "exposed_seconds", "exposed_fraction": "exposed_fraction", "bubble_seconds": "bubble_seconds",
    "bubble_fraction": "bubble_fraction", "least_seconds": "least_seconds", "predicted_seconds": "step_seconds",
    "predicted_range_basis": "range_basis", "predicted_mfu": "mfu", "roofline_seconds": "roofline_seconds",
    "bound_seconds": "bound_seconds", "num_unpriced": "num_unpriced", "counted_once": "counted_once",
    "num_bounded": "num_bounded", "bounded_seconds": "bounded_seconds",
}  # fmt: skip
MEMORY = {
    "peak_bytes_per_chip": ("compiled", "peak_bytes"), "limit_bytes_per_chip": ("compiled", "limit_bytes"),
    "fits": ("compiled", "fits"), "estimate_bytes_per_chip": ("estimated", "peak_bytes"),
    "host_bytes_per_chip": ("compiled", "host_bytes"), "host_limit_bytes_per_chip": ("compiled", "host_limit_bytes"),
    "host_fits": ("compiled", "host_fits"), "host_estimate_bytes_per_chip": ("estimated", "host_bytes"),
}  # fmt: skip
TRIED = {"predicted_seconds": "step_seconds", "exposed_fraction": "exposed_fraction",
         "peak_bytes_per_chip": "peak_bytes", "host_bytes_per_chip": "host_bytes"}  # fmt: skip
OF_TRIED = {*TRIED, "fits", "why_not"}
ALTERNATIVE = {"seconds": "step_seconds", "exposed_seconds": "exposed_seconds", "peak_bytes_per_chip": "peak_bytes",
               "fits": "fits"}  # fmt: skip


def steady_keys(report: "Report") -> dict[str, Any]:
    """Returns these keys of a report with their values."""
    step = {key: getattr(report.compiled, name) for key, name in STEP.items()}
    keys: dict[str, Any] = {
        "step": step | {"predicted_range_seconds": report.compiled.range_of(report.compiled.step_seconds)},
        "memory": {key: _value(getattr(report, part), name) for key, (part, name) in MEMORY.items()},
        "alternatives": [_values(one.figures, ALTERNATIVE) for one in report.alternatives],
    }
    return keys | ({"search": {"tried": [_tried(one.figures) for one in report.search.tried]}} if report.search else {})


def without_steady_keys(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON of a report without these keys, as it is read."""

    def without(node: Any, names: Collection[str]) -> Any:
        return {key: value for key, value in node.items() if key not in names} if isinstance(node, dict) else node

    found = {key: value for key, value in report.items() if key != "step"}
    if "memory" in found:
        found["memory"] = without(found["memory"], MEMORY)
    if isinstance(found.get("alternatives"), list):
        found["alternatives"] = [without(one, ALTERNATIVE) for one in found["alternatives"]]
    if isinstance(search := found.get("search"), dict) and isinstance(search.get("tried"), list):
        found["search"] = search | {"tried": [without(one, OF_TRIED) for one in search["tried"]]}
    return found


def _tried(figures: StepFigures) -> dict[str, Any]:
    """Returns the keys of a program that was tried: whether it fits in both memories, and why its step is not known."""
    seconds = figures.step_seconds
    why = seconds.why if isinstance(seconds, Unknown) else None
    return _values(figures, TRIED) | {"fits": figures.runs, "why_not": why}


def _values(figures: StepFigures, keys: Mapping[str, str]) -> dict[str, Any]:
    return {key: getattr(figures, name) for key, name in keys.items()}


def _value(figures: StepFigures | Unknown, name: str) -> Any:
    return figures if isinstance(figures, Unknown) else getattr(figures, name)
