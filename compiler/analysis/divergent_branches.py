"""Refuses a compiled pipeline that would hang: a collective among stages in a branch that not all of them take."""

from collections.abc import Iterator, Mapping

from ..core.errors import Problem
from ..core.format import counted, human_names
from ..core.partition_spec import STAGE
from ..core.scopes import OperationName
from ..xla.hlo import Module
from ..xla.schedule.divergent import Divergent, find_divergent
from .program_devices import stages_of

COMPILED = "compiled program"  # the place of these problems
NUM_NAMED = 3


def find_hangs(module: Module, mesh_sizes: Mapping[str, int]) -> Iterator[Problem]:
    """Yields a problem for each conditional of a program with collectives that hang. Raises HloError for an unknown
    form of replica groups. mesh_sizes: the sizes of the mesh axes, over the program's devices in order."""
    if mesh_sizes.get(STAGE, 1) == 1:
        return
    of: dict[str, list[Divergent]] = {}
    for each in find_divergent(module, stages_of(mesh_sizes)):
        of.setdefault(each.conditional.name, []).append(each)
    for name, found in of.items():
        named = [
            f"{each.collective.name} ({(OperationName(each.collective.op_name).own or each.collective.opcode)})"
            for each in found
        ]
        stages = sorted({stage for each in found for stage in each.stages})
        are = "is a collective" if len(found) == 1 else "are collectives"
        yield Problem(
            COMPILED,
            f"{human_names(named, NUM_NAMED)} {are} among {counted(len(stages), 'stage')} in a branch of {name}, which "
            "some of them may not take: those that do would wait forever",
            "run it outside of the branch, or choose the branch by a value that is the same on all stages",
        )
