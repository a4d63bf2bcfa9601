"""The types of numbers in which steps are stored and computed, by all of their names.

A new type is its names here, its peak in the files of chips (conf/target), and a file of conf/precision. A type of few
bits with scales is a file of compiler/formats.
"""

import re
from typing import Any, Literal, get_args

FloatType = Literal["float32", "bfloat16"]  # of arrays that are stored, accumulated or reduced
ComputeType = Literal["float32", "bfloat16", "float16"]  # in which a model computes
ExportType = Literal["bfloat16", "float16", "float32"]  # in which weights are written for others
MomentType = Literal["float32", "bfloat16", "int8", "float8"]  # of an optimizer's moments (compiler/optim/moments.py)
ScaleType = Literal["float32", "bfloat16", "power_of_two", "power_of_two_above"]  # of blocks (compiler/formats)
PeakType = Literal["float32", "bfloat16", "float16", "int8", "float8", "float4"]  # that chips have a peak for

FEW_BITS = frozenset[PeakType]({"int8", "float8", "float4"})

XLA_NAMES = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
NARROW = {name: XLA_NAMES[name] for name in ("bfloat16", "float16")}  # half of the bytes of float32

_KINDS = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}


def numpy_name(dtype: str) -> str:
    """Returns NumPy's name for XLA's name of a type: bf16 -> bfloat16, s32 -> int32, f8e4m3fn -> float8_e4m3fn."""
    if dtype == "pred":
        return "bool"
    kind, bits, form = re.fullmatch(r"([a-z]+)(\d*)(\w*)", dtype).groups()  # type: ignore[union-attr]
    return f"{_KINDS.get(kind, kind)}{bits}{f'_{form}' if form else ''}"


def peak_name(dtype: str) -> PeakType:
    """Returns the name of the peak of a type, by XLA's name or NumPy's: bf16 -> bfloat16, f8e4m3fn -> float8."""
    name = numpy_name(dtype)
    known = next((peak for peak in get_args(PeakType) if name == peak), None)
    if known is not None:
        return known
    if name.startswith("float4"):
        return "float4"
    return "float8" if name.startswith("float8") else "int8" if name == "uint8" else "float32"


def num_bits(dtype: Any) -> int:
    """Returns the bits of a number of JAX's type: types of less than a byte are packed in memory and on networks."""
    found = re.match(r"(?:u?int|float)(\d+)", str(dtype))
    return 4 if found and found[1] == "4" else dtype.itemsize * 8
