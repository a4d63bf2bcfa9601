"""The numbers of the cost model are in conf/, with their sources."""

import ast
from pathlib import Path

import pytest

from meshloom import compiler
from meshloom.compiler.spec.cost_model import CostModel, cost_model, sourced_numbers

COMPILER = Path(compiler.__file__).parent
FOLDERS = ("analysis", "estimate", "jaxpr", "parallel", "pipeline", "search", "sharding", "target", "tune", "xla")
# Not of the cost model: nothing and everything, the two FLOPs of a multiply-add, units.
PLAIN = {0.0, 1.0, 2.0, 1e6, 1e9}
ALLOWED = {
    ("analysis/attention_blocks.py", 0.05),  # from here on a finding is shown
    ("analysis/program_text.py", 0.01),
    ("analysis/waste.py", 0.1),
    ("analysis/waste.py", 0.5),
    ("estimate/step_time.py", 0.5),  # a ring sends one way around, a collective both
    ("parallel/attention/blocks.py", 0.7),  # a score that softmax gives no weight
    ("parallel/attention/context.py", 1.005),  # rounded to 1.00 in a message
    ("parallel/experts/experts.py", 8.0),  # a factor at which a check's experts drop nothing
    ("pipeline/makespan.py", 1.02),  # tables whose times differ by less are equally good
    ("tune/answer.py", 1.06),  # how far above the limit candidates are still estimated one by one
    ("tune/answer.py", 1.2),  # a question: with 20 % more memory?
    ("tune/answer.py", 1e15),  # stand for a candidate that cannot run
    ("tune/answer.py", 1e18),
    ("tune/families.py", 1e-6),  # tolerances of rounding
    ("xla/schedule/kernels.py", 0.5),  # a causal mask leaves half of the square
    ("xla/schedule/simulate.py", 1e-12),
}


def floats_of(source: str) -> set[float]:
    constants = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return {node.value for node in constants if isinstance(node.value, float)}


def test_passes_hold_no_number_of_the_cost_model():
    files = [path for folder in FOLDERS for path in (COMPILER / folder).rglob("*.py")]
    found = {(path.relative_to(COMPILER).as_posix(), each) for path in files for each in floats_of(path.read_text())}
    assert {each for each in found if each[1] not in PLAIN} == ALLOWED


@pytest.mark.parametrize("source", ["SHARE = 0.24", "def f(x):\n    return 0.24 * x", "SHARES = {'tpu': 0.24}"])
def test_a_number_is_found_wherever_it_is_written(source):
    assert floats_of(source) == {0.24}


def test_each_number_has_a_source():
    numbers = sourced_numbers()
    assert set(numbers) == set(CostModel.model_fields)
    assert {name: each.value for name, each in numbers.items()} == cost_model().model_dump()
    assert all(len(each.source.measured or each.source.assumed or "") > 20 for each in numbers.values())
