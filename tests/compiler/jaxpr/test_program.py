"""A step as operations on values."""

import sys

from meshloom.compiler.jaxpr.program import Body, Operation, Program, origins_of


def test_results_are_followed_into_nested_branches_one_by_one():
    """Four buffers that ten conditionals, one in the other, hand on. The time is of their number, not exponential in
    their depth: following all four at each level takes a million calls."""

    def nested(depth: int) -> Operation:
        operations = [nested(depth - 1)] if depth else []
        outputs = operations[0].outputs if operations else (0, 1, 2, 3)
        body = Program(tuple(operations), (1,) * 8, (0,) * 8, ("float32",) * 8, (0, 1, 2, 3), outputs)
        return Operation("branches", "cond", "", (0, 1, 2, 3), (4, 5, 6, 7), bodies=(Body(body, (1.0,)),))

    num_calls = 0

    def count(_frame, event, _argument):
        nonlocal num_calls
        num_calls += event == "call"

    outermost, before = nested(9), sys.getprofile()
    sys.setprofile(count)
    try:
        origins = origins_of(outermost)
    finally:
        sys.setprofile(before)
    assert origins == {4: 0, 5: 1, 6: 2, 7: 3}
    assert num_calls < 1_000
