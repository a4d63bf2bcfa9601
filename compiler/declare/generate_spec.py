"""Settings of `meshloom generate`: what it continues, how it chooses tokens, and when it stops."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt

from meshloom.models.config import Config

from ..core.config_types import LocalPath, Seed
from .overrides import override

STOP_TEXT = Annotated[str, Field(min_length=1)]
TopP = Annotated[float, Field(gt=0, le=1)]


class GenerateSpec(Config):
    """Settings of `meshloom generate`. prompt: a text; "" begins a document. chat: what a user says, which the chat
    template of the tokenizer's folder writes. prompts: a file with a prompt on each line, or JSON lines with `prompt`
    or `messages`. One of them is given."""

    prompt: str | None
    chat: str | None
    prompts: LocalPath | None
    max_new_tokens: PositiveInt  # fewer where the model has no position left
    temperature: NonNegativeFloat  # 0: the likeliest token
    top_k: PositiveInt | None  # a token is one of so many of the likeliest
    top_p: TopP | None  # or of the fewest of the likeliest that are so probable together
    seed: Seed
    stop: tuple[STOP_TEXT, ...]  # texts that end a completion, and are not part of it
    batch_size: PositiveInt  # prompts that run together


SECTION = "generate"
_TEXTS = ("prompt", "chat", "prompts", "stop")  # keys whose values are text as it stands


def in_generate_section(words: Sequence[str]) -> list[str]:
    """Returns the words of a command line with the keys of this section, which it takes without the section's name.

    prompt=12, or more -> generate.prompt='12, or more'; a prompt is text, whatever Hydra's grammar would make of it.
    """
    return [_in_section(word) for word in words]


def _in_section(word: str) -> str:
    key, equals, value = word.partition("=")
    keys = list(GenerateSpec.model_fields)
    if not equals or not get_close_matches(key, keys, cutoff=0.75):  # of max_tokens the error names max_new_tokens
        return word
    if (
        key not in _TEXTS
        or (key == "stop" and value.startswith("["))
        or (key in ("prompts", "stop") and value == "null")
    ):
        return f"{SECTION}.{word}"
    return override(f"{SECTION}.{key}", [value] if key == "stop" else value)
