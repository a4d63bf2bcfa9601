"""Runs `meshloom guard [PROGRAM] --base BASE`: judges a step by an earlier one, for a pull request."""

import argparse
import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import WORSE, ConfigError, Problem, all_of, raise_if_any
from meshloom.compiler.core.key_paths import is_within
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.core.user_code import FLAG, VARIABLE, code_allowed_from, parse_allowed
from meshloom.compiler.core.visible import write_out
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.hydra_settings import search_path_override
from meshloom.compiler.declare.overrides import overridden_key, override
from meshloom.compiler.declare.problems import MISTAKES, as_config_error
from meshloom.compiler.driver import plan_run
from meshloom.compiler.report.diff import Run
from meshloom.compiler.report.explain import plan_as_json
from meshloom.compiler.report.guard import Tolerances, judge, problems_of_base, problems_of_rules
from meshloom.compiler.report.views.guard import as_markdown, show_verdict
from meshloom.compiler.spec.calibration_spec import GROUP

from ..api.inspected import ProgramRequest, inspect_path
from ..compile.artifact import FOLDER
from ..compile.compile_command import compile_step, prepare_compile
from ..core.files import parse_json, replace_text
from ..processes.devices import plan_without_devices
from ..rundir.folders import PLAN, REPORT, SPEC, RunFolder, read_json, read_report
from .app import parse_flags, request_of_flags
from .commands import COMMANDS
from .in_directory import run_in_directory
from .words import Words

GIVE = (
    "give a directory of `meshloom compile` or `meshloom inspect`, its report.json, what `meshloom explain --json` "
    "prints, or a program's text with target=NAME"
)
HYDRA_FLAGS = ("--config-dir", "--config-name")
_PERCENT = re.compile(r"(\d+(?:\.\d*)?)\s*%?")


def guard_command(words: Words) -> int:
    """Judges a step by its base. Returns the exit code: WORSE if it is worse than tolerated. Raises ConfigError where
    there is nothing to compare."""
    flags = words.flags
    tolerances, base = all_of(lambda: _tolerances(flags), lambda: _read_step(Path(flags["--base"]), words))
    words = _priced_as(base, words)
    head = _read_step(words.paths[0], words) if words.paths else _made(words, base)
    if isinstance(head, int):
        return head  # the compiler failed, and has said so
    if "--estimate" in flags:
        base, head = (each if each.report is None else _estimates(each) for each in (base, head))
    base, head = _alike(base, head, words)
    if "--across" not in flags:
        raise_if_any(problems_of_base(base, head))
    verdict = judge(base, head, tolerances)
    if "--markdown" in flags:
        try:
            replace_text(Path(flags["--markdown"]), as_markdown(verdict))
        except OSError as error:
            what = f"{flags['--markdown']} cannot be written: {error.strerror}"
            raise ConfigError([Problem("--markdown", what, "name another file")]) from None
    if "--json" in flags:
        write_out(verdict.model_dump_json(indent=1))
    else:
        show_verdict(verdict, Console(off_terminal_width=200))
    return WORSE if verdict.is_worse else 0


def _tolerances(flags: Mapping[str, str]) -> Tolerances:
    """Returns the tolerances from the flags: "2%", "2 %" and "2" are all 0.02. Raises ConfigError with all problems."""
    found: dict[str, float] = {}
    problems: list[Problem] = []
    for each in fields(Tolerances):
        text = flags.get(flag := f"--max-{'slower-part' if each.name == 'part' else each.name}")
        if text is None:
            continue
        if match := _PERCENT.fullmatch(text.strip()):
            found[each.name] = float(match[1]) / 100
        else:
            problems.append(Problem(flag, f"{text} is not a number of percent from 0", f"type {flag} 2%"))
    allowed = frozenset(filter(None, re.split(r"[,\s]+", flags.get("--allow", ""))))
    raise_if_any([*problems, *problems_of_rules(sorted(allowed), "--allow")])
    return Tolerances(**found, allowed=allowed)


def _priced_as(base: Run, words: Words) -> Words:
    """Returns the words with the calibration of the base, so that both steps have the same prices, unless they name
    one. A report says what its calibration is by, and not its factors: if it has one, it has to be found as before."""
    is_typed = any(is_within(overridden_key(text), GROUP) for text in words.overrides)
    if is_typed or (words.paths and not words.overrides):  # then the step has its own
        return words
    found = base.spec.get(GROUP) or (base.plan["target"].get(GROUP) if base.plan else None)
    if found is None and base.report is not None and base.report.target.calibration:
        return words
    chosen = [override(f"{GROUP}.{key}", value) for key, value in (found or {}).items()]
    return replace(words, overrides=(*words.overrides, f"{GROUP}=none", *chosen))


def _read_step(path: Path, words: Words) -> Run:
    """Returns the step that a path has: files that Meshloom wrote, or a program."""
    if path.is_dir():
        run = RunFolder(path)
        if (path / SPEC).is_file() and (path / PLAN).is_file():
            return Run(str(path), *all_of(lambda: run.spec, lambda: run.plan, lambda: run.report))
        if (path / REPORT).is_file():
            return Run(str(path), {}, {}, read_report(path / REPORT))
    if not path.exists():
        raise ConfigError([Problem(str(path), "there is no such file or directory", GIVE)])
    if path.is_file() and path.suffix == ".json":
        return _in_json(path)
    return _inspected(path, words)


def _in_json(path: Path) -> Run:
    """Returns the step that a report.json or a plan.json describes, whatever the file's name is."""
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError):
        content = None
    keys = content.keys() if isinstance(content, dict) else set[str]()
    if "compiled" in keys:
        return Run(str(path), {}, {}, read_report(path))
    if {"estimated", "arrays"} <= keys:
        return Run(str(path), {}, read_json(path), None)
    raise ConfigError([Problem(str(path), "this is not a report.json or a plan.json", GIVE)])


def _inspected(path: Path, words: Words) -> Run:
    """Returns the program at a path, as `meshloom inspect` reads it."""
    is_declared = (path / FOLDER).is_dir() and (path / SPEC).is_file()  # it has its target
    overrides = () if is_declared else search_path_override(words.overrides, words.flags.get("--config-dir"))
    asked = ProgramRequest(tuple(overrides), words.flags.get("--module"))
    return Run(str(path), {}, {}, inspect_path(path, asked).report)


def _alike(base: Run, head: Run, words: Words) -> tuple[Run, Run]:
    """Returns two steps of which the same is known: of a program's text and a compiled declaration, the texts of both;
    of an estimate and a compiled declaration, the estimates of both."""
    if _is_inspected(base) == _is_inspected(head):
        return base, head
    declared, other = (base, head) if _is_inspected(head) else (head, base)
    if declared.report and (Path(declared.name) / FOLDER).is_dir():
        read = _inspected(Path(declared.name), words)
        return (read, head) if declared is base else (base, read)
    what = f"is a declaration's, and {other.name} is a program without one: they do not name the same things"
    raise ConfigError([Problem(declared.name, what, "give two programs, or the artifacts of two declarations")])


def _is_inspected(run: Run) -> bool:
    return run.report is not None and isinstance(run.report.build, Unknown)


def _estimates(run: Run) -> Run:
    """Returns a run without its compiled program."""
    if not run.plan:
        raise ConfigError([Problem(run.name, "has no estimate: it has no plan.json", "leave out --estimate")])
    return replace(run, report=None)


def _made(words: Words, base: Run) -> Run | int:
    """Returns the run of the declaration that the words are: compiled as by `meshloom compile`, or only estimated if
    the base was. Returns the exit code instead if it cannot be compiled, which is then printed."""
    hydra = [f"{name}={value}" for name, value in words.flags.items() if name in HYDRA_FLAGS]
    try:
        with code_allowed_from(parse_allowed([words.flags.get(FLAG, ""), os.environ.get(VARIABLE, "")], FLAG)):
            flags, problems = parse_flags(COMMANDS["compile"], [*words.overrides, *hydra])
            raise_if_any(problems)
            request = request_of_flags(flags)
            if base.report is None or "--estimate" in words.flags:
                _, plan = read_spec(request, then=lambda spec: (plan_without_devices(spec.target), plan_run(spec)))
                written = json.loads(json.dumps([plan.spec.as_written(), plan_as_json(plan)]))
                return Run("this declaration", written[0], written[1], None)
            return _compiled(request, flags, words)
    except MISTAKES as error:
        raise as_config_error(error) from error


def _compiled(request: Request, flags: argparse.Namespace, words: Words) -> Run | int:
    """Compiles into a run directory that Hydra makes. What it prints on the way is not the command's result."""
    job, made = read_spec(request, then=prepare_compile), list[Path]()

    def run(run_dir: Path, model: str | None) -> int:
        compile_step(job, run_dir, request=request, model=model, console=Console(is_error=True))
        made.append(run_dir)
        return 0

    exit_code = run_in_directory(request, flags, run)
    return _read_step(made[0], words) if made else exit_code
