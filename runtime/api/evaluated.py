"""Evaluates the weights of a run, or published ones."""

from os import PathLike, fspath

from meshloom.compiler.core.console import Console
from meshloom.compiler.declare.compose import read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.declare.sections import EVALUATION, in_section

from ..inference.evaluate import Evaluation, EvaluationJob, evaluate_weights, prepare_evaluation
from ..inference.harness import TaskResults
from ..inference.run_request import request_of_run
from .library_call import library_call, settings_put_back, warn


def evaluate(place: str | PathLike[str], *overrides: str) -> Evaluation | TaskResults:
    """Returns the loss of weights: of a run directory, RUN/checkpoints/STEP, or a folder of published weights; with
    `tasks`, the results of lm-evaluation-harness.

    overrides: as after `meshloom evaluate RUN`: "data=jsonl", "split=all", "target=cpu-1". Raises
    ConfigError with all problems, and its subclass RunFailed for a loss that is not finite.
    """
    with settings_put_back(), library_call():
        job = read_spec(request_of_run(fspath(place), in_section(EVALUATION, overrides)), then=_prepare)
        return evaluate_weights(job, Console(is_quiet=True))


def _prepare(spec: RunSpec) -> EvaluationJob:
    return prepare_evaluation(spec, warn)
