"""`meshloom tune` as its users type it: searched in processes, shown, and written."""

import json
import os
import sys

import pytest

from conftest import SMALL
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request
from meshloom.compiler.tune.answer import TOO_LARGE, Runner, remembering, value_of_variants
from meshloom.compiler.tune.families import TracePoint
from meshloom.runtime.sweep.read import read_sweep
from meshloom.runtime.sweep.rows import FIGURES, Row, chip_panels, tied_with_best
from meshloom.runtime.tune.variants import choose_variants, find_space
from support.commands import run_in_process
from support.sweeps import figures, point

TUNE = ("tune", *SMALL, "precision=bfloat16", "tune.groups.sharding=[fsdp_tensor]", "tune.groups.remat=[full]",
        "tune.microbatches=[1]", "tune.mesh.replica=[1]")  # fmt: skip
STEP = FIGURES["step_seconds"]
NARROW = ("model=linear_stack", "data=synthetic", "target=v5p-16", "global_batch_size=64", "tune.mesh={tensor: [1]}",
          "tune.microbatches=[1]")  # fmt: skip
LARGE = (*NARROW, "tune.max_candidates=15", "tune.groups.sharding=[fsdp_tensor]", "tune.groups.remat=[none,full]",
         "+tune.groups.precision=[bfloat16,bfloat16_params]")  # fmt: skip
CONSOLE = Console(is_quiet=True)


@pytest.fixture
def one_process(monkeypatch):
    """A search has a process for each core, and each imports JAX: for a few candidates that is most of the time."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)


@pytest.mark.ci  # its processes import JAX
def test_a_search_leaves_a_table_an_answer_and_the_winners_file(tmp_path):
    run_dir = tmp_path / "run"
    done = run_in_process(*TUNE, "target=v5p-16", "tune.pin.mesh.tensor=2", f"hydra.run.dir={run_dir}")
    assert done.returncode == 0, done.stderr
    assert "it is the only one that fits" in done.stdout
    answer = json.loads((run_dir / "tune.json").read_text())
    assert answer["winner"] == answer["best"][0]["overrides"]
    assert "mesh.tensor=2" in answer["winner"]
    sweep = read_sweep(run_dir)
    assert [row.overrides for row in sweep.rows] == [tuple(one["overrides"]) for one in answer["best"]]
    assert sweep.rows[0].figures is not None
    assert sweep.rows[0].figures.step_seconds == answer["best"][0]["figures"]["step_seconds"]
    assert "the sweep is running" not in (run_dir / "sweep.html").read_text()
    again = run_in_process("explain", "--config-dir", str(run_dir), "experiment=tiny_v5p-16")
    assert again.returncode == 0, again.stderr
    assert "fsdp=4 x tensor=2" in again.stdout


@pytest.mark.ci
@pytest.mark.usefixtures("one_process")
def test_targets_are_compared_and_one_that_cannot_be_is_a_row(tmp_path):
    words = (
        "tune.targets=[h100-16,cpu-8]",
        "tune.tokens=2B",
        "tune.pin.mesh.tensor=1",
        "tune.price_per_chip_hour={h100: 4}",
    )
    done = run_in_process(*TUNE, *words, f"hydra.run.dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    first, second = read_sweep(tmp_path).rows
    figures = first.figures
    assert figures is not None
    assert figures.step_seconds
    seconds = 2e9 / figures.tokens_per_step * figures.step_seconds
    assert figures.training_seconds == pytest.approx(seconds)
    assert figures.training_cost == pytest.approx(16 * 4 * seconds / 3600)
    assert second.status == "refused"
    assert second.why is not None
    assert "nothing is known of the speed" in second.why
    told = json.loads((tmp_path / "tune.json").read_text())
    on_chips, on_cpu = told["targets"]
    assert told["tied_with_best"] == ["h100-16"]  # whose memory of the host is not known
    low, high = on_chips["step_range_seconds"]
    assert low < figures.step_seconds < high
    assert high / figures.step_seconds == pytest.approx(on_chips["range_factor"])
    assert on_chips["training_range_cost"] == pytest.approx([figures.training_cost * each / figures.step_seconds
                                                             for each in (low, high)])  # fmt: skip
    assert (on_cpu["target"], on_cpu["status"]) == ("cpu-8", "refused")
    assert on_chips["best"][0]["figures"]["step_seconds"] == figures.step_seconds
    assert on_chips["why"]
    assert (tmp_path / "experiment" / "tiny_h100-16.yaml").exists()


@pytest.mark.ci
@pytest.mark.usefixtures("one_process")
def test_a_target_of_unknown_speed_is_one_clear_error(tmp_path):
    done = run_in_process(*TUNE, "target=cpu-8", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: target: nothing is known of the speed and the memory of cpu-8\n  fix: name chips"
    )


def _on(index: int, target: str, seconds: float, factor: float | None = 1.2, **changed) -> Row:
    chip, number = target.split("-")
    known = figures(
        step_seconds=seconds, range_factor=factor, target=target, chip=chip, num_chips=int(number), **changed
    )
    return point(index, {"target": target}, figures=known)


def _tied(rows: list[Row]) -> list[str]:
    return [str(row.swept["target"]) for row in tied_with_best(rows, STEP)]


def test_targets_whose_ranges_overlap_are_a_tie():
    """3 % apart at errors of 20 %: a tie. Twice as long: not one. The order in which they are named does not matter."""
    rows = [_on(0, "v5p-128", 1.03), _on(1, "v6e-64", 1.0), _on(2, "v5e-256", 2.0)]
    assert _tied(rows) == ["v6e-64", "v5p-128"]
    assert _tied(rows[1:]) == ["v6e-64"]
    assert _tied([_on(0, "v6e-64", 1.0, 1.01), _on(1, "v5p-128", 1.03, 1.01)]) == ["v6e-64"]
    assert _tied([_on(0, "v6e-64", 1.0, None), _on(1, "v5p-128", 1.03, None)]) == ["v6e-64"]


def test_predictions_on_one_chip_are_off_together():
    """10 % apart, and a tie on two chips; on one chip the order is surer than the range of each."""
    assert _tied([_on(0, "v5p-64", 1.0), _on(1, "v6e-64", 1.1)]) == ["v5p-64", "v6e-64"]
    assert _tied([_on(0, "v5p-64", 1.0), _on(1, "v5p-128", 1.1)]) == ["v5p-64"]
    assert _tied([_on(0, "v5p-64", 1.0), _on(1, "v5p-128", 1.02)]) == ["v5p-64", "v5p-128"]


def test_panels_have_the_best_of_each_target_with_its_range_and_its_tie():
    rows = [
        _on(0, "v5p-64", 2.4, training_cost=100.0), _on(1, "v5p-64", 2.0, training_cost=90.0),
        _on(2, "v6e-256", 1.9, training_cost=300.0), point(3, {"target": "cpu-8"}, status="refused"),
    ]  # fmt: skip
    step, tokens, cost = chip_panels(rows, STEP)
    assert [panel["heading"] for panel in (step, tokens, cost)] == ["step", "tokens/s", "cost of training"]
    assert [(mark["index"], mark["chips"], mark["value"], mark["isTied"]) for mark in step["marks"]] == [
        (1, 64, 2.0, True), (2, 256, 1.9, True),
    ]  # fmt: skip
    assert step["marks"][0]["range"] == pytest.approx((2.0 / 1.2, 2.4))
    assert [mark["value"] for mark in tokens["marks"]] == [65536 / 2.0, 65536 / 1.9]
    assert [mark["value"] for mark in cost["marks"]] == [90.0, 300.0]
    assert chip_panels(rows[:2], STEP) == [], "one number of chips has no figure over it"


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
