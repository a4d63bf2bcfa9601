"""Meshloom: a training run is declared, compiled ahead of time, proved from its schedule, and run.

    import meshloom

    spec = meshloom.compose("model=tiny", "sharding=fsdp")     # a declaration; ConfigError has all that is wrong
    plan = meshloom.plan(spec)                                 # what lies where and why, without a device
    step = meshloom.compile(plan)                              # step.fits, step.report
    run = meshloom.train(spec, run_dir="runs/first")           # run.losses

docs/python.md has examples. Nothing heavy is imported before a name is used.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshloom.compiler.core.errors import ConfigError, Problem
    from meshloom.compiler.declare.run_spec import RunSpec
    from meshloom.runtime.api.compiled import CompiledStep, Report, compile, report
    from meshloom.runtime.api.declared import Explanation, Plan, compose, explain, plan
    from meshloom.runtime.api.inspected import Inspection, inspect
    from meshloom.runtime.api.judged import Judgement, inspect_profile
    from meshloom.runtime.api.loaded import LoadedModel, load
    from meshloom.runtime.api.trained import TrainedRun, evaluate, generate, train
    from meshloom.runtime.core.failures import RunFailed
    from meshloom.runtime.inference.evaluate import Evaluation
    from meshloom.runtime.inference.generate import Completion
    from meshloom.runtime.train.metrics import Metrics
    from meshloom.runtime.train.trackers import TrackedRun, Tracker

# The real folders first, so that tracebacks and breakpoints name the files one edits.
__path__ = [str((Path(__file__).parent / "compiler").resolve().parent), *__path__]
__version__ = "0.1.0"
__all__ = [
    "CompiledStep",
    "Completion",
    "ConfigError",
    "Evaluation",
    "Explanation",
    "Inspection",
    "Judgement",
    "LoadedModel",
    "Metrics",
    "Plan",
    "Problem",
    "Report",
    "RunFailed",
    "RunSpec",
    "TrackedRun",
    "Tracker",
    "TrainedRun",
    "compile",
    "compose",
    "evaluate",
    "explain",
    "generate",
    "inspect",
    "inspect_profile",
    "load",
    "plan",
    "report",
    "train",
]
_PLACES = {  # of the names above; a module is imported when one of its names is used
    "compiler.declare.run_spec": ("RunSpec",),
    "compiler.core.errors": ("ConfigError", "Problem"),
    "runtime.api.compiled": ("CompiledStep", "Report", "compile", "report"),
    "runtime.api.declared": ("Explanation", "Plan", "compose", "explain", "plan"),
    "runtime.api.inspected": ("Inspection", "inspect"),
    "runtime.api.judged": ("Judgement", "inspect_profile"),
    "runtime.api.loaded": ("LoadedModel", "load"),
    "runtime.api.trained": ("TrainedRun", "evaluate", "generate", "train"),
    "runtime.core.failures": ("RunFailed",),
    "runtime.inference.evaluate": ("Evaluation",),
    "runtime.inference.generate": ("Completion",),
    "runtime.train.metrics": ("Metrics",),
    "runtime.train.trackers": ("TrackedRun", "Tracker"),
}


def __getattr__(name: str) -> Any:
    place = next((place for place, names in _PLACES.items() if name in names), None)
    if place is None:
        raise AttributeError(f"module 'meshloom' has no attribute '{name}'")
    globals()[name] = value = getattr(import_module(f"meshloom.{place}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
