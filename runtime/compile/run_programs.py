"""The programs of a run: loaded where they were compiled before, else compiled. Several processes do it alike.

A process that loads its programs would be minutes ahead of one that compiles them. Collectives of simulated devices
give up after 30 s without the others, and compilers for GPUs divide the tuning of kernels among all processes. So all
load or all compile, and none goes on before all have their programs. JAX's persistent cache cannot serve them: process
0 alone writes it, which leaves hosts with disks of their own without, and its keys differ between processes on CPU.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh

from meshloom.compiler.analysis.lint import find_gathered_whole
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import Problem
from meshloom.compiler.plan import Plan
from meshloom.compiler.xla.aot import REMATERIALIZATION, built_of
from meshloom.compiler.xla.fingerprint import Fingerprint, fingerprint_of
from meshloom.compiler.xla.programs import Programs, build, lower
from meshloom.compiler.xla.stderr_capture import captured_stderr

from ..processes.agreement import check_same_program
from ..processes.distributed import COMPILED, Processes, together
from ..processes.process_log import say
from ..processes.stop import StopRequest
from .artifact import Artifact, find_artifact, load_programs, write_artifact
from .compile_cache import cached_compilation
from .memory_check import check_program_memory
from .step_compiler import store_of, unkept
from .watched import LOWER, Phases, compiler_errors_reported, watched

STATUS = "compiling the train step"
Compile = Callable[[Programs], Programs]


@dataclass(frozen=True)
class WatchedBuild:
    """Compiles with the compiler's words kept off the terminal. log: where they go. lines: what they were."""

    log: Path
    phases: Phases
    lines: list[str] = field(default_factory=list)

    def __call__(self, lowered: Programs) -> Programs:
        with compiler_errors_reported(self.log), captured_stderr(self.log) as captured:
            programs = watched(
                lambda: build(lowered),
                log=self.log,
                terminal=captured.terminal,
                phases=self.phases,
                kept_in=None,
            )
        self.lines.extend(captured.lines)
        return programs


@dataclass(frozen=True)
class Precompiled:
    """An artifact, and the programs that it is of."""

    artifact: Artifact
    lowered: Programs


@dataclass(frozen=True)
class Ready:
    """Programs that can run. how: they came to be, in a line."""

    programs: Programs
    how: str
    warnings: tuple[str, ...] = ()


def make_programs(
    plan: Plan,
    precompiled: Precompiled | None,
    run_dir: Path,
    *,
    stop: StopRequest,
    console: Console,
    processes: Processes,
) -> Programs:
    """Returns the compiled programs of a run, in all processes at once. Raises RunFailed where they need more memory
    than there is; Ctrl-C in a process that is alone ends it."""
    with stop.waiting_for("the compiler", can_be_left=True), Phases(console, STATUS) as phases:
        compile_ = WatchedBuild(compiler_log(run_dir, processes), phases)
        phases.begin(LOWER)
        mesh = mesh_of(plan)
        lowered = precompiled.lowered if precompiled else lower(plan, mesh)
        check_same_program(lowered, processes)
        ready = _ready(plan, precompiled, lowered, mesh, compile_, processes)
    say(console, ready.how)
    for warning in ready.warnings:
        say(console, f"warning: {warning}")
    for finding in find_gathered_whole([line for line in compile_.lines if REMATERIALIZATION in line]):
        say(console, Problem(finding.where, finding.what, f"{finding.fix} (see {compile_.log})").as_warning())
    return ready.programs


def compiler_log(run_dir: Path, processes: Processes) -> Path:
    """Returns the log file of this process's compiler."""
    return run_dir / "logs" / ("compiler.log" if processes.is_first else f"compiler-{processes.index}.log")


def mesh_of(plan: Plan) -> Mesh:
    """Returns the plan's mesh of the devices that are there."""
    return plan.mesh.of_devices(jax.devices()[: plan.target.num_devices])


def _ready(
    plan: Plan, precompiled: Precompiled | None, lowered: Programs, mesh: Mesh, compile_: Compile, processes: Processes
) -> Ready:
    start = time.perf_counter()
    if precompiled:
        artifact = precompiled.artifact
        programs = meet(plan, lambda: load_programs(artifact, lowered, mesh, compile_), processes)
        loaded, seconds = ", ".join(artifact.built.executables), time.perf_counter() - start
        return Ready(programs, f"compiled before: {loaded} loaded from {artifact.place}, ready in {seconds:.1f} s")
    if processes.count > 1:
        return compile_together(plan, lowered, mesh, compile_, processes)
    with cached_compilation(plan.spec.compilation_cache) as cache:
        programs = meet(plan, lambda: compile_(lowered), processes)
    return Ready(programs, cache.describe(time.perf_counter() - start), tuple(cache.warnings))


def meet(plan: Plan, make: Callable[[], Programs], processes: Processes) -> Programs:
    """Returns what `make` does, once all processes have theirs. Raises RunFailed in all of them where one cannot be
    compiled, or lacks the memory to run it."""

    def made() -> Programs:
        programs = make()
        check_program_memory(plan, programs.train, processes)
        return programs

    return together(COMPILED, made, processes=processes, timeout_seconds=plan.spec.distributed.compile_timeout_seconds)


def compile_together(plan: Plan, lowered: Programs, mesh: Mesh, compile_: Compile, processes: Processes) -> Ready:
    """Returns programs that all processes load, if each has saved its own, or that all compile and save."""
    start = time.perf_counter()
    fingerprint = fingerprint_of(plan, lowered, mesh)
    place = store_of(plan.spec, fingerprint)
    not_kept = unkept(plan.spec)
    kept = find_artifact(fingerprint, [place]) if place else None
    have = processes.gather("kept programs", ",".join(kept.built.executables) if kept else "")
    if kept and all(have):
        programs = meet(plan, lambda: load_programs(kept, lowered, mesh, compile_), processes)
        return Ready(programs, f"compiled before: loaded in {time.perf_counter() - start:.1f} s")
    with cached_compilation(None):  # JAX's own would serve process 0 alone
        programs = meet(plan, lambda: compile_(lowered), processes)
    seconds = time.perf_counter() - start
    keep = partial(_keep, place, fingerprint, programs, seconds)
    warnings = keep() if processes.is_first else ()
    processes.gather("programs of process 0", "")  # which the others find, where they share its disk
    warnings = warnings if processes.is_first else keep()
    return Ready(programs, f"compiled in {seconds:.1f} s", (*warnings, *not_kept))


def _keep(place: Path | None, fingerprint: Fingerprint, programs: Programs, seconds: float) -> tuple[str, ...]:
    """Puts the programs where the next start finds them, unless they are there. Returns a warning where that fails."""
    if place is None or find_artifact(fingerprint, [place]):
        return ()
    try:
        write_artifact(place, fingerprint, built_of(programs, seconds), ())
    except OSError as error:
        if not find_artifact(fingerprint, [place]):  # else another process of this host was faster
            return (f"the programs cannot be kept in {place.parent}: {error.strerror}",)
    return ()
