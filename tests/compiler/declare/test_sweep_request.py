"""What a sweep is over: Hydra's whole grammar, read without running anything."""

import pytest

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request
from meshloom.compiler.declare.sweep_request import SweepRequest, read_sweep_request, value_of


def read(*overrides: str) -> SweepRequest:
    return read_sweep_request(Request(overrides))


@pytest.mark.cases(plain=4)
@pytest.mark.parametrize(
    ("typed", "values"),
    [
        ("seed=1,2", [1, 2]),
        ("seed=choice(3,4)", [3, 4]),
        ("seed=range(0,5,2)", [0, 2, 4]),
        ("remat=none,full", ["none", "full"]),
        ("precision=glob(bfloat16*)", ["bfloat16", "bfloat16_params", "bfloat16_pure", "bfloat16_sums"]),
        ("model=glob(mixtral*,exclude=*8x22b)", ["mixtral_8x7b"]),
        ("+hydra.sweeper.params.seed='1,2'", [1, 2]),
        ("hydra.sweeper.params.seed='range(1,3)'", [1, 2]),
        ("hydra.sweeper.params={loss.z_loss_weight:'0.0,0.5'}", [0.0, 0.5]),
    ],
)
def test_each_form_of_a_sweep_has_its_values(typed, values):
    asked = read(typed, "num_steps=4")
    (axis,) = asked.axes.values()
    assert [value_of(text) for text in axis] == values
    assert asked.num_points == len(values)
    assert asked.fixed == ("num_steps=4",)
    assert not any("glob" in text for text in asked.request.overrides), "a glob leaves names that begin with _"


def test_what_is_typed_wins_over_the_parameters_of_the_sweeper():
    asked = read("+hydra.sweeper.params.seed='1,2'", "seed=7")
    assert asked.axes == {}
    assert asked.spec.seed == 7


def test_all_mistakes_are_found_at_once():
    with pytest.raises(ConfigError) as caught:
        read("seed=1,a", "remat=none,ful", "hydra/launcher=joblib_", "num_stepz=1,2")
    found = {problem.where for problem in caught.value.problems}
    assert found == {"seed", "remat", "hydra/launcher", "num_stepz"}


@pytest.mark.parametrize(
    ("group", "option", "package"),
    [
        ("launcher", "joblib", "hydra-joblib-launcher"),
        ("launcher", "submitit_slurm", "hydra-submitit-launcher"),
        ("sweeper", "optuna", "hydra-optuna-sweeper"),
    ],
)
def test_a_plugin_that_is_not_installed_names_its_package(group, option, package):
    with pytest.raises(ConfigError) as caught:
        read("seed=1,2", f"hydra/{group}={option}")
    (problem,) = caught.value.problems
    assert (problem.where, problem.fix) == (f"hydra/{group}", f"pip install {package}")
