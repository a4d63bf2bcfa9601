"""Sections of the declaration that one command takes without their name: `meshloom generate RUN prompt=TEXT`."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from meshloom.models.config import Config

from ..core.config_types import LocalPath, NumBytes, Place, Seed, Text
from ..core.float_types import ExportType
from .overrides import override

EVALUATION, EXPORT, GENERATE = "evaluation", "export", "generate"

StopText = Annotated[str, Field(min_length=1)]
TopP = Annotated[float, Field(gt=0, le=1)]


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


class ExportSpec(Config):
    """Settings of `meshloom export`: the form and the place of the weights that it writes."""

    format: Literal["huggingface", "safetensors", "orbax", "peft"]  # safetensors, orbax: under our own names;
    # peft: the adapter alone
    directory: LocalPath | None  # a new folder
    dtype: ExportType | None  # None: as where the run began; without that, bfloat16
    max_shard_bytes: NumBytes  # of the tensors in a file


class GenerateSpec(Config):
    """Settings of `meshloom generate`. prompt: a text; "" begins a document. chat: what a user says, which the chat
    template of the tokenizer's folder writes. prompts: a file with a prompt on each line, or JSON lines with `prompt`
    or `messages`. One of them is given."""

    prompt: str | None
    chat: str | None
    prompts: Place | None
    max_new_tokens: PositiveInt  # fewer where the model has no position left
    temperature: NonNegativeFloat  # 0: the likeliest token
    top_k: PositiveInt | None  # a token is one of so many of the likeliest
    top_p: TopP | None  # or of the fewest of the likeliest that are so probable together
    seed: Seed
    stop: tuple[StopText, ...]  # texts that end a completion, and are not part of it
    batch_size: PositiveInt  # prompts that run together


# The keys that a command takes without the section's name.
SECTION_KEYS: dict[str, tuple[str, ...]] = {
    EVALUATION: ("split", "num_batches", "tasks", "tasks_path", "num_fewshot", "num_examples"),
    EXPORT: tuple(ExportSpec.model_fields),
    GENERATE: tuple(GenerateSpec.model_fields),
}
_TEXTS = ("prompt", "chat", "prompts", "stop")  # keys of `generate` whose values are text as it stands


def in_section(section: str, words: Sequence[str]) -> list[str]:
    """Returns the words of a command line with the section's name before its keys: split=train ->
    evaluation.split=train.

    prompt=12, or more -> generate.prompt='12, or more'; a prompt is text, whatever Hydra's grammar would make of it.
    """
    return [_in_section(section, word) for word in words]


def _in_section(section: str, word: str) -> str:
    key, equals, value = word.partition("=")
    # Of max_tokens the error names max_new_tokens; of evaluations a run has keys with names like these.
    cutoff = 1 if section == EVALUATION else 0.75
    if not equals or not get_close_matches(key, SECTION_KEYS[section], cutoff=cutoff):
        return word
    is_list, is_null = key == "stop" and value.startswith("["), key in ("prompts", "stop") and value == "null"
    if section != GENERATE or key not in _TEXTS or is_list or is_null:
        return f"{section}.{word}"
    return override(f"{section}.{key}", [value] if key == "stop" else value)
