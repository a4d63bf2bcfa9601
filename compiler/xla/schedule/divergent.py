"""Finds collectives that hang: in a branch that some stages of their group take, and others do not.

    %which = compare(%stage, %last)                                   differs between stages
    conditional(%which, ..), branch_computations={%idle, %head}
    %head: all-reduce(..), replica_groups={{0,2,4,6},{1,3,5,7}}       stages 0 to 3: those that idle never come

All devices of a group have to come to a collective. Within one stage they take the same branches; across stages only
where the predicate is the same on all of them, which has to follow from the text (alike.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..hlo import Computation, HloError, Instruction, Module
from ..hlo.groups import ReplicaGroups, groups_of
from ..hlo.opcodes import collective_kind
from .alike import Classes, find_predicates
from .program import global_groups
from .sends import begun_by


@dataclass(frozen=True)
class Divergent:
    """A collective in a branch of a conditional that not all stages of its group need take. stages: those of the
    group."""

    collective: Instruction
    conditional: Instruction
    stages: tuple[int, ...]


def find_divergent(module: Module, stage_of: Sequence[int]) -> tuple[Divergent, ...]:
    """Returns the collectives that hang, each once for each conditional around it. stage_of: the stage of each device.
    Raises HloError for an unknown form of replica groups."""
    predicates = find_predicates(module)
    found: dict[tuple[str, str], Divergent] = {}
    instructions = (each for computation in module.computations.values() for each in computation.instructions)
    for conditional in (each for each in instructions if each.opcode == "conditional"):
        within = (around for name in conditional.called for around in module.computations_within(name))
        collectives = ((each, around) for around in within for each in around.instructions)
        for collective, around in ((each, around) for each, around in collectives if collective_kind(each.opcode)):
            for group in _groups(collective, around, module, len(stage_of)):
                stages = sorted({stage_of[device] for device in group})
                if len(stages) > 1 and not _is_same(predicates.get(conditional.name), group):
                    key = collective.name, conditional.name
                    found.setdefault(key, Divergent(collective, conditional, tuple(stages)))
    return tuple(found.values())


def _groups(collective: Instruction, around: Computation, module: Module, num_devices: int) -> ReplicaGroups:
    """Returns the groups of a collective; all devices, where it does not say."""
    devices = tuple(range(num_devices))
    if collective.opcode == "send":
        return begun_by(collective, around, module.num_devices).groups or (devices,)
    try:
        groups = groups_of(collective, module.num_devices)
        return (devices,) if groups is None else global_groups(groups, collective, module)
    except HloError as error:
        raise HloError(f"{collective.name}: {error}") from error


def _is_same(predicate: Classes | None, group: Sequence[int]) -> bool:
    """Returns True if all devices of a group have the same predicate: among slices, of which the program is that of
    one, if all devices have."""
    if predicate is None:
        return False
    own = group if max(group) < len(predicate) else range(len(predicate))
    return len({predicate[device] for device in own}) == 1
