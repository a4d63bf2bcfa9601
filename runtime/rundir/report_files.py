"""The views of a report as files of a run directory, each at every moment either the old one or the new one, whole."""

import json
from collections.abc import Sequence
from pathlib import Path

from meshloom.compiler.plan import Plan
from meshloom.compiler.report.views.page import render_page
from meshloom.compiler.report.views.timeline import chrome_trace
from meshloom.compiler.schema import Event, Report

from ..core.files import replace_text


def write_report(report: Report, plan: Plan | None, run_dir: Path, *, events: Sequence[Event]) -> tuple[Path, ...]:
    """Writes report.json, timeline.json and report.html. Returns their paths, with the one to open first.
    plan: None for a program that nobody declared.

    All three are rendered before one is written, and report.json comes last: where it is, the others are its own.
    """
    texts = {
        "report.html": render_page(report, events, plan),
        "timeline.json": json.dumps(chrome_trace(report, events), separators=(",", ":")) + "\n",
        "report.json": report.model_dump_json(indent=1) + "\n",
    }
    for name, text in texts.items():
        replace_text(run_dir / name, text)
    return tuple(run_dir / name for name in texts)
