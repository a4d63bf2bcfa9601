"""`meshloom profile` as its users type it."""

import json
import shlex

import pytest

from support.browser import CHROMIUM, chromium
from support.commands import run_in_process
from support.profiles import GPU_STEP, MODULE, STEPS, TPU_STEP, prediction, write_run
from support.traces import gpu_trace, tpu_trace

TRACE = tpu_trace([[TPU_STEP, TPU_STEP]], module=MODULE, steps=STEPS, every=10.0)


def test_measured_and_predicted_times_are_shown_and_written(tmp_path):
    run_dir = write_run(tmp_path / "run", TRACE)
    done = run_in_process("profile", str(run_dir))
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split("  ")[0]: line.split() for line in done.stdout.splitlines() if line}
    predicted = prediction().step.step_seconds or 0
    assert rows["step"][1:3] == ["10.0", "ms"]
    assert rows["step"][-1] == f"{10e-3 / predicted:.2f}"
    assert rows["matmul"][1:] == ["6.30", "ms", "3.00", "ms", "2.10"]
    assert "all-gather, exposed" in done.stdout
    report = json.loads((run_dir / "profile.json").read_text())
    assert report == json.loads(run_in_process("profile", str(run_dir), "--json").stdout)
    assert report["step"]["measured_seconds"] == pytest.approx(10e-3)
    by_name = run_in_process("profile", str(run_dir), "--hlo").stdout
    assert "layers/dot_general, forward  mm.1" in by_name


def test_traces_of_all_processes_are_read(tmp_path):
    run_dir = write_run(tmp_path / "run", TRACE)
    write_run(run_dir, TRACE, process=11)
    report = json.loads(run_in_process("profile", str(run_dir), "--json").stdout)
    assert (report["num_processes"], report["num_devices"], report["num_executions"]) == (2, 2, 4)


@pytest.mark.parametrize(
    ("case", "told"),
    [("no directory", "there is no such directory"),
     ("no trace", "no step of this run was traced"),
     ("damaged prediction", "is damaged, or of another version of Meshloom"),
     ("damaged trace", "is not a trace that can be read: Failed to parse XSpace"),
     ("another program", "its trace has no run of the program jit_train_step"),
     ("no path", "RUN is missing")],
)  # fmt: skip
def test_what_cannot_be_shown_is_one_error_with_a_fix(tmp_path, case, told):
    run_dir = tmp_path / "run"
    if case == "no trace":
        run_dir.mkdir()
    elif case != "no directory":
        other = tpu_trace([[TPU_STEP]], module="jit_other", steps=(1,), every=10.0)
        write_run(run_dir, {"damaged trace": b"no trace", "another program": other}.get(case, TRACE))
    if case == "damaged prediction":
        (run_dir / "profile/predicted.json").write_text("{}")
    done = run_in_process("profile", *([] if case == "no path" else [str(run_dir)]))
    assert done.returncode == 2
    assert told in done.stderr
    assert "\n  fix: " in done.stderr
    assert not (run_dir / "profile.json").exists()


def test_a_calibration_is_written_where_configs_are_found(tmp_path):
    run_dir = write_run(tmp_path / "run", TRACE)
    done = run_in_process("calibrate", str(run_dir), "--to", str(tmp_path / "mine"), "--name", "measured")
    assert (done.returncode, done.stderr) == (0, "")
    use = shlex.split(done.stdout.splitlines()[-1].split("use it: ")[1])
    assert use[1:] == ["explain", "--config-dir", str(tmp_path / "mine"), "calibration=measured"]
    explained = run_in_process(*use[1:], "target=v5e-4", "data=synthetic")
    assert (explained.returncode, explained.stderr) == (0, "")
    assert f"calibrated by 1 run ({run_dir})" in explained.stdout
    assert ": matmul 2.1, other 19.6, ICI " in explained.stdout


def test_a_calibration_that_cannot_be_is_one_error(tmp_path):
    done = run_in_process("calibrate", str(tmp_path / "none"), "--to", str(tmp_path))
    assert (done.returncode, "there is no such directory" in done.stderr) == (2, True)
    cpu = write_run(tmp_path / "cpu", TRACE, predicted=prediction("cpu-4"))
    done = run_in_process("calibrate", str(cpu), "--to", str(tmp_path))
    assert "a run was on no chip that is known" in done.stderr


@pytest.mark.ci
@pytest.mark.skipif(not CHROMIUM, reason="there is no chromium: apt-get install chromium")
def test_the_page_has_predicted_and_measured_lanes_on_one_axis(tmp_path):
    trace = gpu_trace([[GPU_STEP, GPU_STEP]], module=MODULE, steps=STEPS, every=10.0)
    run_dir = write_run(tmp_path / "run", trace, predicted=prediction("h100-4"))
    assert run_in_process("profile", str(run_dir)).returncode == 0
    with chromium() as browser:
        page = browser.open(run_dir / "profile.html")
        lanes = page.js("[...document.querySelectorAll('#chart text')].map(t => t.textContent)")
        assert [name for name in lanes if name.startswith(("predicted", "measured"))] == [
            "measured compute", "measured NVLink", "predicted compute", "predicted NVLink",
        ]  # fmt: skip
        assert page.js("document.querySelectorAll('#chart rect.matmul').length") >= 2
        page.js("document.querySelector('#operations th button').click()")
        assert (page.errors, page.requests) == ([], [(run_dir / "profile.html").resolve().as_uri()])
