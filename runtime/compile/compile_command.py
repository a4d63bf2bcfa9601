"""Compiles the train step for a target that need not be there: verdict, report, artifact."""

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshloom.compiler.analysis.lint import TOO_EXPOSED, TOO_MUCH_BUBBLE
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import DOES_NOT_FIT, EXPOSED, Problem, all_of, raise_if_any
from meshloom.compiler.core.format import human_bytes, human_share
from meshloom.compiler.core.known import Unknown, text_of
from meshloom.compiler.core.user_code import allow_words
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.overrides import override
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run, report_of
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.plan import Plan
from meshloom.compiler.report.views.summary import show_summary as show_report
from meshloom.compiler.schema import Alternative, MemoryChange, Report
from meshloom.compiler.search.candidates import Replan, check_can_judge, find_alternatives, suggest_changes
from meshloom.compiler.target.compiler_options import check_compiler_options
from meshloom.compiler.target.target import plan_target
from meshloom.compiler.target.topology import find_devices

from ..core.failures import raise_if_interrupted
from ..core.stderr_capture import captured_stderr
from ..processes.devices import plan_without_devices, start_devices
from ..processes.distributed import Processes
from ..processes.process_log import announce, say_command, say_labels
from ..rundir.folders import recorded_run
from ..rundir.run_dir import only_run_in, write_declaration, write_report
from .artifact import FOLDER, TEXT, cache_folder, cached_compilation, write_artifact
from .step_compiler import COMPILER_LOG, StepCompiler, StoredStep, search_overlap
from .watched import Phases, compiler_errors_reported

UNMET = (TOO_EXPOSED, TOO_MUCH_BUBBLE)  # findings that exit code 4 is for
LOG = logging.getLogger("meshloom")


@dataclass(frozen=True)
class CompileJob:
    """A step that can be compiled: its plan, its devices, and the lines that were printed while they were found."""

    plan: Plan[RunSpec]
    devices: Sequence[Any]
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compiled:
    """A compiled step, stored, with its report."""

    stored: StoredStep
    report: Report

    @property
    def refusal(self) -> int:
        """Returns the exit code of a compiled step that is not accepted; 0 if it is."""
        if self.report.compiled.runs is False:
            return DOES_NOT_FIT
        return EXPOSED if any(finding.rule in UNMET for finding in self.report.findings) else 0


def prepare_compile(spec: RunSpec) -> CompileJob:
    """Checks everything that can fail because of the declaration, before anything is written. Raises ConfigError."""

    def plan_counted() -> Plan[RunSpec]:
        if not spec.counts_epochs:
            return plan_run(spec)
        from ..data import open_data

        return plan_run(open_data(spec).opened.spec)

    is_run = spec.target.kind == "cpu"
    said = start_devices(spec.target, Processes()) if is_run else plan_without_devices(spec.target)
    job = find_job(spec, plan_counted)
    return replace(job, said=(*said, *job.said))


def find_job(spec: RunSpec, make_plan: Callable[[], Plan[RunSpec]]) -> CompileJob:
    """Returns the job of a declaration whose devices have started. Raises ConfigError with all problems."""
    with captured_stderr() as captured:
        plan, devices, *_ = all_of(
            make_plan,
            lambda: find_devices(spec.target, plan_target(spec.target, spec.precision.compute)),
            lambda: _check_files(spec.artifact, spec.compile.timeout_seconds, spec.compilation_cache),
        )
        check_can_judge(plan)
        check_compiler_options(spec.compiler_options, devices[0])
    return CompileJob(plan, devices, captured.lines)


def compile_step(job: CompileJob, run_dir: Path, *, request: Request, model: str | None, console: Console) -> Compiled:
    """Compiles, or finds an earlier compile, and writes the report. The exit code is the result's `refusal`.

    model: the declaration's name for its model; None if it has none.
    Raises ConfigError for wrong compiler options and for a directory that is in use, RunFailed if the compiler fails.
    """

    def replan(more: tuple[str, ...]) -> Plan[RunSpec]:
        return read_spec(replace(request, overrides=(*request.overrides, *more)), then=plan_run)

    with only_run_in(run_dir), recorded_run(run_dir, "compile") as record:
        _show_header(console, job)
        compiled = compile_job(
            job, run_dir, overrides=request.overrides, model=model, replan=replan, console=console,
            words=request.config_words,
        )  # fmt: skip
        files = write_compiled(compiled, run_dir)
        _show_result(console, compiled, files, None if compiled.refusal else run_dir)
        record.end(compiled.refusal, why_refused(compiled))
        return compiled


def why_refused(compiled: Compiled) -> str | None:
    """Returns why a compiled step is not accepted; None if it is."""
    step = compiled.report.compiled
    if compiled.refusal == EXPOSED and TOO_EXPOSED not in [finding.rule for finding in compiled.report.findings]:
        bubble = text_of(step.bubble_fraction, human_share, "?")
        return f"stages wait {bubble} of the step for each other, more than pipeline.max_bubble allows"
    if compiled.refusal == EXPOSED:
        exposed = text_of(step.exposed_fraction, human_share, "?")
        waits = "communication and copies to the host" if step.exposed_host_seconds else "communication"
        return f"{exposed} of the step is exposed {waits}, more than overlap.max_exposed allows"
    if compiled.refusal != DOES_NOT_FIT:
        return None
    needed, limit = step.peak_bytes, step.limit_bytes
    if step.fits is not False or isinstance(needed, Unknown) or isinstance(limit, Unknown):
        return "it does not fit into memory"
    return f"it does not fit: it needs {human_bytes(needed)} of a chip, and {human_bytes(limit)} are there"


def compile_job(
    job: CompileJob,
    run_dir: Path,
    *,
    overrides: tuple[str, ...],
    model: str | None,
    replan: Replan | None,
    console: Console,
    words: tuple[str, ...] = (),
) -> Compiled:
    """Compiles, or finds an earlier compile. run_dir: the folder of the compiler's log.

    overrides, model: as for a report. replan: plans the declaration with more overrides; None if none can be suggested.
    words: the arguments of `meshloom compile` before the overrides.
    """
    compiler, searched = StepCompiler(job.devices, run_dir, console, words), None
    with compiler_errors_reported(run_dir / COMPILER_LOG), cached_compilation(None):
        if job.plan.spec.overlap.search is not None:
            stored, searched = search_overlap(job.plan, compiler, overrides)
        else:
            stored = compiler.compile(job.plan, overrides, "compiling the train step")
    raise_if_interrupted()
    step, changes, alternatives = stored.step, tuple[MemoryChange, ...](), tuple[Alternative, ...]()
    with Phases(console, "alternatives") as phases:
        phases.begin("estimating")
        needed, limit = step.needed_bytes, step.plan.target.hbm_bytes_per_device
        if replan and step.fits is False and needed is not None and limit is not None:
            changes = suggest_changes(step.plan, needed, limit, replan)
        if replan:  # alternatives to the declaration, of which the step is another if a search chose it
            estimate = step.estimate if step.plan is job.plan else estimate_step(job.plan)
            alternatives = find_alternatives(job.plan, estimate, replan)
    report = report_of(
        stored.step,
        overrides=stored.overrides,
        model=model,
        changes=changes,
        search=searched,
        alternatives=alternatives,
    )
    return Compiled(stored, report)


def write_compiled(compiled: Compiled, run_dir: Path) -> tuple[Path, ...]:
    """Writes the declaration, the report and, if the step is accepted, the artifact. Returns their paths, beginning
    with the one to open."""
    step = compiled.stored.step
    write_declaration(step.plan, run_dir)
    place = None if compiled.refusal else run_dir / FOLDER
    made = compiled.stored.artifact
    if place and made is None:
        write_artifact(place, step.lowered.fingerprint, step.built, compiled.stored.overrides)
    elif place and made and made.place != place:  # it shares files with the stored one if they are on the same disk
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(made.place, place, copy_function=_linked)
    files = write_report(compiled.report, step.plan, run_dir, events=step.events)
    return (*files, *([place] if place else []))


def _check_files(artifact: str | None, timeout_seconds: float | None, cache: str | None) -> None:
    problems = []
    if artifact is not None:
        what = f"compile writes an artifact and cannot load one, but artifact={artifact}"
        problems.append(Problem("artifact", what, "leave it out; hydra.run.dir= says where the new one goes"))
    if timeout_seconds is not None and cache_folder(cache) is None:
        place = "null" if cache is None else "a URL"
        what = f"the process that is ended then leaves what it compiled in compilation_cache, which is {place}"
        problems.append(Problem("compile.timeout_seconds", what, "set a directory as compilation_cache"))
    raise_if_any(problems)


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
    model = f"{plan.num_parameters / 1e6:,.1f} M parameters"
    tokens = f"{plan.spec.tokens_per_step:,} tokens per step"
    announce(console, f"meshloom compile: {model}, {plan.mesh} on {target.described}, {tokens}")
    if plan.spec.chosen_here:
        announce(console, plan.spec.chosen_here)
    say_labels(console, plan.spec.run)
    if plan.flag_presets:
        announce(console, f"flag presets: {plan.flag_presets}")
    for warning in plan.warnings:
        announce(console, warning.as_warning())


def _show_result(console: Console, compiled: Compiled, files: Sequence[Path], run_dir: Path | None) -> None:
    """Shows the result of a compile. run_dir: None if the step is not accepted."""
    report, kept = compiled.report, compiled.stored.artifact
    build = report.build
    assert not isinstance(build, Unknown), "it was compiled here"
    if kept and build.cache == "hit":
        announce(console, f"compiled before, nothing to do: {kept.place} is of the same program, devices and versions")
    else:
        by = f"jax {build.jax}" + (f", {build.plugin}" if build.plugin else "")
        announce(console, f"compiled in {build.compile_seconds:.1f} s, lowered in {build.lower_seconds:.1f} s, by {by}")
    if build.compiler_options_left_out:
        unknown = ", ".join(build.compiler_options_left_out)
        announce(console, f"left out of overlap.flag_presets, as this compiler does not know it: {unknown}")
    show_report(report, console, files=files)
    step, place = compiled.stored.step, run_dir / FOLDER if run_dir else kept.place if kept else None
    parts = {"memory by class": step.peak, "the schedule": step.schedule}
    reasons = {part.why: name for name, part in parts.items() if isinstance(part, Unknown) and step.built.text}
    for why, name in reasons.items():
        announce(console, f"warning: {name} is unknown: {why}{f'; it is kept as {place / TEXT}' if place else ''}")
    if why := why_refused(compiled):
        console.wrapped((why, "bold red"))
    if run_dir:
        typed = [text for text in report.overrides if not text.startswith("hydra.")]
        words = [*allow_words(), *typed, override("artifact", str(run_dir))]
        say_command(console, "train it", ["meshloom", "train", *words])
