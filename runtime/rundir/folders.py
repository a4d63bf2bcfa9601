"""Opens the directory of a run: each property reads one file when it is first used.

    RunFolder(path).record     run.json: the command, its beginning and its end
    RunFolder(path).spec       spec.yaml: the resolved declaration
    RunFolder(path).plan       plan.json
    RunFolder(path).report     report.json; None where nothing was compiled
    RunFolder(path).steps      metrics.jsonl, line by line
    RunFolder(path).checkpoints    the place of its checkpoints, which may be elsewhere

Reading a missing or damaged file raises ConfigError; `declared` is for readers that can do without a declaration.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ValidationError

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.known import KNOWN
from meshloom.compiler.schema import SCHEMA_VERSION, Report

from ..core.files import parse_json
from .run_record import RECORD_FILE, RunRecord

METRICS, SPEC, PLAN, REPORT = "metrics.jsonl", "spec.yaml", "plan.json", "report.json"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class RunFolder:
    """The directory of a run."""

    path: Path

    @classmethod
    def around(cls, place: Path) -> Self:
        """Returns the run whose directory is at a place, or whose checkpoints are: RUN/checkpoints,
        RUN/checkpoints/STEP."""
        around = (folder for folder in (place, place.parent, place.parent.parent) if (folder / SPEC).is_file())
        return cls(next(around, place))

    @property
    def is_declared(self) -> bool:
        """Returns True for a run of a declaration; what `meshloom inspect` writes has none."""
        return any((self.path / name).exists() for name in (SPEC, PLAN))

    @cached_property
    def record(self) -> RunRecord | None:
        """Returns the record of the run; None if there is none that can be read, as in an older directory."""
        try:
            return RunRecord.model_validate_json((self.path / RECORD_FILE).read_bytes())
        except (OSError, ValidationError):
            return None

    @cached_property
    def spec(self) -> Mapping[str, Any]:
        """Returns the declaration as it was written, perhaps by an older version."""
        path = self.path / SPEC
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

    @cached_property
    def declared(self) -> Mapping[str, Any]:
        """Returns the declaration; {} if it cannot be read."""
        try:
            return self.spec
        except ConfigError:
            return {}

    @cached_property
    def plan(self) -> Mapping[str, Any]:
        """Returns the plan, of this version of its schema."""
        return _json(self.path / PLAN)

    @cached_property
    def report(self) -> Report | None:
        """Returns the report of the compiled step, of this version of its schema; None without one."""
        path = self.path / REPORT
        if not path.exists():
            return None
        _json(path)
        try:
            return Report.model_validate_json(_text(path))
        except ValidationError as error:
            first, *others = error.errors(include_url=False)
            where = ".".join(str(part) for part in first["loc"] if part != KNOWN)
            more = f", and {len(others)} more" if others else ""
            raise _damaged(path, f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}{more}") from None

    @property
    def num_steps(self) -> int | None:
        """Returns num_steps of the declaration, which is at its top level; parsing the whole YAML would take long."""
        try:
            found = re.search(r"^num_steps: (\d+)$", (self.path / SPEC).read_text(encoding="utf-8"), re.MULTILINE)
        except (OSError, UnicodeDecodeError):
            return None
        return int(found[1]) if found else None

    @property
    def predicted_seconds(self) -> float | None:
        """Returns the predicted seconds of a step in report.json, of any version; None if it does not say."""
        try:
            seconds = parse_json((self.path / REPORT).read_bytes())["step"]["predicted_seconds"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return seconds if isinstance(seconds, float) else None

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Returns the steps in metrics.jsonl so far."""
        path = self.path / METRICS
        return [*steps_in(path.read_bytes())] if path.exists() else []

    @property
    def checkpoints(self) -> str:
        """Returns the place of the checkpoints, which the run may have declared elsewhere."""
        checkpoint = self.declared.get("checkpoint")
        elsewhere = checkpoint.get("directory") if isinstance(checkpoint, dict) else None
        return str(elsewhere or self.path / CHECKPOINTS)


def steps_in(content: bytes) -> Iterator[dict[str, Any]]:
    """Yields the steps in lines of metrics.jsonl, without cut-off lines: one that is being written, or the first."""
    for line in content.splitlines():
        try:
            value = parse_json(line)
        except ValueError:
            continue
        if isinstance(value, dict) and type(value.get("step")) is int:
            yield value


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


def _json(path: Path) -> dict[str, Any]:
    """Returns the content of plan.json or report.json, which have one version."""
    try:
        value = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise _damaged(path, f"it is not valid JSON, line {error.lineno}") from None
    except (ValueError, RecursionError):  # a number is too long, lists are too deep
        raise _damaged(path, "its JSON cannot be read") from None
    found = value.get("schema_version") if isinstance(value, dict) else None
    if found is None:
        raise _damaged(path, "it has no schema_version")
    if found != SCHEMA_VERSION:
        what = f"schema_version is {found}, and this version of meshloom reads {SCHEMA_VERSION}"
        raise ConfigError([Problem(str(path), what, "make the run again, or use the version that wrote it")])
    return value
