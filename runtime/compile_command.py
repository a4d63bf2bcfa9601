"""`meshloom compile`: the train step, compiled for a target that need not be there; verdict, report, artifact."""

import logging
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from meshloom.compiler.analysis import analyse_schedule
from meshloom.compiler.aot import REMATERIALIZATION, STEP, Built, check_compiler_options, compile_ahead
from meshloom.compiler.build_report import BuildFacts, build_report, does_fit, needed_bytes
from meshloom.compiler.compose import Request, read_spec
from meshloom.compiler.driver import PROGRAMS, Programs, lower, plan_run
from meshloom.compiler.estimate import estimate_step
from meshloom.compiler.exposure import TOO_EXPOSED
from meshloom.compiler.fingerprint import Fingerprint, fingerprint_of
from meshloom.compiler.hlo import parse_module
from meshloom.compiler.plan import Plan
from meshloom.compiler.problems import DOES_NOT_FIT, EXPOSED, ConfigError, Problem, all_of
from meshloom.compiler.program_memory import read_peak
from meshloom.compiler.quiet import captured_stderr
from meshloom.compiler.report import Change, Report
from meshloom.compiler.savings import find_savings
from meshloom.compiler.spec import RunSpec
from meshloom.compiler.target import plan_target
from meshloom.compiler.topology import find_devices, options_without_device
from meshloom.compiler.views.summary import show_summary as show_report

from .artifact import FOLDER, Artifact, find_artifact, write_artifact
from .compile_cache import cached_compilation
from .declaration import write_declaration
from .devices import plan_without_devices, start_devices
from .distributed import Processes
from .failures import RunFailed
from .interruptible import interruptibly
from .report_files import write_report
from .say import say

LOG = logging.getLogger("meshloom")
COMPILER_LOG = Path("logs/compiler.log")


@dataclass(frozen=True)
class CompileJob:
    """A step that can be compiled: its plan, the devices that it is for, and what looking for them printed."""

    plan: Plan
    devices: Sequence[Any]
    said: tuple[str, ...] = ()


def prepare_compile(spec: RunSpec) -> CompileJob:
    """Everything that can fail for a reason of the declaration, before anything is written. Raises ConfigError."""
    is_run = spec.target.kind == "cpu"
    said = start_devices(spec.target, Processes()) if is_run else plan_without_devices(spec.target)
    with captured_stderr() as captured:
        plan, devices, *_ = all_of(
            lambda: plan_run(spec),
            lambda: find_devices(spec.target, plan_target(spec.target, spec.precision.compute)),
            lambda: _check_makes_artifact(spec),
        )
        check_compiler_options(spec.compiler_options, devices[0])
    return CompileJob(plan, devices, (*said, *captured.lines))


def compile_step(job: CompileJob, run_dir: Path, *, request: Request, model: str | None, console: Console) -> int:
    """Compile, or find what was compiled before; write the report. Returns the exit code: 0, DOES_NOT_FIT or EXPOSED.

    model: what the declaration calls its model, where it has a name.
    Raises ConfigError for compiler options that are wrong, RunFailed where the compiler fails.
    """
    plan, overrides = job.plan, request.overrides
    _show_header(console, job)
    with captured_stderr(run_dir / COMPILER_LOG) as captured, cached_compilation(None):
        mesh = plan.mesh.of_devices(job.devices)
        start = time.perf_counter()
        lowered = lower_for_target(plan, mesh)
        lower_seconds = time.perf_counter() - start
        fingerprint = fingerprint_of(plan, lowered, mesh)
        store = store_of(plan.spec, fingerprint)
        found = find_artifact(fingerprint, (run_dir / FOLDER, *([store] if store else [])))
        built = found.built if found else _compiled(lowered, console, run_dir)
    if not found:
        built = replace(built, notes=tuple(line for line in captured.lines if REMATERIALIZATION in line))
    write_declaration(plan, run_dir)
    estimate = estimate_step(plan)
    module = parse_module(built.text) if built.text is not None else None
    schedule = analyse_schedule(module, plan, estimate.communication) if module else None
    peak = read_peak(module) if module else None
    cache = "hit" if found else "miss" if store else "off"
    facts = BuildFacts(fingerprint, lower_seconds, cache, overrides, model)
    changes = _savings(plan, built, request) if does_fit(plan, built) is False else ()
    report = build_report(plan, built, facts, estimate, schedule, peak, changes=changes)
    refused = _refusal(report)
    _keep(found, None if refused else run_dir / FOLDER, store, (fingerprint, built, overrides), console)
    files = write_report(report, plan, run_dir, events=schedule.events if schedule else ())
    _show_result(console, report, files, found, None if refused else run_dir)
    return refused


def _refusal(report: Report) -> int:
    """The exit code of a step that is compiled and not accepted; 0 of one that is."""
    if report.memory.fits is False:
        return DOES_NOT_FIT
    return EXPOSED if any(finding.rule == TOO_EXPOSED for finding in report.findings) else 0


def _savings(plan: Plan, built: Built, request: Request) -> tuple[Change, ...]:
    """What would make it fit, where it is known how much it lacks."""
    needed, limit = needed_bytes(plan, built), plan.target.hbm_bytes_per_device
    if needed is None or limit is None:
        return ()

    def replan(more: tuple[str, ...]) -> Plan:
        return read_spec(replace(request, overrides=(*request.overrides, *more)), then=plan_run)

    return find_savings(plan, needed, limit, replan)


def lower_for_target(plan: Plan, mesh: Mesh) -> Programs:
    """All programs; for chips that are not there the train step alone: where it runs, the others take seconds."""
    lowered = lower(plan, mesh, PROGRAMS if plan.target.is_attached else (STEP,))
    return replace(lowered, compiler_options=options_without_device(plan.target) | dict(lowered.compiler_options))


def store_of(spec: RunSpec, fingerprint: Fingerprint) -> Path | None:
    """Where what is compiled is kept between runs; None where nothing is."""
    if spec.compilation_cache is None:
        return None
    return Path(spec.compilation_cache).expanduser().absolute() / "artifacts" / fingerprint.digest


def _check_makes_artifact(spec: RunSpec) -> None:
    if spec.artifact is not None:
        what = f"compile makes an artifact and takes none, and artifact={spec.artifact}"
        raise ConfigError([Problem("artifact", what, "leave it out; hydra.run.dir= says where the new one goes")])


def _compiled(lowered: Programs, console: Console, run_dir: Path) -> Built:
    try:
        with console.status("compiling the train step"):
            return interruptibly(lambda: compile_ahead(lowered))
    except jax.errors.JaxRuntimeError as error:
        what = f"failed, and not for memory: {str(error).splitlines()[0]}"
        fix = f"see {run_dir / COMPILER_LOG}; other compiler_options or another version of it may do"
        raise RunFailed(Problem("the compiler", what, fix), exit_code=1) from error
    except KeyboardInterrupt:
        console.print("interrupted while compiling; no report was written", highlight=False)
        sys.stdout.flush()
        os._exit(128 + signal.SIGINT)


def _keep(
    found: Artifact | None,
    place: Path | None,
    store: Path | None,
    new: tuple[Fingerprint, Built, tuple[str, ...]],
    console: Console,
) -> None:
    """What was found or is new, in the store for other runs, and at its place in the run directory.

    A store that cannot be written is a warning. The two share files where they are on the same disk.
    """
    if store and not found:
        try:
            found = write_artifact(store, *new)
        except OSError as error:
            say(console, f"warning: not kept in {store.parent}: {error.strerror}")
    if place is None or (found and found.place == place):
        return
    if found is None:
        write_artifact(place, *new)
        return
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(found.place, place, copy_function=_linked)


def _linked(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _show_header(console: Console, job: CompileJob) -> None:
    plan, target = job.plan, job.plan.target
    for line in job.said:
        LOG.info(line)
    say(console, f"meshloom compile: {plan.num_parameters / 1e6:,.1f} M parameters, {plan.mesh} on {target.name}, "
        f"{plan.spec.tokens_per_step:,} tokens per step")  # fmt: skip
    for warning in plan.sharding.warnings:
        say(console, warning.as_warning())


def _show_result(
    console: Console, report: Report, files: tuple[Path, ...], found: Artifact | None, run_dir: Path | None
) -> None:
    """run_dir: None where the step is not accepted."""
    build = report.build
    if found:
        say(console, f"compiled before, nothing to do: {found.place} is of the same program, devices and versions")
    else:
        by = f"jax {build.jax}" + (f", {build.plugin}" if build.plugin else "")
        say(console, f"compiled in {build.compile_seconds:.1f} s, lowered in {build.lower_seconds:.1f} s, by {by}")
    show_report(report, console, files=[*files, *([run_dir / FOLDER] if run_dir else [])])
    if run_dir:
        kept = [text for text in report.overrides if not text.startswith("hydra.")]
        say(console, f"train it: {shlex.join(['meshloom', 'train', *kept, f'artifact={run_dir}'])}")
