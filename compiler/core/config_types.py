"""Types that several config classes share."""

import unicodedata
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from .places import (
    PlaceError,
    cache_place,
    checkpoint_place,
    expanded,
    local_path,
    shards_place,
    written_shards_place,
)


def _without_controls(text: str) -> str:
    """Refuses control characters, which neither a path nor a terminal accepts."""
    if not any(unicodedata.category(character) == "Cc" for character in text):
        return text
    what = f"{text!r} contains a control character"
    raise PydanticCustomError("text", "{what}", {"what": what, "fix": "leave it out"})


def _as_place(find: Callable[[str], str]) -> AfterValidator:
    """Returns the validator of a place, which `find` returns with `~` expanded."""

    def validate(text: str) -> str:
        try:
            return find(text)
        except PlaceError as error:
            raise PydanticCustomError("place", "{what}", {"what": error.what, "fix": error.fix}) from error

    return AfterValidator(validate)


FloatType = Literal["float32", "bfloat16"]
Fraction = Annotated[float, Field(ge=0, lt=1)]
UpToOne = Annotated[float, Field(ge=0, le=1)]
NumBytes = Annotated[int, Field(gt=0, lt=2**63)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # the range that a JAX random key accepts
Text = Annotated[str, Field(min_length=1), AfterValidator(_without_controls)]
Place = Annotated[Text, _as_place(expanded)]  # a path of this machine, or a URL
LocalPath = Annotated[Text, _as_place(local_path)]
CachePlace = Annotated[Text, _as_place(cache_place)]
CheckpointPlace = Annotated[Text, _as_place(checkpoint_place)]
ShardsPlace = Annotated[Text, _as_place(shards_place)]
WrittenShardsPlace = Annotated[Text, _as_place(written_shards_place)]
