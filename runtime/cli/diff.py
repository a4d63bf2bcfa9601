"""Runs `meshloom diff RUN_A RUN_B`: shows what changed between two run directories, or two inspected programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem, all_of
from meshloom.compiler.core.visible import write_out
from meshloom.compiler.report.diff import Run, diff_runs
from meshloom.compiler.report.explain import SCHEMA_VERSION as PLAN_VERSION
from meshloom.compiler.report.views.diff_text import show_diff
from meshloom.compiler.schema import SCHEMA_VERSION, Report

from ..rundir.find_runs import PLAN, REPORT, SPEC, check_directory
from .words import Syntax, Words, run_words

USAGE = """\
usage: meshloom diff RUN_A RUN_B [--json]

Shows what changed from one run to another: config, predicted step, memory,
collectives, layouts. Each is a run directory with spec.yaml and plan.json; if
both have report.json, which meshloom compile writes, the compiled programs are
compared too. A directory that meshloom inspect wrote has report.json alone.

  --json   print the differences as one JSON object
"""
LINE = "meshloom diff RUN_A RUN_B"
SYNTAX = Syntax(LINE, USAGE, {"--json": ""}, num_paths=range(2, 3))


def diff_command(args: Sequence[str]) -> int:
    """Runs the command line. Returns the exit code: 0, or 2 if there is nothing to compare."""
    return run_words(args, _diff, SYNTAX)


def _diff(words: Words) -> None:
    diff = diff_runs(*all_of(*(lambda path=path: read_run_for_diff(path) for path in words.paths)))
    if "--json" in words.flags:
        write_out(json.dumps(asdict(diff), indent=1))
    else:
        show_diff(diff, Console(off_terminal_width=200))


def read_run_for_diff(run_dir: Path) -> Run:
    """Returns the run that a directory holds. Raises ConfigError if it holds none, or its files are damaged."""
    check_directory(run_dir, "name a run directory, one with spec.yaml and plan.json")
    report = _report(run_dir / REPORT) if not _is_declared(run_dir) else None
    if report is not None and report.build is None:  # inspected, not compiled here
        return Run(str(run_dir), {}, {}, report)
    spec, plan, report = all_of(
        lambda: _spec(run_dir / SPEC),
        lambda: _json(run_dir / PLAN, PLAN_VERSION),
        lambda: _report(run_dir / REPORT),
    )
    return Run(str(run_dir), spec, plan, report)


def _is_declared(run_dir: Path) -> bool:
    return any((run_dir / name).exists() for name in (SPEC, PLAN))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        fix = "name a run directory: `meshloom train` and `meshloom compile` write it"
        raise ConfigError([Problem(str(path), "there is no such file, so this is not a run directory", fix)]) from None
    except OSError as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error.strerror}", "make it readable")]) from None
    except UnicodeDecodeError:
        raise _damaged(path, "it is not UTF-8 text") from None


def _damaged(path: Path, how: str) -> ConfigError:
    return ConfigError([Problem(str(path), f"is damaged: {how}", "make the run again")])


def _spec(path: Path) -> dict[str, Any]:
    try:
        spec = yaml.safe_load(_text(path))
        json.dumps(spec)  # a declaration has no values that JSON lacks, such as a date or a cycle
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise _damaged(path, "it is not valid YAML" + (f", line {mark.line + 1}" if mark else "")) from None
    except (ValueError, TypeError, RecursionError):
        raise _damaged(path, "it holds no declaration") from None
    if not isinstance(spec, dict):
        raise _damaged(path, "it holds no declaration")
    return spec


def _json(path: Path, version: int) -> dict[str, Any]:
    try:
        value = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise _damaged(path, f"it is not valid JSON, line {error.lineno}") from None
    except (ValueError, RecursionError):  # a number is too long, lists are too deep
        raise _damaged(path, "its JSON cannot be read") from None
    found = value.get("schema_version") if isinstance(value, dict) else None
    if found is None:
        raise _damaged(path, "it has no schema_version")
    if found != version:
        what = f"schema_version is {found}, and this version of meshloom reads {version}"
        raise ConfigError([Problem(str(path), what, "make the run again, or use the version that wrote it")])
    return value


def _report(path: Path) -> Report | None:
    if not path.exists():
        return None
    _json(path, SCHEMA_VERSION)
    try:
        return Report.model_validate_json(_text(path))
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        where = ".".join(map(str, first["loc"]))
        more = f", and {len(others)} more" if others else ""
        raise _damaged(path, f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}{more}") from None
