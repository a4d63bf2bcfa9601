"""The bases of all typed nodes: frozen, complete, strict, and with numbers that a step can hold; and what a declaration
says of adapters (adapter.py).

What was declared of a number stays true in the types that a step computes in. It computes in float32 and counts in
int32. 0.99999999 is below 1, and 1.0 in float32; 1e-60 is 0 there, and 1e39 infinity; 10^30 is more than a program can
count.
"""

import math
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from .record import Record, mistake

if TYPE_CHECKING:
    from .contract import Model

MOST_COUNTED = 2**31 - 1
LEAST_FLOAT32 = 2.0**-126  # devices flush anything smaller to 0
MOST_FLOAT32 = (2 - 2.0**-23) * 2.0**127

Bound = Ge | Gt | Le | Lt


class Config(Record):
    """A frozen node of a declaration.

    No field has a default here: defaults are written once, in `conf/`. Numbers are those that a step can hold
    (`check_numbers`): a field of whole numbers that may be 2^31 or more declares an upper bound.
    """

    @field_validator("*", mode="after")
    @classmethod
    def _check_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        check_numbers(value, cls.model_fields[str(info.field_name)])
        return value


class ModelConfig(Config):
    """Every model, ours or a user's, is declared by a config of this class (docs/extend.md).

    The key `family` tells them apart. Ours declare it as their name; a user's class gets its import path for one.
    """

    if TYPE_CHECKING:
        family: Any

    vocab_size: PositiveInt

    def build(self) -> "Model":
        """Returns the pieces of the model; allocates nothing."""
        raise NotImplementedError


def check_numbers(value: Any, field: FieldInfo) -> None:
    """Raises a mistake for a number of a field, or one in its list, that a step cannot hold.

    A field of whole numbers that declares an upper bound is held to that one instead of int32's.
    """
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float):
            _check_float(number, tuple(_bounds(field.annotation, field.metadata)))
        elif isinstance(number, int) and abs(number) > MOST_COUNTED:
            if any(isinstance(bound, Le | Lt) for bound in _bounds(field.annotation, field.metadata)):
                continue
            side, most = ("most", MOST_COUNTED) if number > 0 else ("least", -MOST_COUNTED)
            raise mistake(f"{number} is out of range", f"give at {side} {most}")


def divisors(number: int) -> list[int]:
    """Returns all divisors, ascending: 12 -> [1, 2, 3, 4, 6, 12]."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def _check_float(number: float, bounds: tuple[Bound, ...]) -> None:
    if number and abs(number) < LEAST_FLOAT32:
        or_zero = " or 0" if _is_within(0.0, bounds) else ""
        raise mistake(f"{number} is 0 in float32", f"give at least {LEAST_FLOAT32:.8g}{or_zero}")
    if abs(number) > MOST_FLOAT32:
        raise mistake(f"{number} is infinity in float32", f"give at most {MOST_FLOAT32:.8g}")
    (rounded,) = struct.unpack("f", struct.pack("f", number))
    if not _is_within(rounded, bounds):
        import numpy as np

        is_above = rounded > number
        rounded = np.float32(rounded)
        nearest = np.nextafter(rounded, np.float32("-inf" if is_above else "inf"))
        raise mistake(f"{number} is {rounded!s} in float32", f"give at {'most' if is_above else 'least'} {nearest!s}")


def _bounds(annotation: Any, metadata: Any = ()) -> Iterator[Bound]:
    """Yields the bounds on a field's numbers, also those within a union and those of a list's elements."""
    for one in metadata:
        parts = one.metadata if isinstance(one, FieldInfo) else [one]
        yield from (part for part in parts if isinstance(part, Bound))
    inner, *own = get_args(annotation) or (None,)
    if get_origin(annotation) is Annotated:
        yield from _bounds(inner, own)
    else:
        for argument in get_args(annotation):
            yield from _bounds(argument)


def _is_within(number: Any, bounds: tuple[Bound, ...]) -> bool:
    return all(_holds(number, bound) for bound in bounds)


def _holds(number: Any, bound: Any) -> bool:
    match bound:
        case Gt():
            return number > bound.gt
        case Ge():
            return number >= bound.ge
        case Lt():
            return number < bound.lt
        case _:
            return number <= bound.le


def _as_name(text: str) -> str:
    if not text.isidentifier():
        raise mistake(f"{text!r} is no name of a type", "use nf4, int4, int8 or float8_e4m3fn")
    return text


class BaseConfig(Config):
    """How the frozen matrices of layers are stored under an adapter, in few bits with scales.

    element: the name of a type of compiler/formats. block: the numbers along what a matmul sums over that share a
    scale; None: all that are summed, a scale for each column. scales_block: the scales that share a scale in turn, each
    stored in a byte (double quantization); None: they stay in float32. A dimension of fewer scales, or one that is no
    multiple, takes the largest block below that divides it.
    """

    element: Annotated[str, AfterValidator(_as_name)]
    block: PositiveInt | None
    scales_block: PositiveInt | None


class AdapterConfig(Config):
    """The adapters of a model. targets: patterns of the paths of matrices; None: each matrix that a matmul of a layer
    reads, but those that are kept in float32, as routers are, and those of experts. base: how the matrices of the
    frozen layers are stored (QLoRA, arXiv:2305.14314); None: in `precision.frozen`."""

    if TYPE_CHECKING:
        kind: Any

    rank: PositiveInt
    alpha: PositiveFloat  # the change is multiplied by alpha / rank; of rslora by alpha / sqrt(rank)
    dropout: Annotated[float, Field(ge=0, lt=1)]  # of the input of A
    targets: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] | None
    base: BaseConfig | None

    @property
    def scale(self) -> float:
        """Returns the factor of A B."""
        return self.alpha / self.rank

    @property
    def has_magnitude(self) -> bool:
        """Returns True where the length of each column is trained."""
        return False


class LoraConfig(AdapterConfig):
    kind: Literal["lora"]


class RsLoraConfig(AdapterConfig):
    kind: Literal["rslora"]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank**0.5


class DoraConfig(AdapterConfig):
    kind: Literal["dora"]

    @property
    def has_magnitude(self) -> bool:
        return True
