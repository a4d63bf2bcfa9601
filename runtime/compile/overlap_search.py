"""Runs `overlap.search`: compiles candidates in turn until a bound is reached, and takes the best.

A saved decision is used as long as the program, the devices, the compiler, the options and the bounds are the same.
Each candidate is stored like any compiled step, so an interrupted search continues where it was.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Literal, get_args

import jax
from pydantic import ValidationError

from meshloom import compiler as compiler_package
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.known import Reasoned
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_declared
from meshloom.compiler.figures import StepFigures, no_figures
from meshloom.compiler.plan import Plan
from meshloom.compiler.report.views.facts import line_of
from meshloom.compiler.schema import SearchReport, TriedReport
from meshloom.compiler.search.overlap import (
    OverlapCandidate,
    applied,
    best_of,
    could_gain,
    overlap_candidates,
)
from meshloom.compiler.spec.overlap_spec import OverlapSpec
from meshloom.compiler.xla.fingerprint import sha256

from ..core.files import replace_text
from ..processes.process_log import announce
from .compile_cache import cache_folder
from .step_compiler import StepCompiler, StoredStep

Untried = Literal["num_equal", "num_ruled_out", "num_untried"]  # reasons why a candidate has no row, as in SearchReport


class Decision(Reasoned):
    """The file of a decision. Its reasons are those of figures that are not known."""

    report: SearchReport


def search_overlap(
    plan: Plan[RunSpec], compiler: StepCompiler, overrides: tuple[str, ...]
) -> tuple[StoredStep, SearchReport]:
    """Returns the step with the shortest prediction and the table of all compiled candidates.

    Steps that meet `overlap.max_exposed` come first; if no step fits, the declared one is returned. Raises the errors
    of compiling the declared step.
    """
    bounds = plan.spec.overlap.search
    assert bounds is not None
    candidates = overlap_candidates(plan, estimate_declared(plan))
    num_most, begun = min(len(candidates), bounds.max_candidates), time.monotonic()

    def compiled(one: OverlapCandidate, number: int) -> StoredStep:
        status = f"compiling {number} of at most {num_most}: {one.way.name}"
        return compiler.compile(plan_run(applied(one.way, plan.spec)), (*overrides, *one.overrides), status)

    declared = compiled(candidates[0], 1)
    folder, decision = cache_folder(plan.spec.compilation_cache), None
    if folder:  # a decision is named by everything that it depends on
        rests_on = [
            declared.step.lowered.fingerprint.digest,
            plan.spec.target.model_dump_json(),
            plan.target.compiler.model_dump_json(),
            json.dumps({name: asdict(one) for name, one in plan.target.flag_presets.items()}),
            bounds.model_dump_json(),
            str(plan.spec.overlap.max_exposed),
            *(" ".join(one.overrides) for one in candidates),
            _code_of_compiler(),
        ]
        decision = folder / "decisions" / f"{sha256(json.dumps(rests_on))}.json"
    if decision and (decided := _read(decision)):
        winner = next(one for one in candidates if one.overrides == decided.overrides)
        announce(compiler.console, f"decided before: {winner.way.name}, by {decision}")
        return compiled(winner, 1) if decided.chosen else declared, decided
    best, report = _try_in_turn(plan.spec.overlap, candidates, declared, compiled, compiler.console, begun)
    report = report.model_copy(update={"cache": "miss" if decision else "off"})
    if decision:
        try:
            decision.parent.mkdir(parents=True, exist_ok=True)
            replace_text(decision, Decision(report=report).model_dump_json(indent=1) + "\n")
        except OSError as error:
            announce(
                compiler.console, f"warning: the decision could not be saved in {decision.parent}: {error.strerror}"
            )
    return best, report


def _try_in_turn(
    overlap: OverlapSpec,
    candidates: Sequence[OverlapCandidate],
    declared: StoredStep,
    compiled: Callable[[OverlapCandidate, int], StoredStep],
    console: Console,
    begun: float,
) -> tuple[StoredStep, SearchReport]:
    """Returns the best step and the result of each candidate.

    declared: the step of the first candidate. begun: the time of `time.monotonic` before that step was compiled.
    """
    bounds, max_exposed = overlap.search, overlap.max_exposed
    assert bounds is not None
    tried, programs = list[TriedReport](), {declared.step.lowered.fingerprint.digest}

    def best() -> int | None:
        return best_of([each.figures for each in tried], max_exposed)

    def add(one: OverlapCandidate, found: StepFigures, seconds: float) -> bool:
        """Adds and shows the result of a candidate. Returns True if it is the best so far."""
        tried.append(TriedReport(**dict(one.way), figures=found, compile_seconds=seconds))
        announce(console, line_of(tried[-1]))
        return best() == len(tried) - 1

    winner, chosen, bound, rest = candidates[0], declared, None, Counter[Untried]()
    add(winner, declared.step.figures.alone(), declared.step.built.compile_seconds)
    for one in candidates[1:]:
        if not could_gain(one.way, tried, bounds.min_gain, max_exposed):
            rest["num_ruled_out"] += 1
            continue
        if len(tried) >= bounds.max_candidates:
            bound = bound or f"max_candidates={bounds.max_candidates}"
        elif time.monotonic() - begun > bounds.budget_seconds:
            bound = bound or f"budget_seconds={bounds.budget_seconds:g}"
        if bound:
            rest["num_untried"] += 1
            continue
        made, found, seconds = _attempt(partial(compiled, one, len(tried) + 1))
        if made and made.step.lowered.fingerprint.digest in programs:
            rest["num_equal"] += 1
            continue
        if made:
            programs.add(made.step.lowered.fingerprint.digest)
        if add(one, found, seconds) and made:
            winner, chosen = one, made
    counts = {name: rest[name] for name in get_args(Untried)}
    return chosen, SearchReport(
        tried=tuple(tried), chosen=best() or 0, **counts, bound=bound, overrides=winner.overrides, cache="off"
    )


def _attempt(compile_it: Callable[[], StoredStep]) -> tuple[StoredStep | None, StepFigures, float]:
    """Returns a compiled candidate, its figures and the seconds of its compile; None as the candidate if the
    compiler fails or refuses the options."""
    start = time.perf_counter()
    try:
        made = compile_it()
    except (jax.errors.JaxRuntimeError, ConfigError) as error:
        why = error.problems[0].what if isinstance(error, ConfigError) else str(error).splitlines()[0]
        return None, no_figures(why), time.perf_counter() - start
    return made, made.step.figures.alone(), made.step.built.compile_seconds


@cache
def _code_of_compiler() -> str:
    """Returns a hash of the source of our compiler: other code may decide differently."""
    folder = Path(str(compiler_package.__file__)).parent
    return sha256("".join(path.read_text() for path in sorted(folder.rglob("*.py"))))


def _read(decision: Path) -> SearchReport | None:
    """Returns the saved decision; None if there is none, or another version wrote it."""
    try:
        return Decision.model_validate_json(decision.read_bytes()).report.model_copy(update={"cache": "hit"})
    except (OSError, ValidationError):
        return None
