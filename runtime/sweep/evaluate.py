"""Prices or compiles one point in this process. Its mistakes and crashes become outcomes, not exceptions."""

import logging
import time
from collections.abc import Callable
from typing import Any

import jax

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import DOES_NOT_FIT
from meshloom.compiler.core.user_imports import code_allowed_from
from meshloom.compiler.declare.choices import model_of
from meshloom.compiler.declare.compose import read_spec
from meshloom.compiler.declare.problems import MISTAKES, as_config_error
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import StepEstimate, estimate_step
from meshloom.compiler.plan import Plan
from meshloom.compiler.report.explain import explain

from ..compile.compile_command import Compiled, compile_step, prepare_compile, why_refused
from ..processes.devices import TooFewSimulated, plan_without_devices
from ..processes.distributed import Processes
from ..processes.process_log import process_log
from ..rundir.run_dir import as_typed
from .outcomes import outcome_of_error
from .rows import Figures, Outcome, SweepCommand, Task, lack

LOG = logging.getLogger("meshloom")
PLAN_TEXT = "plan.txt"


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
    plan = read_spec(task.request, then=_plan)
    estimate = estimate_step(plan)
    task.directory.mkdir(parents=True, exist_ok=True)
    with (task.directory / PLAN_TEXT).open("w", encoding="utf-8") as file:
        explain(plan, Console(file, width=240, is_terminal=False), estimate)
    return outcome_of_plan(plan, estimate, model_of(task.request))


def _plan(spec: RunSpec) -> Plan:
    plan_without_devices(spec.target)
    return plan_run(spec)


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
    figures = Figures(**dict(found), **_common(plan), basis="estimate", model=model or plan.spec.model.family)
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


def outcome_of_compiled(compiled: Compiled, plan: Plan) -> Outcome:
    """Returns the outcome of a compiled point."""
    report, refusal, step = compiled.report, compiled.refusal, compiled.stored.step
    figures = Figures(
        **dict(report.compiled.alone()),
        **_common(plan),
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
