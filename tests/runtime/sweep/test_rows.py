"""Directories of points: named by their overrides, safe, and each different."""

import string
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import plan_of
from meshloom.compiler.estimate.estimate import estimate_declared, time_figures
from meshloom.compiler.estimate.step_time import StepTime
from meshloom.runtime.sweep.outcomes import outcome_of_plan
from meshloom.runtime.sweep.rows import (
    FIGURES,
    MOST_NAME_BYTES,
    Row,
    best_first,
    best_of,
    directory_name,
    pareto_front,
    swept_keys,
    swept_of,
    typed_value,
)
from support.sweeps import figures, point, sweep_file

SAFE = set(string.ascii_letters + string.digits + "._=@,+-")
coordinates = st.integers(0, 6).map(float)


def test_a_directory_is_named_as_its_overrides_are_typed():
    assert directory_name(["mesh.tensor=4", "remat=full"]) == "mesh.tensor=4,remat=full"
    assert directory_name(["optimizer.learning_rate=1e-3"]) == "optimizer.learning_rate=1e-3"


@given(st.lists(st.text(max_size=120), max_size=4))
def test_every_name_is_safe(overrides):
    name = directory_name(overrides)
    assert set(name) <= SAFE
    assert 0 < len(name.encode()) <= MOST_NAME_BYTES
    assert not name.startswith((".", "-")), "neither hidden nor a flag"


@given(st.sets(st.tuples(st.text(), st.text()), min_size=2, max_size=5))
def test_different_overrides_have_different_names(points):
    points = {(f"a={first}", f"b={second}") for first, second in points}
    assert len({directory_name(point) for point in points}) == len({",".join(point) for point in points})


def test_swept_overrides_are_found_as_they_were_typed():
    overrides = ["++num_steps=3", "model=tiny", "++mesh.tensor=4", "+experiment=smoke"]
    assert swept_of(overrides, ["mesh.tensor", "experiment"]) == ["mesh.tensor=4", "experiment=smoke"]


@given(st.lists(st.tuples(coordinates, coordinates), max_size=30))
def test_the_pareto_front_is_what_brute_force_finds(points):
    def is_beaten(one: tuple[float, float]) -> bool:
        return any(other != one and other[0] <= one[0] and other[1] <= one[1] for other in points)

    front = [points[index] for index in pareto_front(points)]
    assert front == sorted({one for one in points if not is_beaten(one)})


def test_a_point_that_is_not_done_is_never_the_best():
    too_large = point(0, {"a": 1}, status="does_not_fit", figures=figures(step_seconds=0.1, fits=False))
    rows = [too_large, point(1, {"a": 2}, figures=figures(step_seconds=2.0)), point(2, {"a": 3})]
    assert [row.index for row in best_first(rows, FIGURES["step_seconds"])] == [2, 1, 0]
    best = best_of(rows, FIGURES["step_seconds"])
    assert best is not None
    assert best.index == 2
    assert best_of([too_large], FIGURES["step_seconds"]) is None


def test_each_figure_knows_which_of_two_is_better():
    slow, quick = point(0, {"a": 1}, figures=figures(step_seconds=2.0)), point(1, {"a": 2})
    for name in ("step_seconds", "mfu", "tokens_per_second_per_chip", "exposed_seconds"):
        assert best_first([slow, quick], FIGURES[name])[0] == quick, name


def test_a_compiled_point_comes_before_a_better_estimate():
    estimated = point(0, {"a": 1}, figures=figures(basis="estimate", step_seconds=0.5))
    assert best_first([estimated, point(1, {"a": 2})], FIGURES["step_seconds"])[0].index == 1


def test_a_point_without_the_figure_comes_after_those_with_it():
    unknown = point(0, {"a": 1}, figures=figures(mfu=None))
    assert [row.index for row in best_first([unknown, point(1, {"a": 2})], FIGURES["mfu"])] == [1, 0]
    assert best_of([unknown], FIGURES["mfu"]) is None


def test_values_are_shown_as_they_were_typed():
    row = Row(index=0, overrides=("++optimizer.learning_rate=1e-3", "optimizer=[a,b]"), status="done",
              swept={"optimizer.learning_rate": 0.001, "optimizer": ["a", "b"]})  # fmt: skip
    assert typed_value(row, "optimizer.learning_rate") == "1e-3"
    assert typed_value(row, "optimizer") == "[a,b]"
    assert typed_value(row, "seed") == ""


def test_keys_that_never_vary_are_left_out_of_the_table():
    rows = [point(0, {"model": "tiny", "seed": 1}), point(1, {"model": "tiny", "seed": 2})]
    assert swept_keys(sweep_file(rows), rows) == ["seed"]
    assert swept_keys(sweep_file(rows[:1]), rows[:1]) == ["model", "seed"]


@pytest.mark.parametrize(("bubble", "seconds"), [(None, 2.5), (0.5, 3.0)])
def test_a_points_step_is_compute_exposed_and_bubble(bubble, seconds):
    plan = plan_of("target=v5p-8", "precision=bfloat16", "sharding.on_replicated=allow")
    estimate = estimate_declared(plan)
    given = estimate.figures.model_copy(
        update=time_figures(plan.target, plan.kinds, StepTime(2.0, {("stage",): 0.5}, bubble))
    )
    figures = outcome_of_plan(plan, replace(estimate, figures=given), None).figures
    assert figures is not None
    assert figures.step_seconds == seconds
    assert (figures.compute_seconds, figures.exposed_seconds, figures.bubble_seconds) == (2.0, 0.5, bubble or 0.0)
