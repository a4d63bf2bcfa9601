"""Warns of a large model that would train on the default data, which are there to try the loop with."""

from meshloom.compiler.core.errors import Problem
from meshloom.compiler.core.format import human_parameters
from meshloom.compiler.plan import Plan

LARGE = 1_000_000_000  # parameters; the bytes of Python's library, some 25 MB, teach such a model nothing


def warnings_of_demo_data(plan: Plan) -> tuple[Problem, ...]:
    """Returns a warning that names the data and the number of steps; none for a small model or other data."""
    if plan.spec.data.source.kind != "python_stdlib" or plan.num_parameters < LARGE:
        return ()
    what = (
        f"python_stdlib, the default, is the source text of Python's library as bytes, for {plan.spec.num_steps} "
        f"steps (num_steps={plan.spec.num_steps}): a model of {human_parameters(plan.num_parameters)} parameters on "
        f"{plan.target.name} learns nothing of use from it"
    )
    return (Problem("data", what, "choose your data, such as data=tokens data.source.directory=..., and num_steps="),)
