"""Types that several config classes share."""

import unicodedata
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from meshloom.models.record import mistake

from .places import (
    PlaceError,
    cache_place,
    checkpoint_place,
    expanded,
    local_path,
    shards_place,
    weights_place,
    written_shards_place,
)


def _without_controls(text: str) -> str:
    """Refuses control characters, which neither a path nor a terminal accepts."""
    if not any(unicodedata.category(character) == "Cc" for character in text):
        return text
    what = f"{text!r} contains a control character"
    raise mistake(what, "leave it out")


def _as_place(find: Callable[[str], str]) -> AfterValidator:
    """Returns the validator of a place, which `find` returns with `~` expanded."""

    def validate(text: str) -> str:
        try:
            return find(text)
        except PlaceError as error:
            raise mistake(error.what, error.fix) from error

    return AfterValidator(validate)


def _compiler_option(value: Any) -> Any:
    """Raises one error, where a union would raise one for each of its types."""
    if isinstance(value, str) or (isinstance(value, int | float) and abs(value) < 2**63):
        return value
    raise mistake(f"{value} is not true, false, a number of 64 bits or text", "give a value of the option's type")


Fraction = Annotated[float, Field(ge=0, lt=1)]
UpToOne = Annotated[float, Field(ge=0, le=1)]
NumBytes = Annotated[int, Field(gt=0, lt=2**63)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # the range that a JAX random key accepts
Text = Annotated[str, Field(min_length=1), AfterValidator(_without_controls)]
Place = Annotated[Text, _as_place(expanded)]  # a path of this machine, or a URL
LocalPath = Annotated[Text, _as_place(local_path)]
CachePlace = Annotated[Text, _as_place(cache_place)]
CheckpointPlace = Annotated[Text, _as_place(checkpoint_place)]
WeightsPlace = Annotated[Text, _as_place(weights_place)]
ShardsPlace = Annotated[Text, _as_place(shards_place)]
WrittenShardsPlace = Annotated[Text, _as_place(written_shards_place)]
CompilerOption = Annotated[bool | int | float | str, BeforeValidator(_compiler_option)]
