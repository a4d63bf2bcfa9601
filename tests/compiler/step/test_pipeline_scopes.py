"""Conditionals of a pipeline's step: the scopes by which an analysis knows which stages take which branch."""

import pytest

from conftest import plan_of
from meshloom.compiler.core.scopes import OperationName
from meshloom.compiler.estimate.estimated_step import read_step


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize(
    ("head", "of_head"), [("last", ("F", "last", None)), ("stages", ("F", None, "last"))], ids=["last", "stages"]
)
def test_conditionals_of_the_ends_have_the_scope_of_their_end(head, of_head):
    """The conditional itself, and not what is in its branches: without it all stages would be read to have the head."""
    plan = plan_of(
        "target=cpu-2", "mesh.stage=2", "num_microbatches=4", "global_batch_size=8", "remat=full",
        "pipeline.ticks=multi", f"pipeline.head={head}",
    )  # fmt: skip
    names = [OperationName(each.scope) for each in _conditionals(read_step(plan))]
    found = {(name.slot, name.end, name.shared_end) for name in names if name.slot}
    whole = {("F", None, None), ("BW", None, None)}
    assert found == {*whole, ("F", "first", None), ("BW", "first", None), of_head}


def _conditionals(program):
    for operation in program.operations:
        if operation.kind == "branches":
            yield operation
        for body in operation.bodies:
            yield from _conditionals(body.program)
