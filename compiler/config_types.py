"""Types that several config classes share."""

from typing import Annotated, Literal

from pydantic import Field

FloatType = Literal["float32", "bfloat16"]
Fraction = Annotated[float, Field(ge=0, lt=1)]
UpToOne = Annotated[float, Field(ge=0, le=1)]
