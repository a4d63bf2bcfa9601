"""A point, priced or compiled in this process. Nothing that a point does wrong comes out as an exception."""

import logging
import time
from collections.abc import Callable

import jax

from meshloom.compiler.config.allowed_code import code_allowed_from
from meshloom.compiler.config.compose import read_spec
from meshloom.compiler.config.composition_errors import MISTAKES, as_config_error
from meshloom.compiler.config.model_choice import model_of
from meshloom.compiler.config.spec import RunSpec
from meshloom.compiler.core.console import Console
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.plan import Plan
from meshloom.compiler.report.explain import explain

from ..compile.compile_command import compile_step, prepare_compile
from ..processes.devices import TooFewSimulated, plan_without_devices
from ..processes.distributed import Processes
from ..processes.process_log import process_log
from ..rundir.run_dir import as_typed
from .outcomes import outcome_of_compiled, outcome_of_error, outcome_of_plan
from .points import Outcome, SweepCommand, Task

LOG = logging.getLogger("meshloom")
PLAN_TEXT = "plan.txt"


def evaluate(task: Task) -> Outcome | None:
    """Returns what a point of `explain` or `compile` came to; None where it needs a process of its own, as JAX has
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
