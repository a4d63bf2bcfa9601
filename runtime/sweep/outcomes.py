"""Makes the outcome of a point: prices or compiles it in this process, or reads what its run or its end has left.

Mistakes and crashes become outcomes, not exceptions.
"""

import logging
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median_high
from typing import Any

import jax

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import DOES_NOT_FIT, MISTAKE, ConfigError
from meshloom.compiler.core.format import human_bytes, human_seconds
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.core.user_code import code_allowed_from
from meshloom.compiler.declare.choices import model_of
from meshloom.compiler.declare.compose import read_spec
from meshloom.compiler.declare.problems import MISTAKES, as_config_error
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import StepEstimate, estimate_step
from meshloom.compiler.figures import StepFigures, StepWork, no_figures
from meshloom.compiler.plan import Plan
from meshloom.compiler.report.explain import explain
from meshloom.compiler.spec.plan_spec import PlanSpec
from meshloom.compiler.target.target import TargetPlan
from meshloom.compiler.tune.answer import cost_per_million_tokens

from ..compile.compile_command import Compiled, compile_step, prepare_compile, why_refused
from ..processes.devices import TooFewSimulated, plan_without_devices
from ..processes.distributed import Processes
from ..processes.process_log import process_log
from ..rundir.folders import PLAN, RunFolder
from ..rundir.run_dir import as_typed
from .rows import KILLED, TIMED_OUT, Figures, Outcome, SweepCommand, Task, lack

LOG = logging.getLogger("meshloom")
PLAN_TEXT = "plan.txt"
CRASHED = 1
NOT_PROFILED = "a run times its steps, not what happens in one: see `meshloom profile`"


def evaluate_point(task: Task) -> Outcome | None:
    """Returns the outcome of a point of `explain` or `compile`; None if it needs a process of its own, as JAX has
    started in this one with too few devices."""
    start = time.perf_counter()
    try:
        with code_allowed_from(task.allowed):
            outcome = _EVALUATE[task.command](task)
    except TooFewSimulated:
        return None
    except MISTAKES as error:
        outcome = outcome_of_error(as_config_error(error))
    except (Exception, SystemExit) as error:
        LOG.exception("crashed")
        outcome = outcome_of_error(error)
    return outcome.model_copy(update={"seconds": time.perf_counter() - start})


def _explain(task: Task) -> Outcome:
    def planned(spec: RunSpec) -> Plan:
        plan_without_devices(spec.target)
        return plan_run(spec)

    plan = read_spec(task.request, then=planned)
    estimate = estimate_step(plan)
    task.directory.mkdir(parents=True, exist_ok=True)
    with (task.directory / PLAN_TEXT).open("w", encoding="utf-8") as file:
        explain(plan, Console(file, width=240, is_terminal=False), estimate)
    return outcome_of_plan(plan, estimate, model_of(task.request))


def _compile(task: Task) -> Outcome:
    job = read_spec(task.request, then=prepare_compile)
    run_dir = as_typed(task.directory)
    run_dir.mkdir(parents=True, exist_ok=True)
    with process_log(run_dir, Processes()):
        try:
            model = model_of(task.request)
            made = compile_step(job, run_dir, request=task.request, model=model, console=Console(is_quiet=True))
        except Exception as error:
            LOG.error(error, exc_info=not isinstance(error, MISTAKES))
            raise
        finally:
            jax.clear_caches()  # the next point is another program
    return outcome_of_compiled(made, job.plan)


_EVALUATE: dict[SweepCommand, Callable[[Task], Outcome]] = {"explain": _explain, "compile": _compile}


def outcome_of_plan(plan: Plan, estimate: StepEstimate, model: str | None) -> Outcome:
    """Returns the outcome of a priced point. A point that does not fit has exit code 0, as `explain` has."""
    found = estimate.figures
    cost = _cost(plan.spec, plan.target, found)
    name = model or plan.spec.model.family
    figures = Figures(**dict(found), **_common(plan), **cost, basis="estimate", model=name)
    if found.runs is False:
        return Outcome(status="does_not_fit", exit_code=0, why=lack(found), figures=figures)
    return Outcome(status="done", exit_code=0, figures=figures)


def _common(plan: Plan) -> dict[str, Any]:
    """Returns what the figures of plans and compiled steps are of."""
    spec, target = plan.spec, plan.target
    return {
        "target": target.name,
        "chip": target.chip.name if target.chip else target.platform,
        "num_chips": target.num_chips,
        "mesh": str(plan.mesh),
        "global_batch_size": spec.global_batch_size,
        "num_microbatches": spec.num_microbatches,
        "tokens_per_step": spec.tokens_per_step,
        "num_parameters": plan.num_parameters,
    }


def _cost(spec: PlanSpec, target: TargetPlan, step: StepFigures) -> dict[str, Any]:
    """Returns the cost of a priced step, where the price of its chip is declared."""
    if isinstance(step.step_seconds, Unknown):
        return {}
    return {"cost_per_million_tokens": cost_per_million_tokens(spec, target, step.step_seconds)}


def outcome_of_compiled(compiled: Compiled, plan: Plan) -> Outcome:
    """Returns the outcome of a compiled point."""
    report, refusal, step = compiled.report, compiled.refusal, compiled.stored.step
    figures = Figures(
        **dict(report.compiled.alone()),
        **_common(plan),
        **_cost(plan.spec, plan.target, report.compiled),
        basis="schedule",
        model=report.program.model,
        compile_seconds=step.built.compile_seconds,
    )
    return Outcome(
        status="does_not_fit" if refusal == DOES_NOT_FIT else "refused" if refusal else "done",
        exit_code=refusal,
        why=why_refused(compiled),
        fingerprint=step.lowered.fingerprint.digest,
        figures=figures,
    )


def outcome_of_run(run_dir: Path, exit_code: int, said: str, model: str | None) -> Outcome:
    """Returns the outcome of a point that was trained, from its files. said: what it printed."""
    figures = _figures_of_run(run_dir, model)
    if exit_code == 0:
        return Outcome(status="done", exit_code=0, figures=figures)
    if exit_code < 0 or exit_code > 128:
        return outcome_of_death(exit_code, run_dir, said).model_copy(update={"figures": figures})
    status = "refused" if exit_code == MISTAKE else "does_not_fit" if exit_code == DOES_NOT_FIT else "failed"
    return Outcome(status=status, exit_code=exit_code, why=_first_error(said), figures=figures)


def outcome_of_error(error: BaseException) -> Outcome:
    """Returns the outcome of a point that raised an exception."""
    if isinstance(error, ConfigError):
        code = error.exit_code
        status = "refused" if code == MISTAKE else "does_not_fit" if code == DOES_NOT_FIT else "failed"
        why = "; ".join(f"{problem.where}: {problem.what}" for problem in error.problems)
        return Outcome(status=status, exit_code=code, why=why)
    if isinstance(error, MemoryError):
        return Outcome(status="out_of_memory", exit_code=KILLED, why="this machine's memory was used up (MemoryError)")
    first = str(error).splitlines()[0] if str(error) else ""
    return Outcome(status="failed", exit_code=CRASHED, why=f"{type(error).__name__}: {first}".rstrip(": "))


def outcome_of_death(exit_code: int, directory: Path, said: str = "", *, is_memory: bool = False) -> Outcome:
    """Returns the outcome of a point whose process died. exit_code: minus the signal, or 128 plus the signal.
    is_memory: the system ended processes for memory while it ran."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = ""
    if name == "SIGKILL" and is_memory:
        why = "the system ended it, as this machine's memory was used up"
        return Outcome(status="out_of_memory", exit_code=KILLED, why=why)
    how = f"its process was ended by {name}" if name else f"its process ended with exit code {exit_code}"
    reason = _fatal_line(directory, said)
    code = 128 + number if name else max(exit_code, CRASHED)
    return Outcome(status="aborted", exit_code=code, why=f"{how}: {reason}" if reason else how)


def outcome_of_timeout(seconds: float) -> Outcome:
    """Returns the outcome of a point that took too long."""
    why = f"it took longer than {human_seconds(seconds)} (hydra.launcher.timeout_seconds)"
    return Outcome(status="timed_out", exit_code=TIMED_OUT, why=why, seconds=seconds)


def outcome_of_memory(num_bytes: int, allowed_bytes: int, *, is_limit: bool) -> Outcome:
    """Returns the outcome of a point that was ended for memory. allowed_bytes: the declared limit, or what was left."""
    allowed = human_bytes(allowed_bytes)
    rest = (
        f"{allowed} are allowed (hydra.launcher.worker_bytes)" if is_limit else f"{allowed} of this machine were left"
    )
    return Outcome(
        status="out_of_memory", exit_code=KILLED, why=f"its process took {human_bytes(num_bytes)}, and {rest}"
    )


def _figures_of_run(run_dir: Path, model: str | None) -> Figures | None:
    """Returns the figures of a run, from its files; None if it wrote no plan."""
    run = RunFolder(run_dir)
    try:
        plan, spec = run.plan, run.spec
    except ConfigError as error:
        if (run_dir / PLAN).exists():
            LOG.warning(f"{run_dir}: no figures: {error}")
        return None
    target, program, work = plan["target"], plan["program"], StepWork.of_plan_file(plan)
    metrics = run.steps
    last = metrics[-1] if metrics else {}
    times = [one["step_seconds"] for one in metrics[len(metrics) // 4 :]]  # the first steps are slower
    seconds = median_high(times) if times else Unknown("no step has ended")
    measured = no_figures(NOT_PROFILED).model_copy(update={"step_seconds": seconds}).rated(work)
    held_out = next((one["eval_loss"] for one in reversed(metrics) if one["eval_loss"] is not None), None)
    used = [f"{axis}={size}" for axis, size in plan["mesh"].items() if size > 1]
    return Figures(
        **dict(measured),
        basis="measured",
        model=model or spec["model"]["family"],
        target=target["name"],
        chip=target["chip"] or target["name"].partition("-")[0],
        num_chips=target["num_chips"],
        mesh=" x ".join(used) or "one device",
        global_batch_size=spec["global_batch_size"],
        num_microbatches=spec["num_microbatches"],
        tokens_per_step=program["tokens_per_step"],
        num_parameters=program["num_parameters"],
        final_loss=_finite(last.get("loss")),
        evaluation_loss=_finite(held_out),
        last_step=last.get("step"),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _first_error(said: str) -> str:
    """Returns the first error that a command printed, without its fix; else the last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    first = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    return first or (lines[-1] if lines else "it did not say why")


def _fatal_line(directory: Path, said: str) -> str | None:
    """Returns the last line that the compiler, or another library, printed before it ended the process."""
    log = directory / "logs" / "compiler.log"
    texts = [said, log.read_text(errors="replace") if log.is_file() else ""]
    for text in texts:
        for line in reversed(text.splitlines()):
            if line.startswith(("F0", "F1")) or "aborted while" in line or "terminate called" in line:
                return line.strip()
    return None
