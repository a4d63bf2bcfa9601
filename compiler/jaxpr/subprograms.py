"""The programs that an equation of a jaxpr calls, and how often each runs: bodies of loops, branches of conds.

This is the one place that knows where versions of JAX write them differently. Before JAX 0.12 a loop's body is a
ClosedJaxpr around a Jaxpr, and a scan counts its arguments; since then there are no ClosedJaxprs, and a scan groups its
arguments in trees.

How often a branch runs follows from its index, which is computed for every trip of the loops around the cond:

    scan over t = 0 .. 3:  cond(t < 3, gather, keep)    ->    gather 3/4, keep 1/4

A known value is an array (stages, trips of each loop around, outermost first, shape of the value), of length 1 along
axes that it does not depend on. Constants, counters of loops, `axis_index` of the stages, the platform, and integer
arithmetic and slices of these are known. Values that depend on data are not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from jax.extend.core import Literal as Constant

from ..core.partition_spec import STAGE

Known = np.ndarray[Any, Any]

_ELEMENTWISE: Mapping[str, Callable[..., Known]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "rem": np.fmod, "neg": np.negative, "sign": np.sign,
    "max": np.maximum, "min": np.minimum, "abs": np.abs, "eq": np.equal, "ne": np.not_equal, "lt": np.less,
    "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "and": np.bitwise_and, "or": np.bitwise_or,
    "not": np.bitwise_not, "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
    "div": lambda x, y: np.trunc(x / y).astype(np.result_type(x, y)),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}  # fmt: skip
_RESHAPING = {"reshape", "squeeze", "expand_dims", "copy", "pvary"}


@dataclass(frozen=True)
class Scan:
    """The body and the counts of a scan. Its arguments are constants, values that a trip hands to the next, and arrays
    that are sliced by trip; its results are carried values, then stacked ones. Inside of the body they are the same,
    without the dimension of the trips."""

    body: Jaxpr
    num_consts: int
    num_carried: int
    num_trips: int


def scan_of(params: Mapping[str, Any]) -> Scan:
    """Returns the body and the counts of a `scan` equation, from its parameters."""
    if "ft_in" in params:
        consts, carried, _ = params["ft_in"].unpack()
        num_consts, num_carried = len(consts), len(carried)
    else:
        num_consts, num_carried = params["num_consts"], params["num_carry"]
    return Scan(without_consts(params["jaxpr"]), num_consts, num_carried, params["length"])


def without_consts(jaxpr: Any) -> Jaxpr:
    """Returns the jaxpr of a jaxpr or a ClosedJaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def consts_of(jaxpr: Jaxpr) -> Sequence[Any]:
    """Returns the variables of a jaxpr that stand for constants."""
    return getattr(jaxpr, "constvars", ())


def subprograms(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    """Yields the jaxprs that an equation calls."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else [value]:
            jaxpr = without_consts(item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def consts_within(params: Mapping[str, Any]) -> dict[Any, Any]:
    """Returns the values of the constants of the jaxprs that an equation calls, by variable."""
    found: dict[Any, Any] = {}
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else [value]:
            if values := getattr(item, "consts", ()):
                found |= zip(consts_of(without_consts(item)), values, strict=True)
    return found


@dataclass
class KnownValues:
    """The values of a jaxpr, or of a body, that can be computed. made: equations with their operands, by result;
    nothing is computed before a cond asks. given: functions that compute values from outside. found: what was computed.
    runs: the trips in which it runs. numbers: the literals, with their types."""

    num_stages: int
    platform: str | None
    num_loops: int = 0
    runs: Known = field(default_factory=lambda: np.ones((1,), bool))
    made: dict[int, tuple[Any, Sequence[int]]] = field(default_factory=dict)
    given: dict[int, Callable[[], Known | None]] = field(default_factory=dict)
    found: dict[int, Known | None] = field(default_factory=dict)
    numbers: dict[int, Any] = field(default_factory=dict)

    def identity(self, value: int) -> Any:
        """Returns what two values have in common that are equal wherever they are read: a number, or the value."""
        return self.numbers.get(value, value)

    def set_literal(self, value: int, literal: Any) -> None:
        if np.ndim(literal) == 0:
            self.numbers[value] = str(np.asarray(literal).dtype), repr(literal)
        self.given[value] = lambda: self._constant(np.asarray(literal))

    def find(self, value: int) -> Known | None:
        """Returns a value; None if it is not known."""
        if value not in self.found:
            self.found[value] = self._compute(value)
        return self.found[value]

    def _compute(self, value: int) -> Known | None:
        if value in self.given:
            return self.given[value]()
        if value not in self.made:
            return None
        equation, operands = self.made[value]
        name, params, dtype = equation.primitive.name, equation.params, equation.outvars[0].aval.dtype
        if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer)):
            return None
        if name == "iota":
            shape, dimension = params["shape"], params["dimension"]
            return self._constant(np.broadcast_to(_along(dimension, shape[dimension], len(shape)), shape))
        if name == "axis_index" and params["axis_name"] == STAGE:
            return _along(0, self.num_stages, 1 + self.num_loops)
        if name == "platform_index":
            return self._platform_index(params["platforms"])
        if name not in (*_ELEMENTWISE, *_RESHAPING, "convert_element_type", "dynamic_slice", "slice"):
            return None
        found = [self.find(i) for i in operands]
        known = [x for x in found if x is not None]
        if len(known) < len(found):
            return None
        if name == "convert_element_type":
            return known[0].astype(params["new_dtype"])
        if name == "dynamic_slice":
            return _sliced(known[0], known[1:], params["slice_sizes"], 1 + self.num_loops)
        if name == "slice":
            steps = params["strides"] or (1,) * len(params["start_indices"])
            taken = map(slice, params["start_indices"], params["limit_indices"], steps)
            return known[0][(slice(None),) * (1 + self.num_loops) + tuple(taken)]
        if name in _RESHAPING:
            return known[0].reshape(*known[0].shape[: 1 + self.num_loops], *equation.outvars[0].aval.shape)
        return _ELEMENTWISE[name](*known)

    def shares(self, index: int, num_branches: int) -> list[tuple[float, ...]] | None:
        """Returns the share of its executions in which a cond runs each branch, on each stage; None if its index is not
        known."""
        found = self.chosen(index, num_branches)
        if found is None:
            return None
        return [self._share(found == branch) for branch in range(num_branches)]

    def chosen(self, index: int, num_branches: int) -> Known | None:
        """Returns the branch that a cond runs; None if it is not known."""
        found = self.find(index)
        return None if found is None else np.clip(found, 0, num_branches - 1)

    def by_tick(self, index: int, num_branches: int) -> tuple[tuple[int, ...], ...]:
        """Returns the branch of each stage for each trip of the one loop around a cond; () where that is not known."""
        found = self.chosen(index, num_branches)
        if found is None or found.ndim != 2 or found.shape[1] == 1:
            return ()
        every = np.broadcast_to(found, (self.num_stages, found.shape[1]))
        return tuple(tuple(map(int, trip)) for trip in every.T)

    def differs_between_stages(self, index: int, num_branches: int) -> bool:
        """Returns True if stages are known to run different branches of a cond in the same trip."""
        found = self.chosen(index, num_branches)
        return found is not None and bool((found != found[:1]).any())

    def _share(self, is_chosen: Known) -> tuple[float, ...]:
        chosen, runs = np.broadcast_arrays(is_chosen, self.runs)
        trips = tuple(range(1, runs.ndim))
        return tuple(((chosen & runs).sum(axis=trips) / np.maximum(1, runs.sum(axis=trips))).tolist())

    def branch(self, index: int, branch: int, num_branches: int, operands: Sequence[int]) -> "KnownValues":
        """Returns the known values of a branch, whose inputs are its values 0, 1, ..."""
        found = self.chosen(index, num_branches)
        runs = self.runs if found is None else self.runs & (found == branch)
        inner = KnownValues(self.num_stages, self.platform, self.num_loops, runs)
        inner.given = {place: lambda i=i: self.find(i) for place, i in enumerate(operands)}
        return inner

    def inside_loop(self) -> "KnownValues":
        """Returns the known values of a loop's body, none of whose inputs is known."""
        runs = np.expand_dims(self.runs, 1 + self.num_loops)
        return KnownValues(self.num_stages, self.platform, self.num_loops + 1, runs)

    def inside_scan(self, scan: Scan, operands: Sequence[int], *, is_reversed: bool) -> "KnownValues":
        """Returns the known values of the body of a scan."""
        inner, axis = self.inside_loop(), 1 + self.num_loops

        def repeated(i: int) -> Known | None:
            known = self.find(i)
            return None if known is None else np.expand_dims(known, axis)

        def sliced(i: int) -> Known | None:
            known = self.find(i)
            return np.flip(known, axis) if known is not None and is_reversed else known

        def counted(i: int, step: int, num_trips: int) -> Known | None:
            first = repeated(i)
            return None if first is None else first + step * _along(axis, num_trips, axis + 1)

        for place, i in enumerate(operands):
            carried = place - scan.num_consts
            if carried < 0:
                inner.given[place] = lambda i=i: repeated(i)
            elif carried >= scan.num_carried:
                inner.given[place] = lambda i=i: sliced(i)
            elif step := _added_by_a_trip(scan.body, place, carried):
                inner.given[place] = lambda i=i, step=step: counted(i, step, scan.num_trips)
        return inner

    def _constant(self, value: Known) -> Known:
        return value.reshape([1] * (1 + self.num_loops) + list(value.shape))

    def _platform_index(self, platforms: Sequence[Sequence[str] | None]) -> Known | None:
        names = ("cuda", "rocm") if self.platform == "gpu" else (self.platform,)
        fits = (place for place, one in enumerate(platforms) if one is None or set(one) & set(names))
        found = next(fits, None) if self.platform else None
        return None if found is None else self._constant(np.asarray(found))


def _sliced(value: Known, starts: Sequence[Known], sizes: Sequence[int], num_outer: int) -> Known:
    """Returns a slice of a value, which may start elsewhere on each stage and in each trip."""
    for place, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        axis = num_outer + place
        first = np.clip(start, 0, value.shape[axis] - size).reshape(*start.shape, *[1] * len(sizes))
        value = np.take_along_axis(value, first + _along(axis, size, value.ndim), axis)
    return value


def _along(axis: int, length: int, num_axes: int) -> Known:
    """Returns 0, 1, .. along one of so many axes."""
    return np.arange(length).reshape([-1 if each == axis else 1 for each in range(num_axes)])


def _added_by_a_trip(body: Jaxpr, place: int, carried: int) -> int | None:
    """Returns the number that each trip adds to a carried value, such as the counter of a `fori_loop`."""
    before, after = body.invars[place], body.outvars[carried]
    for equation in body.eqns:
        if equation.primitive.name == "add" and equation.outvars[0] is after and equation.invars[0] is before:
            added = equation.invars[1]
            return int(added.val) if isinstance(added, Constant) and not np.shape(added.val) else None
    return None
