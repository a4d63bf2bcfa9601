"""Spaces that are too large to list: what Optuna chooses, and what a second start finds of the first."""

import sys

import pytest

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request
from meshloom.compiler.tune.answer import TOO_LARGE, Runner, remembering, value_of_variants
from meshloom.compiler.tune.families import TracePoint
from meshloom.runtime.tune.variants import choose_variants, find_space

NARROW = ("model=linear_stack", "data=synthetic", "target=v5p-16", "global_batch_size=64", "tune.mesh={tensor: [1]}",
          "tune.microbatches=[1]")  # fmt: skip
LARGE = (*NARROW, "tune.max_candidates=15", "tune.groups.sharding=[fsdp_tensor]", "tune.groups.remat=[none,full]",
         "+tune.groups.precision=[bfloat16,bfloat16_params]")  # fmt: skip
CONSOLE = Console(is_quiet=True)


def test_a_space_is_listed_until_it_has_more_candidates_than_it_may():
    """Two sizes of fsdp and replica each, 8 x 1, 4 x 2, 2 x 4 and 1 x 8, for each of four combinations of options."""
    space = find_space(Request((*LARGE, "tune.max_candidates=16")))
    assert (space.is_listed, len(space.variants), space.about_num_candidates) == (True, 4, 16)
    assert not find_space(Request(LARGE)).is_listed


def test_without_optuna_a_space_that_is_too_large_is_one_error(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"Optuna, which searches such a space, is not installed") as error:
        choose_variants(find_space(Request(LARGE)), Runner(map, map), tmp_path, CONSOLE)
    assert "pip install 'meshloom[optuna]'" in str(error.value)


@pytest.mark.ci
def test_of_all_combinations_the_first_is_the_best_and_none_is_tried_twice(tmp_path):
    listed = find_space(Request((*LARGE, "tune.max_candidates=16")))
    traced: list[TracePoint] = []

    def trace(function, points):
        traced.extend(points)
        return map(function, points)

    once = remembering(Runner(trace, map))
    values = dict(zip(listed.choices, value_of_variants(listed.variants, once), strict=True))
    assert all(value < TOO_LARGE for value in values.values())
    assert traced
    traced.clear()
    assert value_of_variants(listed.variants, once) == list(values.values())
    assert not traced

    def chosen(number):
        traced.clear()
        space = find_space(Request((*LARGE, f"tune.num_trials={number}")))
        return [one.choices for one in choose_variants(space, Runner(trace, map), tmp_path, CONSOLE)]

    first = chosen(3)
    assert len(first) == 3
    assert len({point.variant.choices for point in traced}) == 3
    assert chosen(3) == first
    assert not traced
    best = [values[choices] for choices in chosen(9)]
    assert best == sorted(values.values())[:3], "as many as may be listed, of 4 candidates each"
    assert {point.variant.choices for point in traced} == set(values) - set(first)
