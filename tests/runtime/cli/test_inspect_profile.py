"""`meshloom inspect PROFILE` as its users type it: a profile with known answers, in each form that it has."""

import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from jax.profiler import ProfileData
from jaxlib._hlo import hlo_module_from_text

from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.profile.compare import ProfileReport
from support.commands import run_in_process
from support.profiles import GPU_STEP, MODULE, STEPS, TEXT, TPU_STEP
from support.traces import Op, field, gpu_trace, metadata_plane, tpu_trace

PROTO = field(1, hlo_module_from_text(TEXT).as_serialized_hlo_module_proto())
TPU = tpu_trace([[TPU_STEP, TPU_STEP]] * 2, module=MODULE, steps=STEPS, every=10.0)
GPU = gpu_trace([[GPU_STEP, GPU_STEP]], module=MODULE, steps=(), every=10.0)
PROGRAM = metadata_plane({f"{MODULE}(7)": PROTO, "jit_init(3)": PROTO})
TYPED = "(bf16[32000000]{0} %all-gather-done.1)"  # as profilers print operands
EXPOSED = {"all-gather": 0.1e-3 + 1.0e-3, "reduce-scatter": 1.0e-3}  # what no compute overlaps, by TPU_STEP


def _write(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def _of_device(name: str, **says: str | int) -> bytes:
    """The plane of a device with what the profiler says of it."""
    stats = b""
    for number, (key, value) in enumerate(says.items(), start=1):
        stats += field(6, field(1, number) + field(5 if isinstance(value, str) else 3, value))
        stats += field(5, field(1, number) + field(2, field(1, number) + field(2, key)))
    return field(1, field(1, 9) + field(2, name) + stats)


def _json_trace(xspace: bytes) -> bytes:
    """The lines of an XSpace as `jax.profiler` writes them for Chrome."""
    rows: list[dict[str, object]] = []
    for pid, plane in enumerate(ProfileData.from_serialized_xspace(xspace).planes):
        rows.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": plane.name}})
        for tid, line in enumerate(plane.lines):
            rows.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": line.name}})
            rows += [
                {"ph": "X", "pid": pid, "tid": tid, "name": event.name, "ts": event.start_ns / 1e3,
                 "dur": event.duration_ns / 1e3, "args": {key: str(value) for key, value in event.stats}}
                for event in line.events
            ]  # fmt: skip
    return gzip.compress(json.dumps({"traceEvents": rows}).encode())


def _table(steps: Iterable[tuple[Op, ...]]) -> list[dict[str, object]]:
    """XProf's table of the same operations: their sums over steps and devices."""
    sums: dict[str, list[float]] = {}
    for name, begin, end in (op for step in steps for op in step if op[0] != "while.1"):
        sums.setdefault(name, []).append((end - begin) * 1e3)
    lines = [line.strip() for line in TEXT.replace("(%all-gather-done.1)", TYPED).splitlines()]
    category = {"mm": "convolution fusion", "work": "loop fusion"}
    return [
        {"program_id": "7", "category": category.get(name.split(".")[0], name.split(".")[0]), "hlo_op_name": name,
         "hlo_op_expression": next(line for line in lines if f"%{name} = " in line),
         "tf_op_name": "", "occurrences": len(times), "total_self_time": sum(times), "model_flop_rate": 0}
        for name, times in sums.items()
    ]  # fmt: skip


def _judged(*words: str) -> ProfileReport:
    done = run_in_process("inspect", *words, "--json")
    assert done.returncode == 0, done.stderr
    return ProfileReport.model_validate_json(done.stdout)


def _exposed(report: ProfileReport) -> dict[str, float]:
    return {row.kind: row.exposed.measured_seconds for row in report.kinds if row.exposed is not None}


def test_a_profile_is_judged_by_the_program_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _write(Path("log/plugins/profile/2026_01_01/old.xplane.pb"), GPU)
    _write(Path("log/plugins/profile/2026_02_02/host.xplane.pb"), TPU + PROGRAM)
    done = run_in_process("inspect", "log", "target=v5e-4", "--to", "out")
    assert done.returncode == 0, done.stderr
    assert "2026_02_02 is the newest of 2 sessions" in done.stderr
    assert "jit_train_step on v5e-4: steps 10 to 11 on 2 devices, a step took 10.0 ms" in done.stdout
    assert {path.name for path in Path("out").iterdir()} == {
        "report.json", "report.html", "timeline.json", "profile.json",
    }  # fmt: skip
    report = ProfileReport.model_validate_json(Path("out/profile.json").read_text())
    assert _exposed(report) == pytest.approx(EXPOSED)
    rows = {row.name: row for row in report.operations}
    assert rows["mm.1"].measured_seconds == pytest.approx(2.0e-3)
    assert rows["mm.1"].predicted_seconds == pytest.approx(1.0e-3), "the cycles in its text"
    assert report.operations[0].name == "mm.2", "the most wrong first"
    page = Path("out/report.html").read_text()
    lanes = json.loads(re.findall(r'id="events">(.*?)</script>', page)[0])["lanes"]
    assert lanes.index("measured compute") < lanes.index("predicted compute")
    assert _judged("log", "target=v5e-4", "--to", "again") == report


def test_each_form_of_a_profile_measures_the_same(tmp_path, monkeypatch):
    """Chrome's trace and the table take their program from a text, which may be compressed, or a protocol buffer."""
    monkeypatch.chdir(tmp_path)
    _write(Path("host.trace.json.gz"), _json_trace(TPU))
    _write(Path("step.txt.gz"), gzip.compress(TEXT.encode()))
    _write(Path("step.hlo.pb"), PROTO)
    _write(Path("host.xplane.pb"), TPU + PROGRAM)
    rows = _table([TPU_STEP] * 4)
    _write(Path("hlo_stats.json"), json.dumps({
        "cols": [{"id": key} for key in rows[0]],
        "rows": [{"c": [{"v": value} for value in row.values()]} for row in rows],
    }).encode())  # fmt: skip
    whole = _judged("host.xplane.pb", "target=v5e-4")
    times = {row.name: row.measured_seconds for row in whole.operations}
    for words in (("host.trace.json.gz", "step.txt.gz"), ("host.trace.json.gz", "step.hlo.pb")):
        other = _judged(*words, "target=v5e-4")
        assert {row.name: row.measured_seconds for row in other.operations} == pytest.approx(times)
        assert other.step == whole.step
    table = _judged("hlo_stats.json", "step.txt.gz", "target=v5e-4")
    kinds = {row.kind: (row.measured_seconds, row.predicted_seconds) for row in whole.kinds if row.exposed is None}
    assert {row.kind: row.measured_seconds for row in table.kinds if row.exposed is None} == pytest.approx(
        {kind: measured for kind, (measured, _) in kinds.items()}
    )
    assert _exposed(table) == pytest.approx(EXPOSED)
    alone = _judged("hlo_stats.json", "target=v5e-4")
    predicted = {row.name: row.predicted_seconds for row in alone.operations}
    assert predicted["reduce-scatter.1"] == pytest.approx(
        next(row.predicted_seconds for row in whole.operations if row.name == "reduce-scatter.1")
    )


def test_a_gpu_without_annotated_steps_is_judged(tmp_path):
    text = re.sub(r', backend_config=\{"estimated_cycles":"\d+"\}', "", TEXT)
    proto = field(1, hlo_module_from_text(text).as_serialized_hlo_module_proto())
    path = _write(tmp_path / "gpu.xplane.pb", GPU + metadata_plane({MODULE: proto}, "hlo_proto"))
    report = _judged(path, "target=h100-4", "--to", str(tmp_path / "out"))
    assert (report.platform, report.num_executions) == ("gpu", 2)
    assert _exposed(report) == pytest.approx({"all-gather": 1.0e-3, "reduce-scatter": 1.0e-3})


def test_iterations_that_the_program_does_not_say_are_those_that_ran(tmp_path):
    """The step is then predicted as if the program said three."""
    open_loop = TEXT.replace("%n = s32[] constant(3)", "%n = s32[] get-tuple-element(%c), index=0")
    proto = field(1, hlo_module_from_text(open_loop).as_serialized_hlo_module_proto())
    path = _write(tmp_path / "host.xplane.pb", TPU + metadata_plane({f"{MODULE}(7)": proto}))
    whole = _write(tmp_path / "whole.xplane.pb", TPU + PROGRAM)
    done = run_in_process("inspect", path, "target=v5e-4", "--to", str(tmp_path / "out"))
    assert "iterations by the profile: while.1=3" in done.stderr
    said = json.loads((tmp_path / "out/profile.json").read_text())["step"]["predicted_seconds"]
    assert said == _judged(whole, "target=v5e-4", "--to", str(tmp_path / "out")).step.predicted_seconds


def test_one_profile_calibrates_its_chip(tmp_path, monkeypatch):
    """The step is then predicted within 5 %; of it, 7 % ran nothing, which no kind of work accounts for."""
    monkeypatch.chdir(tmp_path)
    path = _write(Path("host.xplane.pb"), TPU + PROGRAM)
    before = _judged(path, "target=v5e-4").step
    done = run_in_process("calibrate", path, "target=v5e-4", "--to", "mine", "--name", "ours")
    assert done.returncode == 0, done.stderr
    after = _judged(path, "target=v5e-4", "calibration=ours", "--config-dir", "mine").step
    assert (before.ratio or 0) > 2
    assert after.ratio == pytest.approx(1, abs=0.05)


def test_a_process_without_a_home_directory_predicts_and_keeps_nothing(tmp_path, monkeypatch):
    def unknown(user):
        raise KeyError(user)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    path = _write(Path("host.xplane.pb"), TPU + PROGRAM)
    assert _judged(path, "target=v5e-4").step.ratio
    done = run_in_process("calibrate", path, "target=v5e-4")
    assert (done.returncode, "there is no home directory" in done.stderr) == (2, True)
    assert not (tmp_path / "~").exists()


def test_a_calibration_is_kept_for_its_chip_and_every_prediction_by_it_says_so(tmp_path, monkeypatch):
    """Where it is kept, a report compares with another of the same prices. A run, which has to be the same on each
    host, does not look for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path, text = _write(Path("host.xplane.pb"), TPU + PROGRAM), _write(Path("step.txt"), TEXT.encode())
    before = _judged(path, "target=v5e-4")
    assert run_in_process("inspect", text, "target=v5e-4", "--to", "base").returncode == 0
    done = run_in_process("calibrate", path, "target=v5e-4")
    kept = tmp_path / "config/meshloom/calibration/v5e.yaml"
    assert f"kept in {kept}" in done.stdout
    after = _judged(path, "target=v5e-4")
    assert (before.step.ratio or 0) > 2
    assert after.step.ratio == pytest.approx(1, abs=0.05)
    assert f"(kept in {kept}; calibration=none leaves it out)" in run_in_process("inspect", path, "target=v5e-4").stdout
    assert _judged(path, "target=v5e-4", "calibration=none") == before
    again = run_in_process("calibrate", path, "target=v5e-4", "--json")
    assert (
        json.loads(again.stdout)["calibration"]
        == json.loads(run_in_process("calibrate", "--json").stdout)[0]["calibration"]
    ), "what is kept is replaced, not corrected"
    assert run_in_process("guard", text, "target=v5e-4", "--base", "base").returncode == 0, "at the prices of the base"
    other = run_in_process("guard", text, "target=v5e-4", "calibration=auto", "--base", "base")
    assert (other.returncode, "another calibration" in other.stderr) == (2, True)

    words = ("target=v5e-4", "data=synthetic")
    chips = [read_spec(Request(words, predicts=predicts), plan_run).spec.calibration.chip for predicts in (True, False)]
    assert chips == ["v5e", None]
    assert read_spec(Request(("target=v6e-4", *words[1:]), predicts=True), plan_run).spec.calibration.chip is None

    kept.write_text("chip: [")
    assert "is no calibration that can be read" in run_in_process("inspect", text, "target=v5e-4").stderr
    assert run_in_process("calibrate", "--remove", "v6e").returncode == 2
    assert run_in_process("calibrate", "--remove", "v5e").returncode == 0
    assert not kept.exists()


TWO = (
    tpu_trace([[TPU_STEP, TPU_STEP]], module="jit_a", steps=(), every=10.0),
    tpu_trace([[TPU_STEP]], module="jit_b", steps=(), every=10.0),
)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bare.xplane.pb", "target=v5e-4"), "has no HLO of jit_train_step(7): it has no program at all"),
        (("bare.trace.json", "target=v5e-4"), "has no HLO of jit_train_step(7)"),
        (("kind.xplane.pb", "target=v5e-4"), "target: the profile is of TPU v6 Lite, and v5e-4 has TPU v5 lite"),
        (
            ("a100.xplane.pb", "target=h100-4"),
            "the profile is of GPUs of compute capability 8.0, and h100-4 has NVIDIA",
        ),
        (("kind.xplane.pb",), "target: it is missing; the profile is of TPU v6 Lite"),
        (("whole.xplane.pb", "target=v5e-8"), "the program is for 4 devices, and v5e-8 has 8"),
        (("two.xplane.pb", "target=v5e-4"), "2 programs took its time: jit_a(7) (66.7 %), jit_b(7) (33.3 %)"),
        (("whole.xplane.pb", "target=v5e-4", "--module", "jit_c"), "--module: whole.xplane.pb has no run of a program"),
        (("half.xplane.pb", "target=v5e-4"), "half.xplane.pb: is not a whole profile: it is cut off, or damaged"),
        (("half.trace.json.gz", "target=v5e-4"), "half.trace.json.gz: is not a complete gzip file"),
        (("half.trace.json", "target=v5e-4"), "half.trace.json: cannot be read as a profile: its JSON is not whole"),
        (("half.hlo.pb", "target=v5e-4"), "half.hlo.pb: this is not a whole HloProto"),
        (("other.csv", "target=v5e-4"), "other.csv: is not a table of operations"),
        (("half.csv", "target=v5e-4"), "half.csv: cannot be read as a profile: the table has no column occurrences"),
        (("bare.xplane.pb", "other.txt", "target=v5e-4"), "--module: bare.xplane.pb has no run of a program jit_other"),
        (("step.txt", "other.txt", "target=v5e-4"), "other.txt: step.txt is no profile, and has its program in itself"),
        (("torch.pt.trace.json", "target=h100-4"), "torch.pt.trace.json: has no operation of a program of XLA"),
        (("none.xplane.pb", "target=v5e-4"), "none.xplane.pb: there is no such file or directory"),
        (("gpu.xplane.pb", "target=v5e-4"), "target: the profile is of GPUs, and v5e-4 has TPU v5 lite"),
        (("empty.xplane.pb", "target=v5e-4"), "empty.xplane.pb: is empty"),
    ],
)
def test_a_mistake_is_one_error_with_a_fix(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    whole = TPU + PROGRAM
    files = {
        "bare.xplane.pb": TPU, "bare.trace.json": gzip.decompress(_json_trace(TPU)),
        "kind.xplane.pb": whole + _of_device("/device:TPU:9", device_type_string="TPU v6 Lite"),
        "a100.xplane.pb": GPU + _of_device("/device:GPU:9", compute_cap_major=8, compute_cap_minor=0),
        "whole.xplane.pb": whole, "two.xplane.pb": b"".join(TWO),
        "gpu.xplane.pb": GPU + PROGRAM, "empty.xplane.pb": b"",
        "half.xplane.pb": whole[: len(whole) // 2],
        "half.trace.json.gz": _json_trace(TPU)[:500], "half.trace.json": gzip.decompress(_json_trace(TPU))[:500],
        "torch.pt.trace.json": b'{"traceEvents": [{"ph": "X", "name": "gemm", "ts": 1, "dur": 2}]}',
        "half.hlo.pb": PROTO[: len(PROTO) // 2], "other.csv": b"a,b\n1,2\n", "half.csv": b"rank,hlo_op_name\n1,a\n",
        "step.txt": TEXT.encode(), "other.txt": TEXT.replace(MODULE, "jit_other").encode(),
    }  # fmt: skip
    for name in words:
        if name in files:
            _write(Path(name), files[name])
    done = run_in_process("inspect", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("error: ") == done.stderr.count("\n  fix: ") == 1
    assert not (tmp_path / "outputs").exists()
