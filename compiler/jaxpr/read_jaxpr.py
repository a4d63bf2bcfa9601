"""A traced program, read without a compiler: operations in order, bytes on a device of each value.

Calls are inlined; loops and conds keep their bodies, each with its number of executions (subprograms.py). Values that
are split over auto axes are followed through the operations (propagate.py); an operation that contracts a split
dimension brings an all-reduce.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr
from jax.extend.core import Literal as Constant

from ..core.errors import Problem, raise_if_any
from ..core.kernels import KernelOwner
from ..core.partition_spec import STAGE, Axes, axes_of
from ..core.scopes import ENCODED, OperationName, nested_scope
from ..core.traffic import AxisGroups, CollectiveKind, DeviceTraffic
from .flops import TRIPS, calls_one, contracted_dims, cost_of, kernel_cost_of
from .program import COLLECTIVES, Body, Kind, Operation, Program, equation_kind
from .propagate import DimAxes, propagate, taken
from .subprograms import KnownValues, consts_of, consts_within, scan_of, subprograms, without_consts
from .unknown import EACH_BRANCH, CallCost, unknown_of
from .values import ADDITIONS, Partial, ProgramValues


def read_jaxpr(
    jaxpr: Jaxpr,
    layouts: Sequence[DimAxes],
    mesh_sizes: Mapping[str, int],
    *,
    joins_sums: bool = True,
    ops: Sequence[KernelOwner] = (),
    platform: str | None = None,
    consts: Sequence[Any] = (),
) -> Program:
    """Returns the program of a jaxpr whose arguments have these layouts. joins_sums: the compiler adds partial results
    of several matmuls up before it sums them over devices, and sums into shards where shards are wanted. ops:
    operations that know their own kernels. platform: the one that the program runs on; None: any. consts: the values of
    the jaxpr's constants, such as the table of a pipeline. Raises ConfigError for a program whose stages would wait for
    each other forever."""
    known = KnownValues(mesh_sizes.get(STAGE, 1), platform)
    values = dict(zip(consts_of(jaxpr), consts, strict=False))
    return _Reader(mesh_sizes, joins_sums, ops, known, consts=values).read(jaxpr, layouts, "")


def layout_of(spec: Any, rank: int) -> DimAxes:
    """Returns the mesh axes of each dimension, from a PartitionSpec that may be shorter than the rank."""
    entries = [axes_of(entry) for entry in spec]
    return (*entries, *[()] * (rank - len(entries)))


@dataclass
class _Reader(ProgramValues):
    """Reads one jaxpr; each body of a loop or a cond has a reader of its own."""

    ops: Sequence[KernelOwner]
    known: KnownValues
    within: tuple[Any, ...] = ()  # the equations that call what is read
    consts: dict[Any, Any] = field(default_factory=dict[Any, Any])  # the values of constants, by variable
    tables: dict[tuple[int, tuple[int, ...]], DimAxes] = field(default_factory=dict)  # by indices and shape: `gather`'s
    encoded: dict[Any, list[int]] = field(default_factory=dict)  # results of operations that encode, by what they read

    def read(self, jaxpr: Jaxpr, layouts: Sequence[DimAxes], scope: str) -> Program:
        inputs = [self.value(x.aval, layout) for x, layout in zip(jaxpr.invars, layouts, strict=True)]
        outputs = [self.summed(self.in_shards(i)) for i in self.inline(jaxpr, inputs, scope)]
        self.pad()
        sizes, host_sizes = tuple(self.sizes), tuple(self.host_sizes)
        return Program(tuple(self.operations), sizes, host_sizes, tuple(self.dtypes), tuple(inputs), tuple(outputs))

    def inline(self, jaxpr: Jaxpr, inputs: Sequence[int], scope: str) -> list[int]:
        """Appends the operations of a jaxpr whose arguments are these values. Returns the values of its results."""
        known: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))

        def index(x: Any) -> int:
            if not isinstance(x, Constant) and x in known:
                return known[x]
            value = self.value(x.aval, ((),) * getattr(x.aval, "ndim", 0))  # a literal, or a value that is dropped
            if isinstance(x, Constant):
                self.known.set_literal(value, x.val)
            elif x in self.consts:
                self.known.set_literal(value, self.consts[x])
            return value

        for equation in jaxpr.eqns:
            operands = [index(x) for x in equation.invars]
            inner = nested_scope(scope, str(equation.source_info.name_stack))
            results = self.equation(equation, operands, inner)
            known.update(zip(equation.outvars, results, strict=True))
        return [index(x) for x in jaxpr.outvars]

    def equation(self, equation: Any, operands: list[int], scope: str) -> list[int]:
        self.consts |= consts_within(equation.params)
        outside, self.within = self.within, (*self.within, equation)
        results = self.called(equation, operands, scope)
        self.within = outside
        return results

    def called(self, equation: Any, operands: list[int], scope: str) -> list[int]:
        name, params = equation.primitive.name, equation.params
        if name in ("shard_map", "scan", "while", "cond"):
            operands = [self.summed(self.in_shards(i)) for i in operands]
        if name == "shard_map":
            return self.shard_map(equation, operands, scope)
        if name == "scan":
            return self.scan(equation, operands, scope)
        if name == "while":
            return self.while_loop(equation, operands, scope)
        if name == "cond":
            return self.branches(equation, operands, scope)
        if calls_one(equation):
            return self.inline(next(subprograms(params)), operands, scope)
        if OperationName(scope).fact(ENCODED):
            return self.once(equation, operands, scope)
        return self.single(equation, operands, scope)

    def once(self, equation: Any, operands: list[int], scope: str) -> list[int]:
        """Reads an operation that encodes an operand of a matmul: compilers do it once for all sites that read it."""
        same = equation.primitive.name, str(equation.params), tuple(map(self.known.identity, operands))
        if same not in self.encoded:
            self.encoded[same] = self.single(equation, operands, scope)
        return self.encoded[same]

    def single(self, equation: Any, operands: list[int], scope: str) -> list[int]:
        """Reads an operation that calls no jaxpr."""
        name = equation.primitive.name
        own, kind = kernel_cost_of(equation, scope, self.ops), equation_kind(equation)
        kind = "kernel" if own and kind == "unknown" else kind
        if name == "sharding_constraint":
            return self.constrained(equation, operands, scope)
        if name == "optimization_barrier":
            return self.barrier(equation, operands, scope)
        if name == "reduce_precision":  # remat puts saved values through one, to their own type
            return operands
        if name in ADDITIONS and (zeros := next(filter(self.is_zeros, operands), None)) is not None:
            return [operands[0] if zeros == operands[1] else operands[1]]  # compilers remove the addition
        if name == "gather":
            self.tables[operands[1], equation.invars[0].aval.shape] = self.layouts[operands[0]]
        if name == "scatter-add":
            operands = [self.begun_as_table(equation, operands, scope), *operands[1:]]
        operands = [self.in_shards(i) for i in operands]
        partial = self.still_partial(name, operands)
        operands = operands if partial else [self.summed(i) for i in operands]
        is_known = own is not None or kind not in ("unknown", "kernel")
        before = operands
        operands = self.taken(equation, operands, scope, is_known=is_known)
        if kind == "matmul":
            operands = self.gathered(equation, operands, scope)
        layouts = [self.layouts[i] for i in operands]
        reduced: Axes = ()
        if kind in ("kernel", "collective", "unknown") or len(equation.outvars) != 1:
            found = [_like_operands(x, equation, layouts) for x in equation.outvars]
        else:
            layout, reduced = propagate(equation, layouts, self.num_shards)
            found = [layout]
        results = [self.value(x.aval, layout) for x, layout in zip(equation.outvars, found, strict=True)]
        if len(results) == 1:
            self.known.made[results[0]] = equation, operands
        cost, unknown = self.cost(equation, kind, own, operands, results, reduced), None
        if isinstance(cost, str) or kind == "unknown" or (not is_known and operands != before):
            unknown = unknown_of(equation, scope, cost if isinstance(cost, str) else None, self.within)
        sent = self.collective(equation, operands, results, scope) if kind == "collective" else None
        self.operations.append(
            Operation(
                kind, name, scope, tuple(operands), tuple(results),
                flops=cost.flops if isinstance(cost, CallCost) else None,
                hbm_bytes=cost.hbm_bytes if isinstance(cost, CallCost) else None,
                rated_by=cost.rated_by if isinstance(cost, CallCost) else None,
                unknown=unknown,
                collective=sent,
                stage_pairs=_stage_pairs(equation) if sent is not None and sent.mesh_axes == (STAGE,) else (),
            )
        )  # fmt: skip
        if reduced := tuple(axis for axis in reduced if self.mesh_sizes[axis] > 1):
            partial = Partial(equation.outvars[0].aval, reduced, name, scope)
        if partial:
            self.partial[results[0]] = replace(partial, aval=equation.outvars[0].aval)
        return results if self.joins_sums else [self.summed(i) for i in results]

    def barrier(self, equation: Any, operands: list[int], scope: str) -> list[int]:
        """Reads an optimization barrier. The values that it orders stay in memory on both sides, and are not moved.
        Partial results are summed before it, in the layout that they have after it."""
        results = [self.value(x.aval, self.layouts[i]) for x, i in zip(equation.outvars, operands, strict=True)]
        self.partial |= {
            result: self.partial[i] for result, i in zip(results, operands, strict=True) if i in self.partial
        }
        name = equation.primitive.name
        self.operations.append(Operation("other", name, scope, tuple(operands), tuple(results), hbm_bytes=0))
        return results

    def is_zeros(self, i: int) -> bool:
        """Returns True for an array of a constant zero, such as the gradient of what a function does not read."""
        equation, _ = self.known.made.get(i, (None, ()))
        if equation is None or equation.primitive.name != "broadcast_in_dim":
            return False
        (filled,) = equation.invars
        return isinstance(filled, Constant) and not np.any(filled.val)

    def begun_as_table(self, equation: Any, operands: list[int], scope: str) -> int:
        """Returns the zeros that the gradients of a table's rows are added to. They lie as the table does whose rows
        these indices took: each device adds up the rows that it has."""
        zeros, indices = operands[:2]
        aval = equation.invars[0].aval
        layout = self.tables.get((indices, aval.shape))
        if layout is None or layout == self.layouts[zeros] or not self.is_zeros(zeros):
            return zeros
        made, filled = self.known.made[zeros]
        result = self.value(aval, layout)
        self.operations.append(Operation("pointwise", made.primitive.name, scope, tuple(filled), (result,)))
        return result

    def taken(self, equation: Any, operands: list[int], scope: str, *, is_known: bool) -> list[int]:
        """Returns an operation's operands, whole along the dimensions that a device needs all of: all of them, where it
        is unknown."""
        layouts = [self.layouts[i] for i in operands]
        found = list(operands)
        if not any(map(any, layouts)):
            return found
        for place, (old, new) in enumerate(zip(layouts, taken(equation, layouts, is_known=is_known), strict=True)):
            if lost := tuple(axis for before, after in zip(old, new, strict=True) for axis in before if not after):
                aval, name = equation.invars[place].aval, equation.primitive.name
                found[place] = self.crossed(aval, operands[place], new, "all-gather", lost, name, scope)
        return found

    def gathered(self, equation: Any, operands: list[int], scope: str) -> list[int]:
        """Returns a matmul's operands, gathered over mesh axes that split both what is summed and the other's part of
        the result: x (8, 64, 128) P(None, None, 'tensor') @ w (128, 32) P(None, 'tensor') gathers x."""
        contracted, found = contracted_dims(equation), list(operands)
        for side, other in ((0, 1), (1, 0)):
            layout, beside = self.layouts[operands[side]], self.layouts[operands[other]]
            kept = {axis for d, axes in enumerate(beside) if d not in contracted[other] for axis in axes}
            lost = tuple(axis for d in contracted[side] for axis in layout[d] if axis in kept)
            if not lost:
                continue
            whole = tuple(tuple(axis for axis in axes if axis not in lost) for axes in layout)
            aval = equation.invars[side].aval
            found[side] = self.crossed(aval, operands[side], whole, "all-gather", lost, equation.primitive.name, scope)
        return found

    def constrained(self, equation: Any, operands: list[int], scope: str) -> list[int]:
        wanted = layout_of(equation.params["sharding"].spec, len(self.layouts[operands[0]]))
        operands = self.resharded(equation, [self.summed(operands[0], wanted)], wanted, scope)
        result = self.value(equation.outvars[0].aval, wanted)
        self.operations.append(Operation("move", equation.primitive.name, scope, tuple(operands), (result,)))
        return [result]

    def resharded(self, equation: Any, operands: list[int], wanted: DimAxes, scope: str) -> list[int]:
        """Returns the operand after an all-to-all where a constraint moves mesh axes from one dimension to another, or
        after an all-gather where it drops them."""
        before = self.layouts[operands[0]]
        lost = [axis for old, new in zip(before, wanted, strict=True) for axis in old if axis not in new]
        axes = tuple(axis for axis in lost if self.mesh_sizes[axis] > 1)
        if not axes:
            return operands
        is_moved = any(axis in new for new in wanted for axis in axes)
        kept = tuple(tuple(axis for axis in old if axis not in axes) for old in before)
        kind: CollectiveKind = "all-to-all" if is_moved else "all-gather"
        layout = wanted if is_moved else kept
        return [self.crossed(equation.invars[0].aval, operands[0], layout, kind, axes, equation.primitive.name, scope)]

    def collective(self, equation: Any, operands: list[int], results: list[int], scope: str) -> DeviceTraffic:
        name, params = equation.primitive.name, equation.params
        axes = params.get("axis_name", params.get("axes", ()))
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        axes = tuple(axis for axis in axes if isinstance(axis, str) and self.mesh_sizes[axis] > 1)
        full = max(sum(self.sizes[i] for i in operands), sum(self.sizes[i] for i in results))
        if name == "ragged_all_to_all":  # the larger side has spare room; of the smaller one the scope may tell a share
            smaller = min(self.sizes[operands[0]], self.sizes[results[0]])
            full = round(smaller * OperationName(scope).sent_share)
        groups = _groups_of(params.get("axis_index_groups"), self.num_shards(axes))
        size = self.num_shards(axes) if groups is None else groups.size
        full *= size if COLLECTIVES[name] == "all-to-all" else 1  # both sides are parts
        return DeviceTraffic(COLLECTIVES[name], axes, size, full, dtype=self.dtypes[operands[0]], groups=groups)

    def cost(
        self, equation: Any, kind: Kind, own: CallCost | None, operands: list[int], results: list[int], reduced: Axes
    ) -> CallCost | str:
        """Returns the cost of an operation on a device, or why it is unknown. own: its cost over all devices, if an
        operation states it. reduced: the mesh axes that it sums over."""
        if equation.primitive.name == "dot_general":
            contracted, _ = contracted_dims(equation)
            left, layout = equation.invars[0].aval.shape, self.layouts[operands[0]]
            length = math.prod(left[d] // self.num_shards(layout[d]) for d in contracted)
            out = equation.outvars[0].aval
            return CallCost(2 * length * self.sizes[results[0]] // out.dtype.itemsize)
        if equation.primitive.name == "dynamic_slice":  # the slice is read and written
            return CallCost(0, 2 * self.sizes[results[0]])
        if equation.primitive.name == "dynamic_update_slice":  # the slice is read and written, in place
            return CallCost(0, 2 * self.sizes[operands[1]])
        cost = own or cost_of(equation)
        if isinstance(cost, str) or kind not in ("matmul", "other", "kernel"):
            return cost
        axes = dict.fromkeys((*(axis for axes in self.layouts[results[0]] for axis in axes), *reduced))
        num_shards = self.num_shards(tuple(axes))
        num_bytes = None if cost.hbm_bytes is None else cost.hbm_bytes // num_shards
        return replace(cost, flops=cost.flops // num_shards, hbm_bytes=num_bytes)

    def shard_map(self, equation: Any, operands: list[int], scope: str) -> list[int]:
        """Reads a shard_map. Inside, values that are split over its manual axes have the shape of a shard."""
        params = equation.params
        manual = set(params["newly_manual_axes"])
        for i, (operand, spec) in enumerate(zip(operands, params["in_specs"], strict=True)):
            layout, wanted = self.layouts[operand], layout_of(spec, len(self.layouts[operand]))
            inside = tuple(tuple(axis for axis in axes if axis not in manual) for axes in layout)
            outside = tuple(w + tuple(axis for axis in n if axis not in w) for w, n in zip(wanted, inside, strict=True))
            if outside != layout:  # moved to where it is wanted
                operands[i] = self.moved(equation.invars[i].aval, operand, outside, scope)
        inner = [self.entered(i, x.aval, manual, scope) for i, x in zip(operands, params["jaxpr"].invars, strict=True)]
        results = self.inline(params["jaxpr"], inner, scope)
        found = []
        for i, x, spec in zip(results, equation.outvars, params["out_specs"], strict=True):
            rest = self.layouts[i]
            layout = tuple(w + r for w, r in zip(layout_of(spec, len(rest)), rest, strict=True))
            found.append(self.moved(x.aval, i, layout, scope))
        return found

    def entered(self, operand: int, aval: Any, manual: set[str], scope: str) -> int:
        layout = tuple(tuple(axis for axis in axes if axis not in manual) for axes in self.layouts[operand])
        return self.moved(aval, operand, layout, scope)

    def moved(self, aval: Any, operand: int, layout: DimAxes, scope: str) -> int:
        result = self.value(aval, layout)
        kind: Kind = "move" if self.sizes[result] == self.sizes[operand] else "pointwise"
        self.operations.append(Operation(kind, "shard_map", scope, (operand,), (result,)))
        if not any((*layout, *self.layouts[operand])):  # what is whole is the same inside
            self.known.given[result] = lambda: self.known.find(operand)
        return result

    def scan(self, equation: Any, operands: list[int], scope: str) -> list[int]:
        scan = scan_of(equation.params)
        layouts = [self.layouts[i] for i in operands]
        first = scan.num_consts + scan.num_carried
        inside = [*layouts[:first], *(layout[1:] for layout in layouts[first:])]
        is_reversed = equation.params["reverse"]
        body, program = self.loop_body(
            scan.body, inside, range(scan.num_consts, first), scope,
            lambda: self.known.inside_scan(scan, operands, is_reversed=is_reversed),
        )  # fmt: skip
        results = []
        for place, (x, i) in enumerate(zip(equation.outvars, program.outputs, strict=True)):
            layout = body.layouts[i] if place < scan.num_carried else ((), *body.layouts[i])
            results.append(self.value(x.aval, layout))
            if place >= scan.num_carried:  # stacked in the layout that it has in the body
                self.sizes[results[-1]] = scan.num_trips * program.sizes[i]
        self.operations.append(
            Operation(
                "loop", "scan", scope, tuple(operands), tuple(results), bodies=(Body(program, (scan.num_trips,)),),
                num_carried=scan.num_carried,
            )
        )  # fmt: skip
        return results

    def loop_body(
        self, jaxpr: Jaxpr, layouts: list[DimAxes], carried: range, scope: str, known: Callable[[], KnownValues]
    ) -> tuple["_Reader", Program]:
        """Reads the body of a loop. A carried value has one layout at the start and the end of a trip, so the zeros
        that a sum begins with are split, too."""
        while True:
            body = _Reader(self.mesh_sizes, self.joins_sums, self.ops, known(), self.within, self.consts)
            program = body.read(jaxpr, layouts, scope)
            ends = [body.layouts[i] for i in program.outputs[: len(carried)]]
            split = [
                tuple(end or start for start, end in zip(layouts[place], layout, strict=True))
                for place, layout in zip(carried, ends, strict=True)
            ]
            if split == layouts[carried.start : carried.stop]:
                return body, program
            layouts = [*layouts[: carried.start], *split, *layouts[carried.stop :]]

    def while_loop(self, equation: Any, operands: list[int], scope: str) -> list[int]:
        """Reads a loop whose number of trips is not known before it runs: it has the memory and the communication of
        one. A loop of one trip or none (`at_most_once_scope`) is read as a cond, by the trips that are left."""
        params = equation.params
        if OperationName(scope).is_at_most_once:
            run, place = without_consts(params["body_jaxpr"]), params["body_nconsts"]
            leave = run.replace(eqns=[], outvars=run.invars[place:])
            inside = operands[params["cond_nconsts"] :]
            return self.one_of(equation, inside[place], inside, (leave, run), scope)
        inside = operands[params["cond_nconsts"] :]
        consts, num = params["body_nconsts"], len(inside)
        layouts = [self.layouts[i] for i in inside]
        jaxpr, known = without_consts(params["body_jaxpr"]), self.known.inside_loop
        body, program = self.loop_body(jaxpr, layouts, range(consts, num), scope, known)
        results = [self.value(x.aval, body.layouts[i]) for x, i in zip(equation.outvars, program.outputs, strict=True)]
        self.operations.append(
            Operation(
                "loop", "while", scope, tuple(inside), tuple(results), bodies=(Body(program, (1,)),),
                num_carried=len(results), unknown=unknown_of(equation, scope, TRIPS, self.within),
            )
        )  # fmt: skip
        return results

    def branches(self, equation: Any, operands: list[int], scope: str) -> list[int]:
        """Reads a cond."""
        (index, *inside), jaxprs = operands, list(subprograms(equation.params))
        return self.one_of(equation, index, inside, jaxprs, scope)

    def one_of(self, equation: Any, index: int, inside: list[int], jaxprs: Sequence[Jaxpr], scope: str) -> list[int]:
        """Reads an equation that runs one of these jaxprs, with the share of its executions in which each runs. Where
        that depends on data, all have the same, and `unknown` says so. A result has the layout that one of the jaxprs
        gives it."""
        num, layouts, read = len(jaxprs), [self.layouts[i] for i in inside], []
        for place, jaxpr in enumerate(jaxprs):
            known = self.known.branch(index, place, num, inside)
            branch = _Reader(self.mesh_sizes, self.joins_sums, self.ops, known, self.within, self.consts)
            read.append((branch, branch.read(jaxpr, layouts, scope)))
        results = []
        for place, x in enumerate(equation.outvars):
            found = (branch.layouts[program.outputs[place]] for branch, program in read)
            layout = tuple(next(filter(None, axes), ()) for axes in zip(*found, strict=True))
            results.append(self.value(x.aval, layout))
        if self.known.differs_between_stages(index, num):
            raise_if_any(hang for _, program in read for hang in _hangs(program))
        shares = self.known.shares(index, num)
        unknown = None if shares else unknown_of(equation, scope, None, self.within, counted=EACH_BRANCH.format(num))
        bodies = tuple(
            Body(program, share) for (_, program), share in zip(read, shares or [(1 / num,)] * num, strict=True)
        )
        self.operations.append(
            Operation(
                "branches",
                "cond",
                scope,
                (index, *inside),
                tuple(results),
                bodies=bodies,
                unknown=unknown,
                chosen=self.known.by_tick(index, num) if OperationName(scope).slot else (),
            )
        )
        return results


def _hangs(branch: Program) -> Iterator[Problem]:
    """Yields the collectives among stages in a branch that not all of them take: those that do would wait forever."""
    for operation in branch.walk():
        if operation.collective is not None and STAGE in operation.collective.mesh_axes:
            what = f"{operation.name} in {operation.scope} is among stages, in a branch that not all of them take"
            fix = "run it outside of the branch, or choose the branch by a value that is the same on all stages"
            yield Problem("train step", what, fix)


def _like_operands(out: Any, equation: Any, layouts: Sequence[DimAxes]) -> DimAxes:
    """Returns the layout of the first operand of the same rank, for a result of an operation that has several or that
    states no layouts."""
    shape = getattr(out.aval, "shape", ())
    for x, layout in zip(equation.invars, layouts, strict=True):
        if len(x.aval.shape) == len(shape) and any(layout):
            return layout
    return ((),) * len(shape)


def _groups_of(members: Sequence[Sequence[int]] | None, num_devices: int) -> AxisGroups | None:
    """Returns the groups of a collective among some of the devices along its axes; None for all of them, and for groups
    without a common stride."""
    if members is None:
        return None
    first = members[0]
    found = AxisGroups(len(first), first[1] - first[0] if len(first) > 1 else 1)
    return found if sorted(map(list, members)) == sorted(found.members(num_devices)) else None


def _stage_pairs(equation: Any) -> tuple[tuple[int, int], ...]:
    """Returns the senders of a permute among stages with their receivers; () for another collective."""
    return tuple(map(tuple, equation.params["perm"])) if equation.primitive.name == "ppermute" else ()
