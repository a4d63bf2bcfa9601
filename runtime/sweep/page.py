"""Renders `sweep.html`, the page of a sweep, which needs nothing else.

Its points are embedded as JSON, and its own script draws them. Text from a config cannot act in it
(compiler/report/views/page.py).
"""

import math
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from meshloom.compiler.core.format import counted
from meshloom.compiler.core.known import known
from meshloom.compiler.report.views.page import policy_hash, template_environment, template_source

from .read import Sweep, read_curves, running_rows
from .rows import (
    FIGURES,
    Figure,
    Row,
    best_first,
    best_of,
    chip_panels,
    figure_text,
    find_figure,
    influence,
    name_of,
    pareto_front,
    swept_keys,
    typed_value,
    value_of,
)
from .table import STATUS_TEXT, count_reasons

PAGE = "sweep.html"
SCRIPTS = ("sweep.js", "sweep_charts.js", "sweep_chips.js", "sweep_lines.js")
REPORT = "report.html"


def render_sweep(sweep: Sweep, page: Path, *, sort: str | None = None) -> str:
    """Returns the page. page: its future path; links to points are relative to it. sort: the figure to sort by, as in
    `show_table`."""
    figure = find_figure(sort or sweep.file.objective, where="--sort" if sort else "objective")
    environment = _environment()
    script = "\n".join(template_source(environment, name) for name in SCRIPTS)
    style = "\n".join(template_source(environment, name) for name in ("page.css", "sweep.css"))
    best, keys = best_of(sweep.rows, figure), swept_keys(sweep.file, sweep.rows)
    data = page_data(sweep, page, figure)
    over = ", ".join(keys) if 0 < len(keys) <= 3 else counted(len(keys), "key")
    done = [row.figures for row in sweep.rows if row.status == "done" and row.figures]
    values = [key["values"] for key in data["keys"]]
    has_numbers = any(len(each) > 1 and all(map(_is_number, each)) for each in values)
    return environment.get_template("sweep.html.jinja").render(
        sweep=sweep,
        title=f"{counted(len(sweep.rows), 'point')} over {over}",
        figure=figure,
        best=best,
        best_name=name_of(best) if best else "",
        best_value=figure_text(best, figure) if best else "unknown",
        facts=_facts(sweep, best, figure),
        reasons=[(STATUS_TEXT[status], why, number) for status, why, number in count_reasons(sweep.rows)],
        has={name: bool(data[name]) for name in ("keys", "curves", "front", "chips")}
        | {
            "bars": any(figures.compute_seconds for figures in done),
            "numbers": bool(data["figures"]) and has_numbers,
        },
        data=data,
        script=script,
        style=style,
        script_hash=policy_hash(script),
        style_hash=policy_hash(style),
    )


def page_data(sweep: Sweep, page: Path, figure: Figure) -> dict[str, Any]:
    """Returns the data of the page's script: a column for each key and figure, and each text once."""
    running = running_rows(sweep.directory, sweep.rows) if sweep.is_running else ()
    rows = best_first([*sweep.rows, *running], figure)
    keys = swept_keys(sweep.file, rows)
    figures = [one for one in FIGURES.values() if any(value_of(row, one) is not None for row in rows)]
    values = {key: [typed_value(row, key) for row in rows] for key in keys}
    as_typed = sorted(rows, key=lambda row: row.index)
    order = {key: in_value_order([typed_value(row, key) for row in as_typed]) for key in keys}
    place_in = {key: {value: place for place, value in enumerate(order[key])} for key in keys}
    reasons = list(dict.fromkeys(row.why or "" for row in rows))
    number_of = {reason: number for number, reason in enumerate(reasons)}
    place_of = {row.index: place for place, row in enumerate(rows)}
    directories = {row.index: sweep.directory / row.directory for row in rows if row.directory is not None}
    return {
        "objective": figure.name,
        "command": sweep.file.command,
        "keys": [
            {"name": key, "values": order[key], "influence": round(influence(rows, key, figure), 3)} for key in keys
        ],
        "figures": [{name: getattr(one, name) for name in ("name", "heading", "better", "kind")} for one in figures],
        "statuses": STATUS_TEXT,
        "reasons": reasons,
        "points": {
            "index": [row.index for row in rows],
            "values": [[place_in[key][value] for value in values[key]] for key in keys],
            "status": [row.status for row in rows],
            "why": [number_of[row.why or ""] for row in rows],
            "link": [_link(row, page.parent, directories) for row in rows],
            "basis": [row.figures.basis if row.figures else None for row in rows],
            "figures": [[_rounded(value_of(row, one)) for row in rows] for one in figures],
            "limit": [known(row.figures.limit_bytes) if row.figures else None for row in rows],
        },
        "front": [place_of[row.index] for row in front_of(rows)],
        "chips": chip_panels(sweep.rows, figure),
        "curves": [
            {"point": place_of[curve.index], "tokens": curve.tokens_per_step, "steps": curve.steps,
             "losses": [_rounded(loss) for loss in curve.losses], "heldOut": curve.held_out}
            for curve in read_curves(sweep.directory, rows)
        ],
    }  # fmt: skip


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def front_of(rows: Sequence[Row]) -> list[Row]:
    """Returns the points that no other point beats in both step time and memory, the fastest first."""
    done = [row for row in rows if row.status == "done"]
    both = [tuple(value_of(row, FIGURES[name]) for name in ("step_seconds", "peak_bytes")) for row in done]
    places = [(row, (x, y)) for row, (x, y) in zip(done, both, strict=True) if x is not None and y is not None]
    return [places[index][0] for index in pareto_front([place for _, place in places])]


def in_value_order(values: Sequence[str]) -> list[str]:
    """Returns each value once: numbers by size, other values in the order they come."""
    once = list(dict.fromkeys(values))
    try:
        return sorted(once, key=float)
    except ValueError:
        return once


def _rounded(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")


def _link(row: Row, start: Path, directories: Mapping[int, Path]) -> str | None:
    """Returns the address of a point's report, or of the report of the point that compiled the same program; if there
    is none, that of its directory. None if there is neither. start: the page's directory."""
    indices = (row.index, row.index if row.same_as is None else row.same_as)
    places = [directories[index] for index in indices if index in directories]
    found = next((place / REPORT for place in places if (place / REPORT).is_file()), places[0] if places else None)
    if found is None or not found.exists():
        return None
    address = quote(Path(os.path.relpath(found.resolve(), start.resolve())).as_posix())
    return f"./{address}{'/' if found.is_dir() else ''}"  # ./: so that a name with a colon is not read as a protocol


def _facts(sweep: Sweep, best: Row | None, figure: Figure) -> list[tuple[str, str, str]]:
    """Returns names, values and details of the facts that a reader wants first."""
    done = sum(row.status == "done" for row in sweep.rows)
    short = sum(row.status == "does_not_fit" for row in sweep.rows)
    total, rest = sweep.file.num_points or len(sweep.rows), len(sweep.rows) - done - short
    parts = {"too large for their chips": short, "not done for other reasons": rest, "left": total - len(sweep.rows)}
    said = ", ".join(f"{number:,} {text}" for text, number in parts.items() if number) or "all of them"
    facts = [("Points done", f"{done:,} of {total:,}", said)]
    rate = ("tokens_per_second_per_chip", "tokens/s per chip")
    details = {  # of the figures of the best point: another figure, and what it is
        "step_seconds": ("step", *rate),
        "mfu": ("MFU", *rate),
        "exposed_fraction": ("exposed communication", "exposed_seconds", "of a step"),
        "peak_bytes": ("memory", "memory_fraction", "of the limit of one chip"),
        "evaluation_loss": ("held-out loss", "", ""),
        "cost_per_million_tokens": ("cost of a million tokens", "", ""),
    }
    if best is None:
        return facts
    for name, (title, other, words) in details.items():
        if name != figure.name and (text := figure_text(best, FIGURES[name])) and len(facts) < 4:
            facts.append(
                (f"Its {title}", text, f"{figure_text(best, FIGURES[other]) or 'unknown'} {words}" if other else "")
            )
    return facts


@cache
def _environment() -> jinja2.Environment:
    base = template_environment()
    assert base.loader
    ours = jinja2.PackageLoader("meshloom.runtime.sweep")
    return base.overlay(loader=jinja2.ChoiceLoader([ours, base.loader]))
