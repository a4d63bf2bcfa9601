"""Types that several config classes share."""

import unicodedata
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError


def _without_controls(text: str) -> str:
    """Refuses control characters, which neither a path nor a terminal accepts."""
    if not any(unicodedata.category(character) == "Cc" for character in text):
        return text
    what = f"{text!r} contains a control character"
    raise PydanticCustomError("text", "{what}", {"what": what, "fix": "leave it out"})


FloatType = Literal["float32", "bfloat16"]
Fraction = Annotated[float, Field(ge=0, lt=1)]
UpToOne = Annotated[float, Field(ge=0, le=1)]
NumBytes = Annotated[int, Field(gt=0, lt=2**63)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # the range that a JAX random key accepts
Text = Annotated[str, Field(min_length=1), AfterValidator(_without_controls)]
