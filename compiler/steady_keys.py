"""The keys of report.json and plan.json that tools have read since before a step's figures had one form.

A figure is in `compiled` or `estimated` (figures.py). These keys repeat some figures where they were, under the names
that they had. They are written, and never read back.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

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
RANGE = "predicted_range_seconds"


def with_steady_keys(report: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON of a report with these keys, and with the reasons of those that are unknown."""
    unknown = dict(report["unknown"])

    def value(part: str, name: str, steady: str) -> Any:
        if why := unknown.get(f"{part}.{name}") or unknown.get(part):
            unknown[steady] = why
        return (report[part] or {}).get(name)

    step = {key: value("compiled", name, f"step.{key}") for key, name in STEP.items()}
    step[RANGE] = range_seconds(report["compiled"])
    if step[RANGE] is None:
        why = unknown.get("compiled.step_seconds") or unknown.get("compiled.range_factor") or unknown.get("compiled")
        unknown |= {f"step.{RANGE}": why} if why else {}
    memory = {key: value(part, name, f"memory.{key}") for key, (part, name) in MEMORY.items()}
    search = report["search"]
    return report | {
        "step": step,
        "memory": memory | report["memory"],
        "search": search and search | {"tried": [_tried(one, n, unknown) for n, one in enumerate(search["tried"])]},
        "alternatives": [_repeated(one, ALTERNATIVE, f"alternatives[{n}]", unknown)
                         for n, one in enumerate(report["alternatives"])],
        "unknown": unknown,
    }  # fmt: skip


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


def range_seconds(figures: Mapping[str, Any]) -> list[float] | None:
    """Returns the range of a step from the JSON of its figures; None if it is not known."""
    seconds, factor = figures["step_seconds"], figures["range_factor"]
    return None if seconds is None or factor is None else [seconds / factor, seconds * factor]


def _repeated(one: dict[str, Any], keys: Mapping[str, str], path: str, unknown: dict[str, str]) -> dict[str, Any]:
    for key, name in keys.items():
        if why := _reason(f"{path}.figures.{name}", unknown):
            unknown[f"{path}.{key}"] = why
    return {key: one["figures"][name] for key, name in keys.items()} | one


def _tried(one: dict[str, Any], place: int, unknown: dict[str, str]) -> dict[str, Any]:
    """Returns a program that was tried: whether it fits in both memories, and why its step is not known."""
    path, figures = f"search.tried[{place}]", one["figures"]
    fits = False if figures["host_fits"] is False else figures["fits"]
    why = _reason(f"{path}.figures.step_seconds", unknown)
    return _repeated(one, TRIED, path, unknown) | {"fits": fits, "why_not": why}


def _reason(path: str, unknown: Mapping[str, str]) -> str | None:
    """Returns why a value in a list is not known; None if it is. All elements may share one reason."""
    return unknown.get(path) or unknown.get(re.sub(r"\[\d+\]", "[*]", path))
