"""Estimates the peak memory of a step without a compiler, by a walk over the fused program that counts live arrays."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..core.scopes import OperationName
from ..jaxpr.fusion import Fused, Step, fuse
from ..jaxpr.program import Operation, Program

Class = Literal["working_parameters", "gathered_weights", "gradients", "activations", "temporaries"]


@dataclass(frozen=True)
class Peak:
    """Bytes that live at the peak, by class, besides the program's arguments. at: the operation's scope."""

    num_bytes: Mapping[Class, int]
    at: str

    @property
    def total(self) -> int:
        return sum(self.num_bytes.values())


def find_peak(program: Program) -> Peak:
    """Returns the peak of a step besides its arguments. Its results replace donated arguments."""
    fused = fuse(program, is_loop=False)
    free = set(program.inputs) | {i for i in fused.outputs if i is not None}
    return _walk(fused, unowned=free, reusable=set(program.inputs))


def host_bytes(program: Program) -> int:
    """Returns the bytes per device in host memory: what loops stack there, a body's in addition to its loop's. What an
    iteration moves to the host goes straight into the stack."""
    loops = [each for each in program.operations if each.body is not None]
    own = sum(program.host_sizes[i] for each in loops for i in each.outputs)
    return own + max((host_bytes(each.body) for each in loops if each.body is not None), default=0)


def _walk(fused: Fused, *, unowned: set[int], reusable: set[int]) -> Peak:
    """Returns the peak of a walk. unowned: arrays that the caller counts. reusable: the ones that may be
    overwritten."""
    sizes = fused.program.sizes
    last_read = {i: n for n, step in enumerate(fused.steps) for i in step.reads}
    for i in fused.outputs:
        if i is not None:
            last_read[i] = len(fused.steps)
    live: dict[int, tuple[Class, int]] = {}  # class and bytes
    peak = Peak({}, "")
    for n, step in enumerate(fused.steps):
        dying = [i for i in step.reads if last_read[i] == n]
        overwritten = _overwritten(step, dying, sizes, set(live) | reusable)
        inner = _inside(step.operation) if step.operation.body else Peak({}, "")
        for i in step.writes:
            old = overwritten.get(i)
            if i in unowned or (old is not None and old not in live):
                continue
            if old is not None:
                live.pop(old)
            live[i] = (_class_of(step.operation, i), sizes[i])
        total: Counter[Class] = Counter(inner.num_bytes)
        for name, size in live.values():
            total[name] += size
        if total.total() > peak.total:
            peak = Peak(dict(total), step.operation.scope + (f" > {inner.at}" if inner.at else ""))
        for i in [*dying, *(i for i in step.writes if i not in last_read)]:
            live.pop(i, None)
    return peak


def _overwritten(step: Step, dying: list[int], sizes: tuple[int, ...], owned: set[int]) -> dict[int, int]:
    """Returns the results that reuse an operand's memory, with the operand."""
    may = step.writes if step.is_fused else step.writes[: step.operation.num_carried]
    candidates, places = [i for i in dying if i in owned], {}
    for i in may:
        old = next((j for j in candidates if sizes[j] == sizes[i]), None)
        if old is not None:
            candidates.remove(old)
            places[i] = old
    return places


def _inside(loop: Operation) -> Peak:
    """Returns the peak of a loop's body. Its inputs live outside; a stacked result is written in place."""
    assert loop.body is not None
    fused = fuse(loop.body, is_loop=True)
    carried = set(loop.body.inputs[len(loop.inputs) - len(loop.body.inputs) :])
    direct = {i for step in fused.steps if step.operation.kind in ("pointwise", "matmul") for i in step.writes}
    stacked = {i for i in fused.outputs[loop.num_carried :] if i is not None}
    return _walk(fused, unowned=set(loop.body.inputs) | (stacked & direct), reusable=carried)


def _class_of(operation: Operation, value: int) -> Class:
    """Returns the class of an array. Loops that belong to neither pass run both, once for each microbatch."""
    name = OperationName(operation.scope)
    if name.is_cast_of_parameters:
        return "working_parameters"
    if operation.kind == "collective" and operation.name in ("all_gather", "reduce_scatter"):
        return "gathered_weights" if operation.name == "all_gather" else "gradients"
    if operation.kind == "loop" and (name.is_transposed or not name.is_differentiated):
        return "gradients"
    if operation.kind == "loop" and value in operation.outputs[operation.num_carried :]:
        return "activations"
    return "temporaries"
