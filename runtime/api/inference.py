"""Evaluates, and generates text, with the weights of a run or published ones."""

from collections.abc import Sequence
from os import PathLike, fspath
from typing import overload

from meshloom.compiler.core.console import Console
from meshloom.compiler.declare.compose import read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.declare.sections import EVALUATION, GENERATE, in_section

from ..inference.evaluate import Evaluation, EvaluationJob, evaluate_weights, prepare_evaluation
from ..inference.generate import Completion
from ..inference.generation_job import prepare_generation
from ..inference.harness import TaskResults
from ..inference.run_request import request_of_run
from .declared import library_call, settings_put_back, warn


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
        request = request_of_run(fspath(place), in_section(GENERATE, overrides))
        job = read_spec(request, then=lambda spec: prepare_generation(spec, prompts, warn))
        completions = [each for each in job.run(Console(is_quiet=True)) if isinstance(each, Completion)]
    completions.sort(key=lambda each: each.number)
    return completions[0] if isinstance(prompt, str) else completions
