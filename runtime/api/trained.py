"""Runs a declaration from Python, and evaluates and generates text with the weights of a run or published ones."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import overload

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import counted
from meshloom.compiler.declare.compose import read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.declare.sections import EVALUATION, GENERATE, in_section

from ..inference.evaluate import Evaluation, EvaluationJob, evaluate_weights, prepare_evaluation
from ..inference.generate import Completion
from ..inference.generation_job import prepare_generation
from ..inference.harness import TaskResults
from ..inference.run_request import request_of_run
from ..processes.distributed import Processes
from ..processes.initialize import plan_start
from ..processes.process_log import meshloom_log
from ..rundir.folders import METRICS
from ..train.metrics import Metrics, read_metrics
from ..train.train import Job, prepare, run_training
from .declared import (
    Plan,
    check_overrides,
    library_call,
    request_of_origin,
    settings_put_back,
    shown_as,
    warn,
    with_spec,
)


@dataclass(frozen=True, repr=False)
class TrainedRun:
    """A run that has ended.

    metrics: the metrics of each step, including steps before a resume. stopped_by: the signal that ended the run early,
    such as SIGINT; the same call continues it. run_dir: the folder of its checkpoints; None if nothing was kept.
    """

    plan: Plan
    metrics: tuple[Metrics, ...]
    stopped_by: str | None
    run_dir: Path | None

    @property
    def losses(self) -> tuple[float, ...]:
        """Returns the loss of each step, in nats per token."""
        return tuple(each.loss for each in self.metrics)

    @property
    def held_out_loss(self) -> float | None:
        """Returns the latest loss of the held-out data; None if nothing was held out."""
        return next((each.eval_loss for each in reversed(self.metrics) if each.eval_loss is not None), None)

    def __repr__(self) -> str:
        loss = f", loss {self.losses[-1]:.3f}" if self.losses else ""
        stopped = f", stopped by {self.stopped_by}" if self.stopped_by else ""
        return f"<TrainedRun: {len(self.metrics)} of {counted(self.plan.spec.num_steps, 'step')}{loss}{stopped}>"


def train(*declared: str | RunSpec | Plan, run_dir: str | PathLike[str] | None = None) -> TrainedRun:
    """Trains a declaration, or the one that overrides compose, on the devices of this process.

    run_dir: a folder for the files of `meshloom train`; a call with the same folder continues from its last checkpoint.
    Without one, nothing is kept. Raises ConfigError with all problems, and its subclass RunFailed if training cannot
    continue.
    """
    began = time.time()
    with settings_put_back():
        job = with_spec(declared, _prepare_alone)
        spec = job.plan.spec
        job = replace(job, request=request_of_origin(spec.origin) if spec.origin.overrides is not None else None)
        with library_call(spec.origin.code_allowed_from), _folder(run_dir) as folder, meshloom_log(folder):
            quiet, overrides = Console(is_quiet=True), spec.origin.overrides or ()
            alone = Processes()
            exit_code = run_training(job, folder, overrides=overrides, console=quiet, processes=alone, began=began)
            metrics = tuple(map(read_metrics, _lines(folder / METRICS)))
    stopped_by = signal.Signals(exit_code - 128).name if exit_code else None
    return TrainedRun(shown_as(Plan, job.plan), metrics, stopped_by, None if run_dir is None else Path(run_dir))


def _prepare_alone(spec: RunSpec) -> Job:
    if plan_start(spec.distributed, spec.target, os.environ) is not None:
        what = "there are several processes, and each would train by itself here"
        fix = "start the command in all of them, such as `srun meshloom train`, or choose distributed=alone"
        raise ConfigError([Problem("distributed", what, fix)])
    return prepare(spec, warn)


@contextmanager
def _folder(run_dir: str | PathLike[str] | None) -> Iterator[Path]:
    if run_dir is not None:
        yield Path(run_dir)
        return
    with tempfile.TemporaryDirectory(prefix="meshloom-") as folder:
        yield Path(folder)


def _lines(path: Path) -> Sequence[str]:
    return path.read_text().splitlines() if path.exists() else ()  # without a file, nothing was left to do


def evaluate(place: str | PathLike[str], *overrides: str) -> Evaluation | TaskResults:
    """Returns the loss of weights: of a run directory, RUN/checkpoints/STEP, or a folder of published weights; with
    `tasks`, the results of lm-evaluation-harness.

    overrides: as after `meshloom evaluate RUN`: "data=jsonl", "split=all", "target=cpu-1". Raises
    ConfigError with all problems, and its subclass RunFailed for a loss that is not finite.
    """
    with settings_put_back(), library_call():
        job = read_spec(
            request_of_run(fspath(place), in_section(EVALUATION, check_overrides(overrides))), then=_prepare
        )
        return evaluate_weights(job, Console(is_quiet=True))


def _prepare(spec: RunSpec) -> EvaluationJob:
    return prepare_evaluation(spec, warn)


@overload
def generate(  # pyright: ignore[reportOverlappingOverload] (a text is a sequence of texts, too)
    place: str | PathLike[str], prompt: str, *overrides: str
) -> Completion: ...
@overload
def generate(place: str | PathLike[str], prompt: Sequence[str], *overrides: str) -> list[Completion]: ...
def generate(place: str | PathLike[str], prompt: str | Sequence[str], *overrides: str) -> Completion | list[Completion]:
    """Continues a prompt, or several, with the weights of a run or of a folder of published weights.

    overrides: as typed after `meshloom generate`: "temperature=0", "max_new_tokens=20", "target=cpu-1". Raises
    ConfigError with all problems.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    with settings_put_back(), library_call():
        request = request_of_run(fspath(place), in_section(GENERATE, check_overrides(overrides)))
        job = read_spec(request, then=lambda spec: prepare_generation(spec, prompts, warn))
        completions = [each for each in job.run(Console(is_quiet=True)) if isinstance(each, Completion)]
    completions.sort(key=lambda each: each.number)
    return completions[0] if isinstance(prompt, str) else completions
