"""A step's program as priced regions: the step itself, the bodies of its loops, the branches of its conds.

    the step                     1 execution     a gather of the embedding, a loop over layers, ..
      body of the loop          32 executions    4 matmuls, a cond
        branch 0 of the cond     1 execution
        branch 1 of the cond    31 executions    a reduce-scatter

This is the only walk over a program: peak memory, communication, roofline and time are made from its regions.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..core.scopes import OperationName
from ..jaxpr.fusion import Fused, FusedStep, fuse, sliced_in_place, stacked_bytes, traffic
from ..jaxpr.program import Operation, Program
from ..spec.compiler_traits import CompilerTraits


@dataclass(frozen=True)
class PricedStep:
    """A step of the fused program. hbm_bytes: the bytes that one execution reads and writes in memory; None: unknown.
    arrays: the values that these bytes are the sizes of, each as often as it is moved; () where the operation declares
    its bytes, and for a gather of rows that tokens fill in part. inside: the regions that it runs. place: the place of
    its operation in the program. behind: the arrays that a pass behind a matmul moves."""

    fused: FusedStep
    hbm_bytes: int | None
    arrays: tuple[int, ...]
    inside: tuple["Region", ...]
    place: int
    behind: tuple[int, ...] = ()

    @property
    def operation(self) -> Operation:
        return self.fused.operation


@dataclass(frozen=True)
class Region:
    """A program that is executed as a whole.

    factors: the executions of each region around it in one execution of the next one, the outermost first, and its own
    last; each a single value for all stages of the mesh, or a value for each. is_counted: False in a loop whose number
    of trips is not known, which is priced as one trip. scope: the scope of the operation that runs it. stacked_bytes:
    the bytes that a trip copies into each of the loop's stacks and out of it.
    """

    program: Program
    fused: Fused
    steps: tuple[PricedStep, ...]
    factors: tuple[tuple[float, ...], ...] = ()
    is_counted: bool = True
    scope: str = ""
    stacked_bytes: tuple[int, ...] = ()

    @property
    def executions(self) -> tuple[float, ...]:
        """Returns how often the region is executed in a step, on each stage; one value where all have the same."""
        num_stages = max(map(len, self.factors), default=1)
        wide = [each if len(each) == num_stages else each * num_stages for each in self.factors]
        return tuple(math.prod(each[stage] for each in wide) for stage in range(num_stages))

    def walk(self) -> Iterator["Region"]:
        """Yields the region and all regions inside of it, the outer ones first."""
        yield self
        for step in self.steps:
            for inner in step.inside:
                yield from inner.walk()

    def each(self) -> Iterator[tuple["Region", PricedStep]]:
        """Yields every step of the region and those inside of it, each with its own region, in the order of the
        program."""
        for step in sorted(self.steps, key=lambda one: one.place):
            yield self, step
            for inner in step.inside:
                yield from inner.each()


def price_regions(program: Program, compiler: CompilerTraits) -> Region:
    """Returns the region of a whole step, with all others inside of it."""
    return _with_steps(Region(program, fuse(program, is_loop=False), ()), compiler)


def matmul_types(step: Region) -> set[str]:
    """Returns the types of the operands of a step's matmuls."""
    each = ((region.program, one.operation) for region, one in step.each())
    return {program.dtypes[operation.inputs[0]] for program, operation in each if operation.is_product}


def largest_sum(terms: Iterable[tuple[Region, float]]) -> float:
    """Returns the sum of terms, each times the executions of its region, on the stage where that sum is largest."""
    each = [(region.executions, value) for region, value in terms]
    num_stages = max((len(executions) for executions, _ in each), default=1)
    return max(sum(one[stage % len(one)] * value for one, value in each) for stage in range(num_stages))


def _with_steps(region: Region, compiler: CompilerTraits) -> Region:
    program, steps = region.program, []
    places = {id(operation): place for place, operation in enumerate(program.operations)}
    in_place = sliced_in_place(region.fused)
    fusion = {
        "into_matmuls": compiler.fuses_into_matmuls,
        "after_matmuls": compiler.fuses_after_matmuls,
        "fuses_gathers": compiler.fuses_gathers,
    }
    for step, arrays in traffic(region.fused, **fusion):
        operation = step.operation
        inside = tuple(_with_steps(one, compiler) for one in _inside(operation, region, compiler))
        declares = operation.hbm_bytes is not None or operation.flops is None
        num_bytes = operation.hbm_bytes if declares else sum(program.sizes[i] for i in arrays)
        filled = OperationName(operation.scope).filled_share if operation.name == "gather" else 1.0
        if in_place.intersection(step.writes):
            num_bytes = 0
        if operation.kind == "collective" and not compiler.copies_for_collectives:
            arrays = ()
            num_bytes = 2 * sum(program.sizes[i] for i in step.writes) if operation.is_reordered else 0
        if filled < 1 and arrays:  # rows without a token look up one row, again and again
            num_bytes, declares = round((1 + filled) * program.sizes[arrays[0]]), True
        behind = step.kernels[1] if step.kernels and not compiler.fuses_after_matmuls else ()
        if behind and num_bytes is not None:
            num_bytes += sum(program.sizes[i] for i in behind)
        steps.append(PricedStep(step, num_bytes, () if declares else arrays, inside, places[id(operation)], behind))
    return replace(region, steps=tuple(steps))


def _inside(operation: Operation, around: Region, compiler: CompilerTraits) -> Iterator[Region]:
    """Yields the regions that an operation runs, without their steps."""
    is_loop = operation.kind == "loop"
    for body in operation.bodies:
        yield Region(
            body.program,
            fuse(body.program, is_loop=is_loop),
            steps=(),
            factors=(*around.factors, body.executions),
            is_counted=around.is_counted and not (operation.unknown and operation.unknown.why),
            scope=operation.scope,
            stacked_bytes=stacked_bytes(operation, around.program) if is_loop and compiler.copies_loop_carry else (),
        )
