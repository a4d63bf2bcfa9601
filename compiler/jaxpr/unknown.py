"""Primitives that the estimate does not know: their names, the lines that they are written at, and JAX's analysis.

geqrf at their_models.py:31, in layers: its lowering calls lapack_sgeqrf_ffi, whose cost JAX does not know
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ..core.kernels import RatedBy
from ..core.user_code import LIBRARIES, OURS, STDLIB

_PACKAGES = "site-packages"
_JAX = ("jax", "jaxlib")
_CALLED = re.compile(r"custom_call @([\w.$]+)")
_FIX = "write it with primitives that are counted (matmuls, convolutions, FFTs, scans)"
_FIX_KERNEL = "pass cost_estimate=pl.CostEstimate(flops=.., transcendentals=.., bytes_accessed=..) to pallas_call"
WHOLE = "its FLOPs are counted; its operands and results are taken as whole on each device"
EACH_BRANCH = "which of its {} branches runs depends on data; each is counted as often as the others"
_FIX_WHILE = "use jax.lax.scan, or jax.lax.fori_loop with bounds that are Python numbers"


@dataclass(frozen=True)
class CallCost:
    """The cost of one call. hbm_bytes: the bytes that the operation declares; None: each operand and result is moved
    once. rated_by: what its rate depends on; None: it is no kernel with a rate of its own."""

    flops: int
    hbm_bytes: int | None = None
    rated_by: RatedBy | None = None


@dataclass(frozen=True)
class UnknownPrimitive:
    """A primitive of which something is not known. name: "geqrf", "pallas_call 'my_kernel'". place: file and line.
    part: the part of the step. why: the reason why its cost is unknown; None where it is known except for what
    `counted` says."""

    name: str
    place: str
    part: str
    why: str | None
    fix: str
    counted: str = WHOLE

    def __str__(self) -> str:
        where = f"{self.name} at {self.place}, in {self.part}"
        if self.why is None:
            return f"{where}: {self.counted}"
        return f"{where}: {self.why}; {self.fix}"


def unknown_of(
    equation: Any, part: str, why: str | None, within: Sequence[Any], *, counted: str = WHOLE
) -> UnknownPrimitive:
    """Returns the record of an equation of which something is not known. within: the equations that call it, the
    outermost first: what JAX has traced once is placed by them."""
    name = equation.primitive.name
    fix = {"pallas_call": _FIX_KERNEL, "while": _FIX_WHILE}.get(name, _FIX)
    place = next(filter(None, map(_place_of, (equation, *reversed(within)))), "an unknown line")
    return UnknownPrimitive(_name_of(equation), place, part, why, fix, counted)


def _name_of(equation: Any) -> str:
    name, params = equation.primitive.name, equation.params
    if name == "pallas_call":
        function = str(getattr(getattr(params["jaxpr"], "debug_info", None), "func_src_info", ""))
        return f"pallas_call '{params.get('name') or function.partition(' at ')[0]}'"
    if name == "ffi_call":
        return f"ffi_call '{params['target_name']}'"
    return name


def _place_of(equation: Any) -> str | None:
    """Returns the file and line that an equation is written at: the innermost line of a user's code, or of whatever
    called JAX."""
    traceback = equation.source_info.traceback
    frames = [(Path(frame.file_name), frame.line_num) for frame in traceback.frames] if traceback else []
    callers = [frame for frame in frames if not _is_machinery(frame[0])]
    if not callers:
        return None
    until_ours = next((n for n, (path, _) in enumerate(callers) if path.is_relative_to(OURS)), len(callers))
    theirs = (frame for frame in callers[:until_ours] if _package(frame[0]) not in LIBRARIES)
    path, line = next(theirs, callers[0])
    return f"{_short(path)}:{line}"


def _is_machinery(path: Path) -> bool:
    """Returns True for a file of JAX or of Python itself, and for a path that is not a file."""
    if package := _package(path):
        return package in _JAX
    return str(path).startswith("<") or path.is_relative_to(STDLIB)


def _package(path: Path) -> str | None:
    """Returns the installed package that a file is part of."""
    return path.parts[path.parts.index(_PACKAGES) + 1] if _PACKAGES in path.parts else None


def _short(path: Path) -> str:
    for base in (Path.cwd(), OURS.parent):
        if path.is_relative_to(base):
            return str(path.relative_to(base))
    return str(path)


def ask_jax(equation: Any) -> int | str:
    """Returns the FLOPs of an equation by JAX's own analysis of its lowering, or why that fails. Nothing is compiled.

    The count is that of the whole call on one device. A lowering that calls code which XLA does not see, or that has a
    loop, is not counted: the analysis takes the first for zero and the second for a single trip.
    """
    function = jax.jit(lambda *args: equation.primitive.bind(*args, **equation.params))
    try:
        args = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            lowered = function.trace(*args).lower(lowering_platforms=("cpu",))
        text, cost = lowered.as_text(), lowered.cost_analysis()
    except Exception as error:  # a user's primitive may raise anything
        lines = str(error).splitlines() or [""]
        return f"JAX cannot lower it by itself ({type(error).__name__}: {lines[0][:200]})"
    if called := _CALLED.findall(text):
        return f"its lowering calls {called[0]}, whose cost JAX does not know"
    if "stablehlo.while" in text:
        return "its lowering has a loop whose trips JAX does not count"
    flops = (cost or {}).get("flops", 0.0)
    return int(flops) if flops >= 0 else "JAX's analysis of its lowering gives no FLOPs"
