"""What experts drop is told once, and not where nothing is dropped."""

from meshloom.compiler.core.errors import Problem
from meshloom.runtime.train.loop import DroppedTokens
from meshloom.runtime.train.metrics import NOTHING, Metrics


def _step(number: int, **auxiliary: float) -> Metrics:
    named = {f"layers/{name}": value for name, value in auxiliary.items()}
    return Metrics(number, 2.0, None, 1.0, 0.1, False, 1.0, 1.0, 0.0, 256, None, 256, 0.0, NOTHING, named)


def test_a_layer_that_drops_is_enough():
    told: list[Problem] = []
    DroppedTokens(told.append).step_reported(_step(1, **{"dropped/0": 0.0, "dropped/1": 0.25, "expert_load/1": 3.0}))
    assert [problem.what.partition(" of")[0] for problem in told] == ["25.00%"]


def test_the_first_step_that_drops_is_told_with_its_share():
    told: list[Problem] = []
    check = DroppedTokens(told.append)
    for step in (_step(1), _step(2, dropped=0.0, expert_load=3.0), _step(3, dropped=0.0125), _step(4, dropped=0.5)):
        check.step_reported(step)
    (problem,) = told
    assert problem.where == "step 3"
    assert problem.what.startswith("1.25% of the choices")
    assert "moe.max_imbalance" in problem.fix
