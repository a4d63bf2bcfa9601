"""Compiles the train step of a plan, or finds it among what was compiled before, and stores it for the next time.

`overlap.search` compiles candidates in turn until a bound is reached, and takes the best. A saved decision is used as
long as the program, the devices, the compiler, the options and the bounds are the same. Each candidate is stored like
any compiled step, so an interrupted search continues where it was.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

import jax
from pydantic import ValidationError

from meshloom import compiler as compiler_package
from meshloom.compiler.analysis.compiled_step import CompiledStep
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.known import Reasoned
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import compile_plan, plan_run
from meshloom.compiler.estimate.estimate import estimate_declared
from meshloom.compiler.figures import StepFigures, no_figures
from meshloom.compiler.plan import Plan
from meshloom.compiler.report.views.facts import line_of
from meshloom.compiler.schema import SearchReport, TriedReport
from meshloom.compiler.search.candidates import (
    OverlapCandidate,
    applied,
    best_of,
    could_gain,
    overlap_candidates,
)
from meshloom.compiler.spec.overlap_spec import OverlapSpec
from meshloom.compiler.xla.aot import REMATERIALIZATION, Built, LoweredStep, compile_ahead
from meshloom.compiler.xla.programs import sha256

from ..core.files import replace_text
from ..core.stderr_capture import Captured, captured_stderr
from ..processes.process_log import announce
from .artifact import (
    FOLDER,
    Artifact,
    cache_folder,
    check_did_not_abort,
    find_artifact,
    one_compiles,
    store_of,
    unkept,
    write_artifact,
)
from .watched import COMPILE, LOWER, READ, Phases, compile_in_child, watched

COMPILER_LOG = Path("logs/compiler.log")
NOT_BY_CHILD = (
    "the compile with compile.timeout_seconds failed or kept nothing in compilation_cache; compiling without it"
)
Untried = Literal["num_equal", "num_ruled_out", "num_untried"]  # reasons why a candidate has no row, as in SearchReport


@dataclass(frozen=True)
class StoredStep:
    """A compiled step. artifact: its copy that is stored between runs; None if there is none. overrides: the overrides
    that declare it."""

    step: CompiledStep
    artifact: Artifact | None
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class StepCompiler:
    """Compiles steps for the same devices.

    run_dir: a folder whose artifact is looked at first, and which takes the compiler's log. words: arguments of
    `meshloom compile` before the overrides. known: compiled programs by fingerprint, so that none is compiled twice.
    """

    devices: Sequence[Any]
    run_dir: Path
    console: Console
    words: tuple[str, ...] = ()
    known: dict[str, tuple[Built, Artifact | None]] = field(default_factory=dict)

    def compile(self, plan: Plan[RunSpec], overrides: tuple[str, ...], status: str) -> StoredStep:
        """Returns the compiled step of a plan. overrides: the overrides that declare it. status: a text to show
        meanwhile.

        Raises ConfigError for wrong compiler options, JaxRuntimeError if the compiler fails, RunFailed if it aborted on
        this program before.
        """
        with Phases(self.console, status) as phases, captured_stderr(self.run_dir / COMPILER_LOG) as captured:
            phases.begin(LOWER)
            stored = _StoredCompile(self, plan.spec, overrides, phases, captured)
            step = compile_plan(plan, self.devices, compile_step=stored)
        return StoredStep(step, stored.artifact, overrides)


@dataclass
class _StoredCompile:
    """Finds a lowered step among stored ones, or compiles and stores it. artifact: the one that was found or stored."""

    compiler: StepCompiler
    spec: RunSpec
    overrides: tuple[str, ...]
    phases: Phases
    captured: Captured
    artifact: Artifact | None = None

    def __call__(self, lowered: LoweredStep) -> Built:
        digest, known = lowered.fingerprint.digest, self.compiler.known
        if digest not in known:
            known[digest] = self._found_or_compiled(lowered)
        built, self.artifact = known[digest]
        return built

    def _found_or_compiled(self, lowered: LoweredStep) -> tuple[Built, Artifact | None]:
        log, store = self.compiler.run_dir / COMPILER_LOG, store_of(self.spec.compilation_cache, lowered.fingerprint)
        for warning in unkept(self.spec.compilation_cache):
            announce(self.compiler.console, f"warning: {warning}")
        places = (self.compiler.run_dir / FOLDER, *([store] if store else []))
        seconds = self.spec.compile.timeout_seconds
        by_child = seconds is not None and not find_artifact(lowered.fingerprint, places)
        if by_child and seconds is not None:
            self.phases.begin(COMPILE)
            words = (*self.compiler.words, *self.overrides)
            options = [f"{name}={value}" for name, value in self.spec.compiler_options.items()]
            at_work = [*options, *(f"overlap.flag_presets={name}" for name in self.spec.overlap.flag_presets)]
            compile_in_child(words, seconds=seconds, at_work=at_work, log=log)
        with one_compiles(store):
            if found := find_artifact(lowered.fingerprint, places):
                return replace(found.built, cache="miss" if by_child else "hit"), found
            check_did_not_abort(aborted := store and store.with_name(f"{store.name}.aborted"))
            if by_child:
                announce(self.compiler.console, f"warning: {NOT_BY_CHILD}")
            terminal, phases = self.captured.terminal, self.phases
            built = watched(lambda: compile_ahead(lowered), log=log, terminal=terminal, phases=phases, kept_in=aborted)
            phases.begin(READ)
            built = replace(built, notes=tuple(line for line in self.captured.read() if REMATERIALIZATION in line))
            if store is None:
                return built, None
            artifact = None
            try:
                artifact = write_artifact(store, lowered.fingerprint, built, self.overrides)
            except OSError as error:
                announce(self.compiler.console, f"warning: not kept in {store.parent}: {error.strerror}")
            return replace(built, cache="miss"), artifact


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
            *(
                json.dumps({name: asdict(one) for name, one in table.items()})
                for table in (plan.target.flag_presets, plan.target.option_effects)
            ),
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
