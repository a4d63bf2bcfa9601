"""Tables of tune, sweep, runs and profile on a terminal of 80 columns: no line is broken, no word or number is lost."""

import re
from pathlib import Path

import numpy as np
import pytest

from meshloom.compiler.core.console import Console
from meshloom.compiler.declare.compose import Request
from meshloom.compiler.estimate.step_time import StepTime
from meshloom.compiler.figures import StepWork
from meshloom.compiler.report.views.profile import show_profile
from meshloom.compiler.target.accuracy import ProgramKind
from meshloom.compiler.tune.answer import Answer, Estimated, WhatIf
from meshloom.compiler.tune.price import Prices
from meshloom.compiler.tune.space import find_candidates
from meshloom.runtime.cli.runs import show_runs
from meshloom.runtime.rundir.profile_files import read_profile
from meshloom.runtime.sweep.rows import Row
from meshloom.runtime.sweep.table import show_table
from meshloom.runtime.tune.show import show_answer
from meshloom.runtime.tune.variants import find_space
from support.narrow import View, check_fits_80, shown_at, words_of
from support.profiles import MODULE, STEPS, TPU_STEP, write_run
from support.reports import step_figures
from support.sweeps import figures, point, sweep_file
from support.traces import tpu_trace

WORK = StepWork(tokens_per_step=8192, model_flops=10**15, num_chips=8, peak_flops_per_second=4e14)
LONG = Path("multirun/2026-11-26/00-09-22")


def _answer() -> Answer:
    words = ("model=llama2_7b", "target=v5p-16", "data=synthetic", "global_batch_size=64", "sequence_length=128")
    space = find_space(Request((*words, "tune.microbatches=[1]", "tune.groups.sharding=[fsdp_tensor]")))
    candidates, refused = find_candidates(space.variants)
    refused.add(
        "mesh: fsdp=3 does not divide the 8 devices of the target, whatever the others are", ("mesh.fsdp=3",), 7
    )
    best = tuple(
        Estimated(candidate=one, figures=step_figures(
                      WORK, step_seconds=8.96 + n, compute_seconds=8.0, exposed_seconds=0.96 + n,
                      exposed_by_axes={"fsdp": 0.5 + n, "fsdp+tensor": 0.46}, bubble_seconds=0.0, peak_bytes=2**33,
                  ), work=WORK, cost=0.0123, overlap=one.variant.spec.overlap)
        for n, one in enumerate(candidates[:6])
    )  # fmt: skip
    ones = np.ones(len(candidates))
    kinds: list[tuple[ProgramKind, ...]] = [("dense",) for _ in candidates]
    prices = Prices(tuple(candidates), tuple(kinds), 2**33 * ones, ones, StepTime(8 * ones, {("fsdp",): ones}))
    changes = (WhatIf("links of twice the bandwidth", candidates[0], candidates[1], 8.96, 7.5),)
    return Answer(space.variants[0].target(), best, prices, refused, 2**34, changes)


def _points() -> list[Row]:
    swept = [{"optimizer.learning_rate": 3e-4, "mesh.tensor": n, "remat": "save_names"} for n in (1, 2, 4)]
    rows = [
        point(
            n, each, figures=figures(step_seconds=1.0 + n, final_loss=2.5, training_seconds=1e6, training_cost=12345.6)
        )
        for n, each in enumerate(swept)
    ]
    why = "needs 103.5 GiB of 31.2 GiB, of which parameters and the state of the optimizer take 97.0 GiB alone"
    return [*rows, point(3, {**swept[0], "mesh.tensor": 8}, status="does_not_fit", why=why)]


def _runs(console: Console) -> None:
    why = "the loss is NaN at step 1,234, and on_nonfinite=stop ends the run where it is, with what was saved before"
    runs = [
        {"directory": str(LONG / name), "command": "train", "state": state, "why": why if state == "failed" else None,
         "step": 1234, "num_steps": 300_000, "loss": 2.5, "changed": "2026-11-26T00:09:22+00:00"}
        for name, state in (("first", "done"), ("second", "failed"))
    ]  # fmt: skip
    show_runs(runs, [], console, is_whole=False)


@pytest.fixture(scope="module")
def views(tmp_path_factory) -> dict[str, View]:
    answer, rows = _answer(), _points()
    run = write_run(tmp_path_factory.mktemp("run"), tpu_trace([[TPU_STEP]], module=MODULE, steps=STEPS, every=10.0))
    profile = read_profile(run).report
    files = [LONG / "profile.json", LONG / "profile.html"]
    return {
        "tune": lambda console: show_answer(answer, console),
        "sweep": lambda console: show_table(console, sweep_file(rows), rows, directory=LONG),
        "runs": _runs,
        "profile": lambda console: show_profile(profile, console, files=files),
    }


@pytest.mark.parametrize("name", ["runs", "profile"])
def test_80_columns_show_the_words_of_240(views, name):
    narrow, wide = shown_at(80, views[name]), shown_at(240, views[name])
    assert words_of(narrow) == words_of(wide)
    assert max(map(len, wide)) > 80, "it would fit anyway"
    check_fits_80(narrow)


@pytest.mark.parametrize(("name", "heading"), [("sweep", "point"), ("tune", "candidate")])
def test_in_80_columns_keys_are_in_one_column(views, name, heading):
    narrow, wide = shown_at(80, views[name]), shown_at(240, views[name])
    check_fits_80(narrow)
    new = {word for word in words_of(narrow) if word not in words_of(wide)} - {heading}
    assert all(re.fullmatch(r"mesh\.\w+=\d+", word) for word in new), "no half of a word"
    assert new
