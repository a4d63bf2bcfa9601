"""The space of a request: what is typed is a pin, and a winner's file declares the winner."""

import io
import multiprocessing
import os
import time
from dataclasses import replace

import pytest

from conftest import SMALL, spec_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.hydra_settings import search_path_override
from meshloom.compiler.figures import StepWork, no_figures
from meshloom.compiler.tune.answer import Estimated
from meshloom.compiler.tune.space import find_candidates
from meshloom.runtime.core.failures import RunFailed
from meshloom.runtime.tune import variants as module
from meshloom.runtime.tune.variants import find_space, progress, workers, write_experiment

DECLARED = (
    *SMALL,
    "target=v5p-16",
    "precision=bfloat16",
    "tune.groups={sharding: [fsdp_tensor, zero1], remat: [full, none]}",
)
CONSOLE = Console(is_quiet=True)
TARGET = spec_of("target=v5p-16").target


def test_a_space_is_every_combination_of_its_groups():
    space = find_space(Request(DECLARED))
    assert [dict(one.choices) for one in space.variants] == [
        {"sharding": sharding, "remat": remat, "overlap": "auto"}
        for sharding in ("fsdp_tensor", "zero1")
        for remat in ("full", "none")
    ]
    assert [one.spec.remat.policy for one in space.variants] == ["full", "none"] * 2
    assert space.pins == ()


def test_what_is_typed_is_not_searched():
    space = find_space(Request((*DECLARED, "remat=save_dots", "mesh.tensor=2", "num_microbatches=4")))
    assert {dict(one.choices)["remat"] for one in space.variants} == {"save_dots"}
    candidates, _ = find_candidates(space.variants[:1])
    assert {(one.mesh.sizes["tensor"], one.num_microbatches) for one in candidates} == {(2, 4)}
    assert space.pins == ("remat=save_dots", "mesh.tensor=2", "num_microbatches=4")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mesh=fsdp", "mesh: the mesh is searched"),
        ("mesh.tensor=-1", "mesh.tensor: -1 pins nothing"),
        ("tune.pin.model=tiny", r"tune\.pin\.model: is not a key that is searched"),
        ("tune.groups.remat=[fulll]", "tune.groups: sharding=fsdp_tensor remat=fulll overlap=auto: remat: there is no"),
        ("tune.objective=cost", "tune.objective: is cost, and no price is known"),
    ],
)
def test_a_space_that_cannot_be_is_one_clear_error(override, message):
    with pytest.raises(ConfigError, match=message):
        find_space(Request((*DECLARED, override)))


def test_the_winners_file_declares_the_winner(tmp_path):
    """Composed again from the file alone, and compared with what was searched."""
    space = find_space(Request((*DECLARED, "optimizer.learning_rate=3e-4", "run.name=tuned", "tune.microbatches=[2]")))
    candidates, _ = find_candidates(space.variants[:1])
    one = next(each for each in candidates if each.mesh.sizes["tensor"] == 4)
    folder = tmp_path / "experiment"
    folder.mkdir()
    winner = Estimated(
        candidate=one, figures=no_figures("not estimated"), work=StepWork(1, 1, 1, Unknown("no peak")), cost=None,
        overlap=one.spec().overlap,
    )  # fmt: skip
    write_experiment(space, winner, folder / "winner.yaml", "it is the fastest")
    request = Request(tuple(search_path_override(["experiment=winner"], str(tmp_path))))
    found = read_spec(request, then=lambda spec: spec)
    expected = read_spec(replace(space.request, overrides=(*space.request.overrides, *one.overrides)), then=lambda s: s)
    assert found.model_copy(update={"tune": expected.tune}).as_compared() == expected.as_compared()


@pytest.mark.ci
def test_a_process_that_dies_ends_the_search_with_one_error():
    with pytest.raises(RunFailed, match="a process that traces candidates died"), workers(TARGET, CONSOLE) as runner:
        list(runner.estimate(os._exit, [3]))


@pytest.mark.ci
def test_an_interrupted_search_leaves_no_process_behind():
    """What the processes are doing is not waited for: here it would be an hour."""
    children = []

    def search() -> None:
        with workers(TARGET, CONSOLE) as runner:
            next(iter(runner.estimate(time.sleep, [0, 3600, 3600])))
            children.extend(multiprocessing.active_children())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search()
    assert children
    assert not any(child.is_alive() for child in children)


@pytest.mark.parametrize(
    ("is_terminal", "seconds", "lines"),
    [(False, 0.0, ["tracing: 1 of 3", "tracing: 2 of 3", "tracing: 3 of 3"]), (False, 3600.0, []), (True, 0.0, [])],
)
def test_without_a_terminal_a_line_now_and_then_says_how_far_a_search_is(monkeypatch, is_terminal, seconds, lines):
    monkeypatch.setattr(module, "SECONDS_PER_LINE", seconds)
    written = io.StringIO()
    done = list(progress(Console(written, is_terminal=is_terminal), "tracing", "abc", 3))
    assert done == ["a", "b", "c"]
    shown = [line.partition(",")[0] for line in written.getvalue().splitlines() if " of " in line]
    assert shown == lines
