"""Runs `meshloom schema NAME`: prints the JSON schema of a file, or of what a command prints with `--json`.

Each is made from the types that the file or the command is written from; docs/json.md lists them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from meshloom.compiler.check.check_report import CheckReport
from meshloom.compiler.core.errors import ConfigError, Problem, use_one_of
from meshloom.compiler.core.visible import write_out
from meshloom.compiler.profile.compare import ProfileReport
from meshloom.compiler.report.diff import DiffFile
from meshloom.compiler.report.guard import Verdict
from meshloom.compiler.report.plan_file import PlanFile
from meshloom.compiler.schema import report_schema

from ..inference.generate import Completion
from ..sweep.read import SweepResult
from . import results
from .words import Words

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def _of(kind: Any) -> Callable[[], dict[str, Any]]:
    return lambda: TypeAdapter(kind).json_schema(mode="serialization")


@dataclass(frozen=True)
class JsonDocument:
    """A file or the output of commands. make: returns its schema. commands: print it with `--json`."""

    what: str
    make: Callable[[], dict[str, Any]]
    commands: tuple[str, ...] = ()


def _inspected() -> dict[str, Any]:
    """Returns the schema of what inspect prints: a report, or of a profile its comparison."""
    report, profile = report_schema(), _of(ProfileReport)()
    parts = {**report.pop("$defs"), **profile.pop("$defs")}
    return {"$defs": parts, "anyOf": [report, profile]}


DOCUMENTS = {
    "report": JsonDocument("report.json", report_schema, ("compile",)),
    "plan": JsonDocument("plan.json", _of(PlanFile), ("explain",)),
    "inspect": JsonDocument("report.json of a program, or profile.json of a profile", _inspected, ("inspect",)),
    "profile": JsonDocument("profile.json", _of(ProfileReport), ("profile",)),
    "diff": JsonDocument("the differences of two runs, by section", _of(DiffFile), ("diff",)),
    "guard": JsonDocument("a verdict: checks, concerns, differences, notes", _of(Verdict), ("guard",)),
    "check": JsonDocument("a check: its lines, cuts, what runs otherwise", _of(CheckReport), ("check",)),
    "run": JsonDocument("a run: its state, last step and loss", _of(results.RunResult), ("train",)),
    "runs": JsonDocument("a list of runs and sweeps", _of(list[results.RunResult | results.SweepRow]), ("runs",)),
    "sweep": JsonDocument("a sweep with its rows, also of `-m`", _of(SweepResult), ("sweep", "tune")),
    "evaluate": JsonDocument(
        "losses, or the metrics of tasks", _of(results.EvaluateResult | results.TasksResult), ("evaluate",)
    ),
    "generate": JsonDocument("a line for each prompt", _of(Completion), ("generate",)),
    "export": JsonDocument("the folder with its files", _of(results.ExportResult), ("export",)),
    "calibrate": JsonDocument(
        "the calibration and its file; without RUN, a list",
        _of(results.CalibrateResult | list[results.CalibrateResult]),
        ("calibrate",),
    ),
    "data": JsonDocument("the folder of shards and its index.json", _of(results.DataResult), ("data",)),
    "launch": JsonDocument("what was launched", _of(results.LaunchResult), ("launch",)),
    "import": JsonDocument("overrides, and keys without effect", _of(results.ImportResult), ("import",)),
}


def schema_command(words: Words) -> None:
    """Prints a schema. Raises ConfigError for a name that has none."""
    name = str(words.paths[0])
    found = DOCUMENTS.get(name) or next((each for each in DOCUMENTS.values() if name in each.commands), None)
    if found is None:
        names = dict.fromkeys([*DOCUMENTS, *(command for each in DOCUMENTS.values() for command in each.commands)])
        raise ConfigError([Problem("NAME", f"there is no schema of '{name}'", use_one_of(name, names))])
    write_out(json.dumps({"$schema": DIALECT, "description": found.what} | found.make(), indent=1))
