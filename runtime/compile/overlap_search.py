"""`overlap.search`, run: candidates are compiled in turn until the bounds are reached, and the best is taken.

What was decided before is read back, as long as the program, the devices, the compiler, the options and the bounds are
the same. Each candidate is kept like any compiled step, so a search that was interrupted goes on where it was.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import jax
from pydantic import ValidationError

from meshloom import compiler as compiler_package
from meshloom.compiler.analysis.program_text import Unread
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.plan import Plan
from meshloom.compiler.report.build_report import (
    does_fit,
    does_fit_host,
    host_bytes,
    needed_bytes,
    used_devices_per_chip,
)
from meshloom.compiler.report.views.tried import line_of
from meshloom.compiler.schema import SearchReport, TriedReport
from meshloom.compiler.search.candidates import Candidate, best_of, find_candidates
from meshloom.compiler.xla.fingerprint import sha256

from ..core.files import replace_text
from ..processes.say import say
from .step_compiler import CompiledStep, StepCompiler


def search_overlap(plan: Plan, compiler: StepCompiler, overrides: tuple[str, ...]) -> tuple[CompiledStep, SearchReport]:
    """The step that is predicted to be the shortest, of those that meet the demand if any does, and the table of all
    that were compiled; where none fits, the one that was declared. Raises what compiling that one does."""
    bounds, max_exposed, begun = plan.spec.overlap.search, plan.spec.overlap.max_exposed, time.monotonic()
    assert bounds is not None
    candidates = find_candidates(plan, estimate_step(plan))
    num_most = min(len(candidates), bounds.max_candidates)

    def compiled(place: int) -> CompiledStep:
        one = candidates[place]
        status = f"compiling {place + 1} of at most {num_most}: {one.name}"
        return compiler.compile(plan_run(one.applied_to(plan.spec)), (*overrides, *one.overrides()), status)

    best = compiled(0)
    decision = _decision_file(plan, best, candidates)
    if decision and (decided := _read(decision)):
        say(compiler.console, f"decided before: {candidates[decided.chosen].name}, by {decision}")
        return compiled(decided.chosen) if decided.chosen else best, decided
    tried = [_tried(candidates[0], best)]
    say(compiler.console, line_of(tried[0]))
    for place in range(1, num_most):
        if time.monotonic() - begun > bounds.budget_seconds:
            break
        made, told = _attempt(candidates[place], partial(compiled, place))
        tried.append(told)
        say(compiler.console, line_of(told))
        if made and best_of(tried, max_exposed) == place:
            best = made
    chosen = best_of(tried, max_exposed) or 0
    report = SearchReport(
        tried=tuple(tried),
        chosen=chosen,
        num_left=len(candidates) - len(tried),
        overrides=candidates[chosen].overrides(),
        cache="miss" if decision else "off",
    )
    if decision:
        _write(decision, report, compiler)
    return best, report


def _attempt(one: Candidate, compile_it: Callable[[], CompiledStep]) -> tuple[CompiledStep | None, TriedReport]:
    """None where the compiler fails, or refuses the options."""
    start = time.perf_counter()
    try:
        made = compile_it()
    except (jax.errors.JaxRuntimeError, ConfigError) as error:
        why = error.problems[0].what if isinstance(error, ConfigError) else str(error).splitlines()[0]
        return None, _failed(one, why, time.perf_counter() - start)
    return made, _tried(one, made)


def _tried(one: Candidate, made: CompiledStep) -> TriedReport:
    plan, schedule = made.plan, made.schedule
    step = None if isinstance(schedule, Unread) else schedule.step
    needed, host, per_chip = (
        needed_bytes(plan, made.built, made.peak),
        host_bytes(made.built),
        used_devices_per_chip(plan),
    )
    return TriedReport(
        **dict(one.way),
        predicted_seconds=step and step.predicted_seconds,
        exposed_fraction=step and step.exposed_fraction,
        peak_bytes_per_chip=None if needed is None else needed * per_chip,
        host_bytes_per_chip=None if host is None else host * per_chip,
        fits=False if does_fit_host(plan, made.built) is False else does_fit(plan, made.built),
        compile_seconds=made.built.compile_seconds,
        why_not=schedule.why if isinstance(schedule, Unread) else None,
    )


def _failed(one: Candidate, why: str, seconds: float) -> TriedReport:
    figures = ("predicted_seconds", "exposed_fraction", "peak_bytes_per_chip", "host_bytes_per_chip", "fits")
    return TriedReport(**dict(one.way), **dict.fromkeys(figures), compile_seconds=seconds, why_not=why)


def _decision_file(plan: Plan, declared: CompiledStep, candidates: Sequence[Candidate]) -> Path | None:
    """By all that the choice depends on: the program, the candidates and their order, the bounds and the demand, the
    figures of the chip, the code that judges."""
    if plan.spec.compilation_cache is None:
        return None
    bounds = plan.spec.overlap.search
    rests_on = [
        declared.facts.fingerprint.digest,
        plan.spec.target.model_dump_json(),
        plan.target.compiler.model_dump_json(),
        json.dumps({name: asdict(one) for name, one in plan.target.flag_presets.items()}),
        bounds.model_dump_json() if bounds else "",
        str(plan.spec.overlap.max_exposed),
        *(" ".join(one.overrides()) for one in candidates),
        _code_of_compiler(),
    ]
    digest = sha256(json.dumps(rests_on))
    return Path(plan.spec.compilation_cache).expanduser().absolute() / "decisions" / f"{digest}.json"


@cache
def _code_of_compiler() -> str:
    """A hash of the source of our compiler: another one may judge otherwise."""
    folder = Path(str(compiler_package.__file__)).parent
    return sha256("".join(path.read_text() for path in sorted(folder.rglob("*.py"))))


def _read(decision: Path) -> SearchReport | None:
    """None where there is none, or none of this version."""
    try:
        return SearchReport.model_validate_json(decision.read_bytes()).model_copy(update={"cache": "hit"})
    except (OSError, ValidationError):
        return None


def _write(decision: Path, report: SearchReport, compiler: StepCompiler) -> None:
    try:
        decision.parent.mkdir(parents=True, exist_ok=True)
        replace_text(decision, report.model_dump_json(indent=1) + "\n")
    except OSError as error:
        say(compiler.console, f"warning: what was decided is not kept in {decision.parent}: {error.strerror}")
