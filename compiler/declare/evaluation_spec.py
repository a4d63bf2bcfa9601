"""Settings of evaluations: those of a run, and those of `meshloom evaluate`."""

from collections.abc import Sequence
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from meshloom.models.config import Config

from ..core.config_types import LocalPath, Text

SECTION = "evaluation"
OF_THE_COMMAND = ("split", "num_batches", "tasks", "tasks_path", "num_fewshot", "num_examples")


class EvaluationSpec(Config):
    """The evaluations of a run and of `meshloom evaluate`: always the same batches, in the same order.

    Fields after num_batches apply only to `meshloom evaluate`. tasks: of lm-evaluation-harness, which then run instead
    of the loss on data. num_examples: the first ones of each task. num_fewshot: examples before each question.
    """

    every_num_steps: PositiveInt
    num_batches: PositiveInt
    split: Literal["held_out", "train", "all"]  # a run evaluates what it holds out
    tasks: tuple[Text, ...]
    tasks_path: LocalPath | None  # a folder of task files, besides those of the harness
    num_fewshot: NonNegativeInt | None  # None: as each task says
    num_examples: PositiveInt | None  # None: all


def in_evaluation(words: Sequence[str]) -> list[str]:
    """Returns the words of `meshloom evaluate`, which takes the keys of this section without its name: split=train ->
    evaluation.split=train."""
    return [f"{SECTION}.{word}" if word.partition("=")[0] in OF_THE_COMMAND else word for word in words]
