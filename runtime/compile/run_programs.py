"""Makes the programs of a run, alike in all of its processes: loads what was compiled before, or compiles, and checks
that they fit in memory.

A process that loads its programs would be minutes ahead of one that compiles them. Collectives of simulated devices
give up after 30 s without the others, and compilers for GPUs divide the tuning of kernels among all processes. So all
load or all compile, and none goes on before all have their programs. JAX's persistent cache cannot serve them: process
0 alone writes it, which leaves hosts with disks of their own without, and its keys differ between processes on CPU.

Memory is checked before anything is allocated, since the kernel kills a process without a message: before the compile
for the arrays of the plan, after it for what the compiler made. Simulated devices share the memory of the host.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from meshloom.compiler.analysis.lint import find_gathered_whole
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import DOES_NOT_FIT, Problem
from meshloom.compiler.core.float_types import num_bits
from meshloom.compiler.core.format import counted, human_bytes
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.plan import Plan
from meshloom.compiler.spec.step_spec import PrecisionSpec
from meshloom.compiler.target.target import TargetPlan
from meshloom.compiler.xla.aot import REMATERIALIZATION, built_of, memory_of
from meshloom.compiler.xla.programs import Fingerprint, Programs, build, fingerprint_of, lower

from ..core.failures import RunFailed
from ..core.host_memory import available_bytes
from ..core.stderr_capture import captured_stderr
from ..processes.agreement import check_same_program
from ..processes.distributed import COMPILED, Processes, together
from ..processes.process_log import announce
from ..processes.stop import StopRequest
from .artifact import Artifact, cached_compilation, find_artifact, load_programs, store_of, unkept, write_artifact
from .watched import LOWER, Phases, compiler_errors_reported, watched

STATUS = "compiling the train step"
Compile = Callable[[Programs], Programs]


@dataclass(frozen=True)
class WatchedBuild:
    """Compiles with the compiler's output off the terminal. log: the file that takes it. lines: what was printed."""

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
    """An artifact, and the lowered programs that it was compiled from."""

    artifact: Artifact
    lowered: Programs


@dataclass(frozen=True)
class Ready:
    """Programs that can run. how: a line that says whether they were compiled or loaded."""

    programs: Programs
    how: str
    warnings: tuple[str, ...] = ()


def make_programs(
    plan: Plan[RunSpec],
    precompiled: Precompiled | None,
    run_dir: Path,
    *,
    stop: StopRequest,
    console: Console,
    processes: Processes,
    drawn_paths: Collection[str] | None = None,
) -> Programs:
    """Returns the compiled programs of a run, in all processes at once. Raises RunFailed if they need more memory than
    there is. Ctrl-C ends a process that is alone.

    drawn_paths: the parameters that `init` draws where weights are read for the others; None: all. To compile the
    drawing of a published model takes longer than to compile its train step. An artifact draws all.
    """
    with stop.waiting_for("the compiler", can_be_left=True), Phases(console, STATUS) as phases:
        compile_ = WatchedBuild(compiler_log(run_dir, processes), phases)
        phases.begin(LOWER)
        mesh = mesh_of(plan)
        lowered = precompiled.lowered if precompiled else lower(plan, mesh, drawn_paths=drawn_paths)
        check_same_program(lowered, processes)
        start = time.perf_counter()
        if precompiled:
            artifact = precompiled.artifact
            programs = made_together(plan, lambda: load_programs(artifact, lowered, mesh, compile_), processes)
            loaded, seconds = ", ".join(artifact.built.executables), time.perf_counter() - start
            how = f"compiled before: {loaded} loaded from {artifact.place}, ready in {seconds:.1f} s"
            ready = Ready(programs, how)
        elif processes.count > 1:
            ready = compile_together(plan, lowered, mesh, compile_, processes)
        else:
            with cached_compilation(plan.spec.compilation_cache) as cache:
                programs = made_together(plan, lambda: compile_(lowered), processes)
            ready = Ready(programs, cache.describe(time.perf_counter() - start), tuple(cache.warnings))
    announce(console, ready.how)
    for warning in ready.warnings:
        announce(console, f"warning: {warning}")
    for finding in find_gathered_whole([line for line in compile_.lines if REMATERIALIZATION in line]):
        announce(console, Problem(finding.where, finding.what, f"{finding.fix} (see {compile_.log})").as_warning())
    return ready.programs


def compiler_log(run_dir: Path, processes: Processes) -> Path:
    """Returns the log file of this process's compiler."""
    return run_dir / "logs" / ("compiler.log" if processes.is_first else f"compiler-{processes.index}.log")


def mesh_of(plan: Plan[RunSpec]) -> Mesh:
    """Returns the plan's mesh of attached devices."""
    return plan.mesh.of_devices(jax.devices()[: plan.target.num_devices])


def made_together(plan: Plan[RunSpec], make: Callable[[], Programs], processes: Processes) -> Programs:
    """Returns the programs of `make`, once all processes have theirs. Raises RunFailed in all of them if one fails to
    compile, or lacks the memory to run."""

    def made() -> Programs:
        programs = make()
        check_program_memory(plan, programs["train"], processes)
        return programs

    return together(COMPILED, made, processes=processes, timeout_seconds=plan.spec.distributed.compile_timeout_seconds)


def compile_together(
    plan: Plan[RunSpec], lowered: Programs, mesh: Mesh, compile_: Compile, processes: Processes
) -> Ready:
    """Returns programs that all processes load, if each has them stored, or that all compile and store."""
    start = time.perf_counter()
    fingerprint = fingerprint_of(plan, lowered, mesh)
    place = store_of(plan.spec.compilation_cache, fingerprint)
    kept = find_artifact(fingerprint, [place]) if place else None
    have = processes.gather("kept programs", ",".join(kept.built.executables) if kept else "")
    if kept and all(have):
        programs = made_together(plan, lambda: load_programs(kept, lowered, mesh, compile_), processes)
        return Ready(programs, f"compiled before: loaded in {time.perf_counter() - start:.1f} s")
    with cached_compilation(None):  # JAX's own cache serves only process 0
        programs = made_together(plan, lambda: compile_(lowered), processes)
    seconds = time.perf_counter() - start
    keep = partial(_keep, place, fingerprint, programs, seconds)
    warnings = keep() if processes.is_first else ()
    processes.gather("programs of process 0", "")  # which the others find, where they share its disk
    warnings = warnings if processes.is_first else keep()
    return Ready(programs, f"compiled in {seconds:.1f} s", (*warnings, *unkept(plan.spec.compilation_cache)))


def _keep(place: Path | None, fingerprint: Fingerprint, programs: Programs, seconds: float) -> tuple[str, ...]:
    """Stores the programs for the next start, unless they are stored. Returns a warning if that fails."""
    if place is None or find_artifact(fingerprint, [place]):
        return ()
    try:
        write_artifact(place, fingerprint, built_of(programs, seconds), ())
    except OSError as error:
        if not find_artifact(fingerprint, [place]):  # else another process of this host was faster
            return (f"the programs cannot be kept in {place.parent}: {error.strerror}",)
    return ()


def check_state_memory(plan: Plan[RunSpec], processes: Processes) -> None:
    """Raises RunFailed if parameters, optimizer state and batch alone need more memory than there is, or if the host of
    an accelerator lacks the memory for the copy that a save makes of them."""
    if plan.spec.on_out_of_memory == "try":
        return
    target, state_bytes = plan.target, plan.memory.state_bytes
    purpose = "for parameters, optimizer state and batch alone"
    types = smaller_types(plan.spec.precision, is_adapted=bool(plan.model.adapters))
    check_devices(target, state_bytes + plan.memory.batch, purpose, processes, types)
    if plan.spec.checkpoint.is_saving and target.platform != "cpu":
        whole = sum(x.size * num_bits(x.dtype) // 8 for x in jax.tree.leaves(plan.abstract))
        saved = min(whole, state_bytes * _devices_of_host(target, processes))  # replicas are saved once
        _check_host(saved, "a save copies the state to the memory of its host")


def check_program_memory(plan: Plan[RunSpec], compiled: Any, processes: Processes, program: str = "train step") -> None:
    """Raises RunFailed if the compiled program needs more memory than devices or host have."""
    if plan.spec.on_out_of_memory == "try":
        return
    memory = memory_of(compiled)
    needed = memory.needed_bytes(plan.target.platform)
    if needed is not None:  # else only the compiler knows, and it has accepted the program
        types = smaller_types(plan.spec.precision, is_adapted=bool(plan.model.adapters))
        check_devices(plan.target, needed, f"for the compiled {program}", processes, types)
    if memory.host_bytes:
        on_host = memory.host_bytes * _devices_of_host(plan.target, processes)
        _check_host(on_host, f"the compiled {program} keeps arrays in the memory of its host")


def check_devices(
    target: TargetPlan, bytes_per_device: int, purpose: str, processes: Processes, types: str = ""
) -> None:
    """Raises RunFailed if each device needs more memory than it has; simulated devices share that of their host. types:
    the precision that takes less, on a processor."""
    each = f"{human_bytes(bytes_per_device)} are needed on each"
    if target.platform == "cpu":
        num_devices = _devices_of_host(target, processes)
        who = f"of {counted(num_devices, 'simulated device')} {purpose}; the memory is this machine's"
        _check_host(bytes_per_device * num_devices, f"{each} {who}", types)
        return
    stats = jax.local_devices()[0].memory_stats() or {}  # what the runtime gives programs, if it says
    available = stats.get("bytes_limit", target.hbm_bytes_per_device)
    if available is not None and bytes_per_device > available:
        raise _too_little(f"{each} device of {target.name} {purpose}, and {human_bytes(available)} are available")


def _check_host(needed: int, why: str, types: str = "") -> None:
    available = available_bytes()
    if needed > available:
        raise _too_little(f"{why}: {human_bytes(needed)} are needed, {human_bytes(available)} are available", types)


def smaller_types(types: PrecisionSpec, *, is_adapted: bool) -> str:
    """Returns the precision that halves the memory of parameters in float32; empty if they are in another type. Those
    under an adapter are frozen, and stored as they are computed with."""
    if is_adapted:
        return "precision=bfloat16" if (types.frozen or types.compute) == "float32" else ""
    return "precision=bfloat16_pure" if types.parameters == "float32" else ""


def _too_little(what: str, types: str = "") -> RunFailed:
    smaller = f"set {types}, which halves the memory of parameters, " if types else ""
    fix = f"{smaller}choose a smaller model or batch, or more devices (`meshloom explain` plans without any)"
    return RunFailed(Problem("target", what, f"{fix}; on_out_of_memory=try goes on regardless"), DOES_NOT_FIT)


def _devices_of_host(target: TargetPlan, processes: Processes) -> int:
    return target.num_devices // processes.count * processes.num_on_host
