"""Runs `meshloom train`: from a plan and a run directory to a trained, saved model and its metrics."""

import logging
import os
import shlex
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem, all_of, raise_if_any
from meshloom.compiler.core.format import be, counted
from meshloom.compiler.core.key_paths import is_within
from meshloom.compiler.core.user_code import allow_words
from meshloom.compiler.core.visible import write_error
from meshloom.compiler.declare.compose import Request
from meshloom.compiler.declare.hydra_settings import RUN_DIR
from meshloom.compiler.declare.overrides import overridden_key, override
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.plan import Plan
from meshloom.compiler.spec.overlap_spec import OverlapSpec
from meshloom.compiler.target.compiler_options import check_compiler_options
from meshloom.compiler.xla.programs import Programs, fingerprint_of, lower

from ..checkpoint.checkpoints import Checkpoints
from ..checkpoint.find import checkpoint_folder
from ..compile.artifact import check_artifact, read_artifact
from ..compile.run_programs import Precompiled, check_state_memory, make_programs, mesh_of
from ..data import Data, open_data
from ..processes.agreement import check_same_declaration
from ..processes.devices import start_devices
from ..processes.distributed import Processes, join, together
from ..processes.initialize import plan_start
from ..processes.process_log import announce, say_labels
from ..processes.stop import StopRequest
from ..rundir.folders import CHECKPOINTS, RecordedRequest, recorded_run
from ..rundir.run_dir import only_run_in, only_run_that_saves_in, write_declaration
from ..start.start import RunStart, check_checkpoint, check_steps_left, declared_start, find_start
from ..weights.find import StoredWeights
from .display import next_steps, show_header, show_rows
from .feed import local_rows, prepare_reference, sequences_of
from .loop import NonFinite, TrainingLoop, add_observers
from .metrics import Stopwatch, time_rows
from .observer import ObservedRun, Observers
from .profiler import check_profile
from .trackers import find_trackers

LOG = logging.getLogger("meshloom")


@dataclass(frozen=True)
class Job:
    """A run that passed all checks: its plan, its data, the artifact that is loaded instead of compiling, and the lines
    that were printed while devices were found. model: the declaration's name for its model; None if it has none.
    request: what declared it, for the record of the run; None if overrides did not. weights: those that a new run
    starts from; None if they are drawn."""

    plan: Plan[RunSpec]
    data: Data
    precompiled: Precompiled | None = None
    said: tuple[str, ...] = ()
    model: str | None = None
    request: Request | None = None
    weights: StoredWeights | None = None


def prepare(spec: RunSpec, warn: Callable[[str], None] = write_error) -> Job:
    """Checks everything that can fail because of the declaration, before anything is written. Raises ConfigError.

    warn: takes a warning about attached devices.
    """
    try:
        processes = join(spec.distributed, spec.target)
    except ConfigError:
        plan_and_check(spec)  # raises the same, with all other problems
        raise
    check_same_declaration(spec, processes)
    said = start_devices(spec.target, processes, warn)
    job = replace(plan_and_check(spec), said=said)
    check_state_memory(job.plan, processes)
    return replace(job, precompiled=find_precompiled(job.plan, Path(spec.artifact))) if spec.artifact else job


def plan_and_check(spec: RunSpec) -> Job:
    """Returns the plan and the data of a run, on whatever devices there are. Raises ConfigError with all problems."""
    plan, data, *_ = all_of(
        lambda: plan_run(spec),
        lambda: open_data(spec),
        lambda: find_trackers(spec.logging),
        lambda: check_checkpoint(spec),
        lambda: plan_start(spec.distributed, spec.target, os.environ),
        lambda: read_artifact(Path(spec.artifact)) if spec.artifact else None,
        lambda: _check_is_decided(spec.overlap, has_artifact=spec.artifact is not None),
        lambda: check_profile(spec.profile.steps, spec.num_steps) if not spec.counts_epochs else None,
        lambda: check_compiler_options(spec.compiler_options, jax.local_devices()[0]),
    )
    if spec.counts_epochs:  # the plan needs the number of steps, and all problems were to be reported together
        plan = plan_run(data.opened.spec)
        check_profile(spec.profile.steps, plan.spec.num_steps)
    start = declared_start(plan)
    check_steps_left(start, plan.spec.num_steps)
    return Job(plan, data, weights=start.weights)


def _check_is_decided(overlap: OverlapSpec, *, has_artifact: bool) -> None:
    """Raises ConfigError for what takes several compiles, and whose result all processes need before the run: a search,
    and a schedule by the times of a program that is compiled first."""
    problems, fix = list[Problem](), "run `meshloom compile` with the same words: it prints what to train"
    if overlap.search is not None:
        what = "is done by `meshloom compile`, and not by a run"
        problems.append(Problem("overlap.search", what, f"{fix}; or choose overlap=prefetch"))
    if overlap.pgle is not None and not has_artifact:
        problems.append(
            Problem("overlap.pgle", "needs a step that `meshloom compile` made", f"{fix}; or set it to null")
        )
    raise_if_any(problems)


def run_training(
    job: Job,
    run_dir: Path,
    *,
    overrides: tuple[str, ...],
    console: Console,
    processes: Processes,
    began: float | None = None,
) -> int:
    """Runs the job, continuing a run that stopped in the same directory. Returns the exit code, the same in all
    processes.

    began: the time of this start, in seconds since 1970; None: now. Raises RunFailed if the run cannot be finished,
    ConfigError if a checkpoint is of another model.
    """
    watch = Stopwatch(time.time() if began is None else began)
    with ExitStack() as held:
        together("lock of the run directory", lambda: held.enter_context(only_run_in(run_dir)))
        saved_in = job.plan.spec.checkpoint.directory if job.plan.spec.checkpoint.is_saving else None
        together("lock of the checkpoints", lambda: held.enter_context(only_run_that_saves_in(saved_in)))
        record = held.enter_context(recorded_run(run_dir, "train", job.request)) if processes.is_first else None
        exit_code = _train(job, run_dir, watch, overrides=overrides, console=console, processes=processes)
        return record.end(exit_code) if record else exit_code


def _train(
    job: Job, run_dir: Path, watch: Stopwatch, *, overrides: tuple[str, ...], console: Console, processes: Processes
) -> int:
    plan, num_steps = job.plan, job.plan.spec.num_steps
    for line in job.said:
        announce(console, line, is_shown=False)
    show_header(console, job.plan)
    say_labels(console, job.plan.spec.run)
    announce(console, job.data.summary)
    start = find_start(run_dir, plan, job.weights, console, processes)
    if start.is_own and start.step >= num_steps:
        enough = f"{counted(start.step, 'step')} {be(start.step)} done already, num_steps is {num_steps}"
        show_rows(console, [("nothing to do", enough), *_where(plan, run_dir, start.step)])
        return 0
    for line in start.differences(job.data.identity):
        announce(console, line)
    with StopRequest(processes) as stop:
        ended = _run(job, start, run_dir, watch, stop=stop, console=console, processes=processes)
    where = _where(plan, run_dir, ended.saved)
    if stop.signal and ended.step < num_steps:
        stopped = ("stopped", f"by {stop.signal.name} after step {ended.step} of {num_steps}")
        how = ("continue", _how_to_continue(overrides, run_dir, ended.saved))
        show_rows(console, [stopped, *time_rows(watch), *where, how])
        return stop.exit_code
    loss = "none: no held-out token has a target"
    if not plan.spec.data.held_out_fraction:
        loss = "none: data.held_out_fraction is 0"
    if ended.eval_loss is not None:
        loss = f"{ended.eval_loss:.3f} nats per {job.data.token_unit}"
    more = next_steps(run_dir, overrides, is_saved=ended.saved is not None, is_terminal=console.is_terminal)
    show_rows(console, [("held-out loss", loss), *time_rows(watch), *where, *more])
    return 0


@dataclass(frozen=True)
class EndedRun:
    """A run that has ended. step: the steps done. saved: the step of the latest checkpoint; None without one.
    eval_loss: the latest held-out loss; None without one."""

    step: int
    saved: int | None
    eval_loss: float | None


def _programs(
    job: Job, start: RunStart, run_dir: Path, *, stop: StopRequest, console: Console, processes: Processes
) -> Programs:
    """Returns the compiled programs of a run. Parameters that are read from weights are not drawn first."""
    drawn = start.weights.fresh if start.weights else None
    return make_programs(
        job.plan, job.precompiled, run_dir, stop=stop, console=console, processes=processes, drawn_paths=drawn
    )


def _run(
    job: Job,
    start: RunStart,
    run_dir: Path,
    watch: Stopwatch,
    *,
    stop: StopRequest,
    console: Console,
    processes: Processes,
) -> EndedRun:
    """Compiles, and trains from the start to the last step or until a stop is requested."""
    plan, data = job.plan, job.data
    request = RecordedRequest.of(job.request) if job.request else None
    with Checkpoints(run_dir, plan.spec, request) as checkpoints:
        with watch.spending("compile"):
            programs = _programs(job, start, run_dir, stop=stop, console=console, processes=processes)
        rows = sequences_of(plan.batch.row_order, local_rows(programs.batch))
        batches = iter(data["train"].of_rows(rows))
        with stop.waiting_for("the state to start from"), watch.spending("restore" if start.step else "start"):
            started = start.state(programs, batches, console, processes)
            params = started.state["params"]
            prepare_reference(plan, programs, params, data, run_dir, console, processes, is_continued=start.is_own)
            checkpoints.base = started.base
        if processes.is_first:
            write_declaration(plan, run_dir)
        with Observers(watch) as observers:
            run = ObservedRun(plan, programs, data, run_dir, processes, console, observers, started.step, job.model)
            add_observers(run)
            loop = TrainingLoop(
                plan, programs, batches=batches, held_out=data["held_out"].of_rows(rows), checkpoints=checkpoints,
                stop=stop, observers=observers,
            )  # fmt: skip
            try:
                step = loop.run(started.state, started.step, started.num_tokens)
            except NonFinite as error:
                checkpoints.wait()
                raise error.failure(checkpoints.latest_step, run.documents) from error
        with watch.spending("save"):
            checkpoints.wait()
        return EndedRun(step, checkpoints.latest_step, loop.latest_eval_loss)


def find_precompiled(plan: Plan[RunSpec], named: Path) -> Precompiled:
    """Returns the artifact, after checking that it is for this plan and these devices. Raises ConfigError with all
    differences."""
    artifact, mesh = read_artifact(named), mesh_of(plan)
    lowered = lower(plan, mesh)
    check_artifact(artifact, fingerprint_of(plan, lowered, mesh))
    return Precompiled(artifact, lowered)


def _where(plan: Plan[RunSpec], run_dir: Path, saved: int | None) -> list[tuple[str, str]]:
    rows = [("run directory", f"{run_dir}"), ("metrics", f"{run_dir}/metrics.jsonl")]
    if saved is not None:
        declared = plan.spec.checkpoint.directory
        folder = checkpoint_folder(run_dir, declared) if declared else f"{run_dir}/{CHECKPOINTS}"
        rows.append(("checkpoint", f"{folder}/{saved}"))
    if "tensorboard" in plan.spec.logging.trackers:
        rows.append(("curves", shlex.join(["tensorboard", "--logdir", f"{run_dir}/tensorboard"])))
    return rows


def _how_to_continue(overrides: tuple[str, ...], run_dir: Path, saved: int | None) -> str:
    if saved is None:
        return "not possible: nothing was saved (no step was done, or checkpoints are disabled)"
    keyed = [(overridden_key(text), text) for text in overrides]
    # Keys of the processes are left out: any number of them may continue.
    kept = [text for key, text in keyed if key != RUN_DIR and not is_within(key, "distributed")]
    return shlex.join(["meshloom", "train", *allow_words(), *kept, override(RUN_DIR, str(run_dir))])
