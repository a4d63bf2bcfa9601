"""A plan's train step, compiled or found among what was compiled before, and stored for the next time.

XLA's compiler cannot be interrupted. So a compile with a budget, `compile.timeout_seconds`, runs in a child process,
`meshloom compile` of the same declaration. The child leaves the compiled step in `compilation_cache`, where this
process finds it.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from meshloom.compiler.analysis.compiled_step import CompiledStep
from meshloom.compiler.config.spec import RunSpec
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import Problem
from meshloom.compiler.core.format import human_names, human_seconds
from meshloom.compiler.core.places import is_url
from meshloom.compiler.driver import compile_plan
from meshloom.compiler.plan import Plan
from meshloom.compiler.xla.aot import REMATERIALIZATION, Built, LoweredStep, compile_ahead
from meshloom.compiler.xla.fingerprint import Fingerprint
from meshloom.compiler.xla.stderr_capture import Captured, captured_stderr

from ..core.failures import RunFailed
from ..processes.process_log import say
from .abort_watchdog import read_abort_reason
from .artifact import FOLDER, Artifact, find_artifact, write_artifact
from .watched import COMPILE, LOWER, READ, Phases, watched

COMPILER_LOG = Path("logs/compiler.log")
NOT_OF_CHILD = ("hydra.run.dir=", "compile.timeout_seconds=", "overlap.search=")  # a child has its own


@dataclass(frozen=True)
class StoredStep:
    """A compiled step and where it is stored between runs; None: nowhere. overrides: that declare it."""

    step: CompiledStep
    artifact: Artifact | None
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class StepCompiler:
    """Compiles for the same devices. run_dir: what was compiled into it before is looked at, and the compiler's own
    words are logged there. known: what it has compiled, by fingerprint, so that no program is compiled twice."""

    devices: Sequence[Any]
    run_dir: Path
    console: Console
    known: dict[str, tuple[Built, Artifact | None]] = field(default_factory=dict)

    def compile(self, plan: Plan, overrides: tuple[str, ...], status: str) -> StoredStep:
        """overrides: that declare it. status: shown while it compiles. Raises ConfigError for compiler options that are
        wrong, JaxRuntimeError where the compiler fails, RunFailed where it aborted on this program before."""
        with Phases(self.console, status) as phases, captured_stderr(self.run_dir / COMPILER_LOG) as captured:
            phases.begin(LOWER)
            stored = _StoredCompile(self, plan.spec, overrides, phases, captured)
            step = compile_plan(plan, self.devices, compile_step=stored)
        return StoredStep(step, stored.artifact, overrides)


@dataclass
class _StoredCompile:
    """Finds what a lowered step was compiled to before, or compiles and stores it. artifact: found, or stored."""

    compiler: StepCompiler
    spec: RunSpec
    overrides: tuple[str, ...]
    phases: Phases
    captured: Captured
    artifact: Artifact | None = None

    def __call__(self, lowered: LoweredStep) -> Built:
        digest, known = lowered.fingerprint.digest, self.compiler.known
        if digest not in known:
            built = self._found_or_compiled(lowered)
            known[digest] = built, self.artifact
        built, self.artifact = known[digest]
        return built

    def _found_or_compiled(self, lowered: LoweredStep) -> Built:
        store = store_of(self.spec, lowered.fingerprint)
        for warning in unkept(self.spec):
            say(self.compiler.console, f"warning: {warning}")
        places = (self.compiler.run_dir / FOLDER, *([store] if store else []))
        by_child = self.spec.compile.timeout_seconds is not None and not find_artifact(lowered.fingerprint, places)
        if by_child:
            self.phases.begin(COMPILE)
            compile_in_child(self.spec, self.overrides, log=self.compiler.run_dir / COMPILER_LOG)
        with one_compiles(store):
            self.artifact = find_artifact(lowered.fingerprint, places)
            if self.artifact:
                return replace(self.artifact.built, cache="miss" if by_child else "hit")
            built = self._compiled(lowered, store and store.with_name(f"{store.name}.aborted"))
            if store is None:
                return built
            self.artifact = self._stored(store, lowered.fingerprint, built)
            return replace(built, cache="miss")

    def _compiled(self, lowered: LoweredStep, aborted: Path | None) -> Built:
        """aborted: where it is stored that the compiler ended a process over this program."""
        check_did_not_abort(aborted)
        built = watched(
            lambda: compile_ahead(lowered),
            log=self.compiler.run_dir / COMPILER_LOG,
            terminal=self.captured.terminal,
            phases=self.phases,
            kept_in=aborted,
        )
        self.phases.begin(READ)
        return replace(built, notes=tuple(line for line in self.captured.read() if REMATERIALIZATION in line))

    def _stored(self, store: Path, fingerprint: Fingerprint, built: Built) -> Artifact | None:
        """Saves the step; a store that cannot be written is a warning."""
        try:
            return write_artifact(store, fingerprint, built, self.overrides)
        except OSError as error:
            say(self.compiler.console, f"warning: not kept in {store.parent}: {error.strerror}")
            return None


@contextmanager
def one_compiles(store: Path | None) -> Iterator[None]:
    """Within the `with`, no other process compiles the same program: the second one waits, and finds what the first has
    stored. The system lets go of the lock when a process dies. A store that cannot be written locks nothing."""
    lock = None
    if store is not None:
        with suppress(OSError):
            store.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(store.with_name(f"{store.name}.lock"))
            lock.acquire()
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def check_did_not_abort(aborted: Path | None) -> None:
    """Raises RunFailed where this compiler ended a process over this program: it would do so again."""
    if aborted and (why := read_abort_reason(aborted)):
        fix = f"other options or another version of it may do; remove {aborted} to let it try again"
        raise RunFailed(Problem("the compiler", f"aborted on this program before: {why}", fix), exit_code=1)


def store_of(spec: RunSpec, fingerprint: Fingerprint) -> Path | None:
    """Returns the folder in which compiled programs are saved between runs; None if they are not."""
    folder = cache_folder(spec)
    return folder and folder / "artifacts" / fingerprint.digest


def cache_folder(spec: RunSpec) -> Path | None:
    """Returns `compilation_cache` as a folder; None where it is null, or a URL, which JAX's own cache alone can use."""
    place = spec.compilation_cache
    return None if place is None or is_url(place) else Path(place).absolute()


def unkept(spec: RunSpec) -> tuple[str, ...]:
    """Returns a warning where programs are to be saved behind a URL, which only a run of one process can."""
    if spec.compilation_cache is None or not is_url(spec.compilation_cache):
        return ()
    return (f"programs are not saved in {spec.compilation_cache}: a folder is needed, except to train in one process",)


def compile_in_child(spec: RunSpec, overrides: Sequence[str], *, log: Path) -> None:
    """Waits for a child that compiles the declaration. If its compile fails, this returns all the same: the caller then
    compiles for itself and gets the compiler's own error. log: the file that the child's output is appended to.

    Raises RunFailed, after it has ended the child, if the budget is spent.
    """
    seconds = spec.compile.timeout_seconds
    assert seconds is not None
    words = [word for word in overrides if not word.startswith(NOT_OF_CHILD)]
    with tempfile.TemporaryDirectory() as run_dir, log.open("ab") as printed:
        own = ("compile.timeout_seconds=null", "overlap.search=null", f"hydra.run.dir={run_dir}")
        command = [sys.executable, "-m", "meshloom", "compile", *words, *own]
        child = subprocess.Popen(command, stdout=printed, stderr=printed, start_new_session=True)
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            raise RunFailed(_too_long(spec, seconds), exit_code=1) from None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _too_long(spec: RunSpec, seconds: float) -> Problem:
    options = [f"{name}={value}" for name, value in spec.compiler_options.items()]
    at_work = [*options, *(f"overlap.flag_presets={name}" for name in spec.overlap.flag_presets)]
    what = f"the compiler is still at work after {human_seconds(seconds)}"
    with_what = f", with {human_names(at_work, most=6)}" if at_work else ", with its default options"
    fix = "leave out one of these options at a time, or set a longer compile.timeout_seconds"
    return Problem("compile.timeout_seconds", what + with_what, fix)
