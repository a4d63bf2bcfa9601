"""Compiles the train step of a plan, or finds it among what was compiled before, and stores it for the next time."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshloom.compiler.analysis.compiled_step import CompiledStep
from meshloom.compiler.core.console import Console
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import compile_plan
from meshloom.compiler.plan import Plan
from meshloom.compiler.xla.aot import REMATERIALIZATION, Built, LoweredStep, compile_ahead

from ..core.stderr_capture import Captured, captured_stderr
from ..processes.process_log import announce
from .artifact import FOLDER, Artifact, find_artifact, write_artifact
from .compile_cache import check_did_not_abort, one_compiles, store_of, unkept
from .watched import COMPILE, LOWER, READ, Phases, compile_in_child, watched

COMPILER_LOG = Path("logs/compiler.log")
NOT_BY_CHILD = (
    "the compile with compile.timeout_seconds failed or kept nothing in compilation_cache; compiling without it"
)


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
