"""A plan's train step, compiled or found among what was compiled before, with what its schedule says."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from meshloom.compiler.analysis.program_memory import PeakMemory
from meshloom.compiler.analysis.program_text import Unread, read_text
from meshloom.compiler.analysis.schedule_analysis import ScheduleAnalysis
from meshloom.compiler.config.spec import RunSpec
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import Problem
from meshloom.compiler.estimate.estimate import StepEstimate, estimate_step
from meshloom.compiler.plan import Plan
from meshloom.compiler.report.build_report import BuildFacts
from meshloom.compiler.xla.aot import REMATERIALIZATION, STEP, Built, compile_ahead
from meshloom.compiler.xla.fingerprint import Fingerprint, fingerprint_of
from meshloom.compiler.xla.programs import PROGRAMS, Programs, lower
from meshloom.compiler.xla.stderr_capture import captured_stderr

from ..core.failures import RunFailed
from ..processes.say import say
from .abort_watchdog import read_last_words
from .artifact import FOLDER, Artifact, find_artifact, write_artifact
from .watched import watched

COMPILER_LOG = Path("logs/compiler.log")


@dataclass(frozen=True)
class CompiledStep:
    """facts.cache says whether it was compiled before. artifact: where it is kept between runs; None: nowhere."""

    plan: Plan
    built: Built
    facts: BuildFacts
    artifact: Artifact | None
    estimate: StepEstimate
    schedule: ScheduleAnalysis | Unread
    peak: PeakMemory | Unread


@dataclass(frozen=True)
class StepCompiler:
    """Compiles for the same devices. run_dir: what was compiled into it before is looked at, and the compiler's own
    words are logged there. model: what the declaration calls its model, where it has a name."""

    devices: Sequence[Any]
    run_dir: Path
    model: str | None
    console: Console

    def compile(self, plan: Plan, overrides: tuple[str, ...], status: str) -> CompiledStep:
        """overrides: that declare it. status: shown while it compiles. Raises ConfigError for compiler options that are
        wrong, JaxRuntimeError where the compiler fails, RunFailed where it aborted on this program before."""
        with captured_stderr(self.run_dir / COMPILER_LOG) as captured:
            mesh = plan.mesh.of_devices(self.devices)
            start = time.perf_counter()
            lowered = lower_for_target(plan, mesh)
            lower_seconds = time.perf_counter() - start
            fingerprint = fingerprint_of(plan, lowered, mesh)
            store = store_of(plan.spec, fingerprint)
            found = find_artifact(fingerprint, (self.run_dir / FOLDER, *([store] if store else [])))
            aborted = store and store.with_name(f"{store.name}.aborted")
            built = found.built if found else self._compiled(lowered, status, captured.terminal, aborted)
        if not found:
            built = replace(built, notes=tuple(line for line in captured.lines if REMATERIALIZATION in line))
        cache = "hit" if found else "miss" if store else "off"
        facts = BuildFacts(fingerprint, lower_seconds, cache, overrides, lowered.options_left_out, self.model)
        estimate = estimate_step(plan)
        schedule, peak = read_text(built.text, plan, estimate.communication)
        kept = found or (self._kept(store, fingerprint, built, overrides) if store else None)
        return CompiledStep(plan, built, facts, kept, estimate, schedule, peak)

    def _kept(self, store: Path, *artifact: Any) -> Artifact | None:
        """A store that cannot be written is a warning."""
        try:
            return write_artifact(store, *artifact)
        except OSError as error:
            say(self.console, f"warning: not kept in {store.parent}: {error.strerror}")
            return None

    def _compiled(self, lowered: Programs, status: str, terminal: int, aborted: Path | None) -> Built:
        """aborted: where it is kept that the compiler ended a process over this program."""
        check_did_not_abort(aborted)
        return watched(
            lambda: compile_ahead(lowered),
            log=self.run_dir / COMPILER_LOG,
            terminal=terminal,
            status=status,
            kept_in=aborted,
            console=self.console,
        )


def check_did_not_abort(aborted: Path | None) -> None:
    """Raise RunFailed where this compiler ended a process over this program: it would do so again."""
    if aborted and (why := read_last_words(aborted)):
        fix = f"other options or another version of it may do; remove {aborted} to let it try again"
        raise RunFailed(Problem("the compiler", f"aborted on this program before: {why}", fix), exit_code=1)


def lower_for_target(plan: Plan, mesh: Mesh) -> Programs:
    """All programs; for chips that are not there the train step alone: where it runs, the others take seconds."""
    return lower(plan, mesh, PROGRAMS if plan.target.is_attached else (STEP,))


def store_of(spec: RunSpec, fingerprint: Fingerprint) -> Path | None:
    """Where what is compiled is kept between runs; None where nothing is."""
    if spec.compilation_cache is None:
        return None
    return Path(spec.compilation_cache).expanduser().absolute() / "artifacts" / fingerprint.digest
