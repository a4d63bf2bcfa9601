"""The buffers of a pipeline's stages: the bytes of a slot in the traced step, and the slots that each stage uses.

saved: 7 slots of 4 MiB on each stage; in use at most 7, 5, 3, 1

Stages run one program, so each allocates what the one with most in flight uses.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..core.scopes import OperationName
from ..pipeline.buffers import slots_in_use
from ..pipeline.table import PipelineTable
from .regions import Region

WHAT: Mapping[str, str] = {
    "x": "inputs of chunks",
    "gradient": "gradients of their results",
    "saved": "what layers save for their backward pass",
    "kept": "what recomputation leaves to the backward pass",
    "cut": "what gradients of inputs leave to those of weights",
}
# The slots that a buffer shares: what layers save lies at the place of their chunk's input.
_SLOTS = {"x": "x", "gradient": "gradient", "saved": "x", "kept": "residuals", "cut": "cut"}
_SPARE = {"x": 1, "gradient": 1}  # slots for what arrives and nobody reads


@dataclass(frozen=True)
class StageBuffer:
    """A buffer of each stage. num_slots: those that each stage allocates. slot_bytes: of one on a device. in_use: by
    stage, the most slots at once."""

    name: str
    num_slots: int
    slot_bytes: int
    in_use: tuple[int, ...]

    @property
    def allocated_bytes(self) -> int:
        return self.num_slots * self.slot_bytes


def allocated_slots(table: PipelineTable) -> dict[str, int]:
    """Returns the slots that each stage allocates of each buffer, in the order of `WHAT`."""
    used = slots_in_use(table)
    return {name: max(used[_SLOTS[name]]) + _SPARE.get(name, 0) for name in WHAT}


def read_stage_buffers(table: PipelineTable, step: Region) -> tuple[StageBuffer, ...]:
    """Returns the buffers of a traced step that runs a table, in the order of `WHAT`."""
    allocated = Counter[str]()
    for region in step.walk():
        names = dict[int, str]()  # of the buffers that are made here
        for operation in region.program.operations:
            name = OperationName(operation.scope).buffer
            if name is not None and not operation.bodies:
                names |= dict.fromkeys(operation.outputs, name)
            # The loop lays out what it carries; what fills a buffer with zeros has no layout.
            for body in operation.bodies[:1]:
                for outer, inner in zip(operation.inputs, body.program.inputs, strict=False):
                    if outer in names:
                        allocated[names[outer]] += body.program.sizes[inner]
    used, num_slots = slots_in_use(table), allocated_slots(table)
    return tuple(
        StageBuffer(name, num_slots[name], allocated[name] // num_slots[name], used[_SLOTS[name]])
        for name in WHAT
        if allocated[name]
    )


def bytes_in_use(buffers: tuple[StageBuffer, ...]) -> tuple[int, ...]:
    """Returns by stage the bytes of the slots that it uses, each buffer at its own peak."""
    stages = range(len(buffers[0].in_use)) if buffers else ()
    return tuple(sum(each.in_use[stage] * each.slot_bytes for each in buffers) for stage in stages)
