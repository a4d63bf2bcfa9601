"""Runs the parts of a split batch in turns: one computes while the other communicates.

    part 1   gather  attention  sum, gather       MLP           sum
    part 2           gather     attention         sum, gather   MLP    sum

A turn begins with a gathered activation and ends with what is multiplied into partial results; within it nothing
crosses devices. The turns of all parts follow one another in every layer, and backward in the reverse order. Barriers
say so, each of which makes two activations available together:

    the end of a turn, and the beginning of the same turn of the next part
    the first activation made in a turn, and the sum of the partial results of the turn before

So a sum runs beside the first matmul of the turn after it, and the gather that follows it beside the rest of that turn.
From a turn of the last part to the next turn of the first one the second barrier is enough: with the first one the
product of the last part would wait for the gather, which then had nothing beside it. Without barriers a scheduler may
bring both parts to their gathers at the same time, and then nothing is left to hide these
(docs/tensor_parallelism.md).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from meshloom.models import Stack

from ..core.partition_spec import axes_in
from ..parallel.operation import OpPlan
from ..sharding.arrays import Arrays, gradient_name
from ..sharding.sharding import ShardingPlan
from ..target.target import TargetPlan

RunParts = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


def run_each(run: Callable[[Any], Any], parts: Sequence[Any]) -> list[Any]:
    """Returns what `run` makes of each part, and leaves their order to the compiler."""
    return [run(part) for part in parts]


@dataclass(frozen=True)
class TurnNames:
    """The activations at which turns begin and end, and the sums of the partial results."""

    begins: frozenset[str]
    ends: frozenset[str]
    sums: frozenset[str]


@dataclass(frozen=True)
class _Turn:
    """The numbers of the operations that name activations of a turn: the first and the last one, the first one that is
    made in it, and the sum of its partial results; None where there is none."""

    begin: int
    made: int | None
    end: int
    sum: int | None


def takes_turns(stack: Stack, arrays: Arrays, target: TargetPlan) -> bool:
    """Returns True where the parts of a split batch run in turns in a stack: its compiler keeps the order of barriers,
    and its layers have no auxiliary outputs, which may be functions."""
    has_aux = stack.measures or stack.rules or any(each.startswith(f"{stack.name}/") for each in arrays.auxiliary)
    return target.compiler.orders_by_barriers and not has_aux


def turn_names(sharding: ShardingPlan, operations: Iterable[OpPlan]) -> TurnNames:
    """Returns the activations that are gathered, with gradients in shards, those that are multiplied into partial
    results, and the sums of these. operations: those of the layers."""
    axes = {planned.array.path: set(axes_in(planned.spec)) for planned in sharding.activations}
    gathered = (name for name in axes if axes.get(gradient_name(name), set()) > axes[name])
    matmuls = [one.site for one in operations if one.op.multiplied(one.site) and one.chosen.collectives]
    multiplied = (site.operands[0].activation for site in matmuls)
    ends = frozenset(name for name in multiplied if name is not None)
    return TurnNames(frozenset(gathered), ends, frozenset(site.name for site in matmuls))


def run_in_turns(names: TurnNames, run: Callable[[Any], Any], parts: Sequence[Any]) -> list[Any]:
    """Returns what `run` makes of each part. parts: trees of equal structure, with arrays of equal shapes. Within calls
    of the traced program, such as layers that are recomputed alone, turns are not looked for."""
    closed, shape = jax.make_jaxpr(run, return_shape=True)(parts[0])
    traced = [_Traced(closed, jax.tree.leaves(part)) for part in parts]
    last: tuple[_Traced, _Turn] | None = None
    for turn in _turns(closed.jaxpr, names):
        for one in traced:
            if last is not None:
                _follow(one, turn, *last)
            one.run_through(turn.end)
            last = one, turn
    structure = jax.tree.structure(shape)
    return [structure.unflatten(one.finished()) for one in traced]


def _follow(one: "_Traced", turn: _Turn, before: "_Traced", last: _Turn) -> None:
    """Makes a turn of one part follow the last turn of the part before."""
    if turn is last or turn.made is None or last.sum is None:
        _together(before, last.end, one, turn.begin)
    if turn.made is not None and last.sum is not None:
        _together(one, turn.made, before, last.sum)


def _together(one: "_Traced", number: int, other: "_Traced", other_number: int) -> None:
    """Makes the results of two operations available together."""
    a, b = one.run_through(number), other.run_through(other_number)
    one.values[a], other.values[b] = jax.lax.optimization_barrier((one.values[a], other.values[b]))


def _turns(jaxpr: Jaxpr, names: TurnNames) -> Iterator[_Turn]:
    """Yields the turns of a program."""
    named = [(number, each.params["name"]) for number, each in enumerate(jaxpr.eqns) if each.primitive.name == "name"]
    begin: int | None = None
    for place, (number, name) in enumerate(named):
        if name in names.begins:
            begin = place
        elif name in names.ends and begin is not None:
            made = [inside for inside, _ in named[begin + 1 : place]]
            sums = (later for later, name in named[place + 1 :] if name in names.sums)
            yield _Turn(named[begin][0], next(iter(made), None), number, next(sums, None))
            begin = None


class _Traced:
    """A traced program that runs up to one operation after another. values: those of its variables so far."""

    def __init__(self, closed: ClosedJaxpr, arguments: Sequence[Any]) -> None:
        self._jaxpr, self._num_run = closed.jaxpr, 0
        variables = (*closed.jaxpr.constvars, *closed.jaxpr.invars)
        self.values: dict[Var, Any] = dict(zip(variables, (*closed.consts, *arguments), strict=True))

    def run_through(self, last: int) -> Var:
        """Runs until an operation has run, if it has not, and returns the variable that it makes."""
        if last < self._num_run:
            return self._jaxpr.eqns[last].outvars[0]
        piece = self._jaxpr.eqns[self._num_run : last + 1]
        operands = (x for each in piece for x in each.invars if not isinstance(x, Literal))
        read = list(dict.fromkeys(x for x in operands if x in self.values))
        made = [x for each in piece for x in each.outvars]
        debug_info = self._jaxpr.debug_info.with_unknown_names()
        program = self._jaxpr.replace(constvars=[], invars=read, outvars=made, eqns=piece, debug_info=debug_info)
        results = jaxpr_as_fun(ClosedJaxpr(program, []))(*(self.values[x] for x in read))
        self.values.update(zip(made, results, strict=True))
        self._num_run = last + 1
        return self._jaxpr.eqns[last].outvars[0]

    def finished(self) -> list[Any]:
        """Runs the rest, and returns the results of the program."""
        if self._num_run < len(self._jaxpr.eqns):
            self.run_through(len(self._jaxpr.eqns) - 1)
        return [x.val if isinstance(x, Literal) else self.values[x] for x in self._jaxpr.outvars]
