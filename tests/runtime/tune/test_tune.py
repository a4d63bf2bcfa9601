"""`meshloom tune` as its users type it: searched in processes, shown, and written."""

import json

import pytest

from conftest import SMALL
from meshloom.runtime.sweep.read import read_sweep
from support.commands import run_in_process

TUNE = ("tune", *SMALL, "precision=bfloat16", "tune.groups.sharding=[fsdp_tensor]", "tune.groups.remat=[full]",
        "tune.microbatches=[1]", "tune.mesh.replica=[1]")  # fmt: skip

pytestmark = pytest.mark.ci  # its processes import JAX


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


def test_a_target_of_unknown_speed_is_one_clear_error(tmp_path):
    done = run_in_process(*TUNE, "target=cpu-8", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: target: nothing is known of the speed and the memory of cpu-8\n  fix: name chips"
    )
