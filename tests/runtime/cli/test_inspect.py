"""`meshloom inspect` as its users type it."""

import gzip
import json
import re

import fsspec
import pytest

from conftest import plan_of
from meshloom.compiler.analysis.schedule_analysis import NOT_DECLARED, analyse_schedule
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.schema import Report
from meshloom.compiler.xla.aot import Built, ProgramMemory
from meshloom.compiler.xla.hlo import parse_module
from meshloom.compiler.xla.programs import Fingerprint
from meshloom.runtime.compile.artifact import write_artifact
from meshloom.runtime.rundir.run_dir import write_declaration
from support.commands import run_in_process
from support.recorded import recorded_text
from support.schedules import GATHER, compute, module

TEXT = module(f"  ROOT %g = {GATHER}", compute("a", 5))


def test_the_largest_program_of_a_dump_is_reported(tmp_path):
    dump = tmp_path / "dump"
    dump.mkdir()
    (dump / "module_0001.jit_init.cl_9.after_optimizations.txt").write_text(TEXT)
    (dump / "module_0002.jit_step.cl_9.after_optimizations.txt").write_text(recorded_text("v5e_tensor"))
    (dump / "module_0002.jit_step.cl_9.after_optimizations-buffer-assignment.txt").write_text("x" * 2_000_000)
    done = run_in_process("inspect", str(dump), "target=v5e-8", "--to", str(tmp_path / "out"))
    assert done.returncode == 0
    assert "module_0002.jit_step.cl_9.after_optimizations.txt: jit_train_step, " in done.stderr
    assert ", is the largest of 2 programs (jit_train_step, step); --module NAME chooses" in done.stderr
    assert "jit_train_step on v5e-8" in done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.json", "report.html", "timeline.json"}
    written = json.loads((tmp_path / "out/report.json").read_text())
    again = run_in_process("inspect", str(dump), "target=v5e-8", "--to", str(tmp_path / "out"), "--json")
    assert json.loads(again.stdout) == written


def test_files_go_to_a_new_directory_each_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.txt").write_text(TEXT)
    (tmp_path / "step.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    fsspec.filesystem("memory").pipe_file("/programs/step.txt.gz", gzip.compress(TEXT.encode()))
    for name in ("step.txt", "step.txt.gz", "memory://programs/step.txt.gz"):
        done = run_in_process("inspect", name, "target=v5e-4")
        assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "outputs").rglob("report.json"))) == 3
    assert "no file matches 'memory://programs/none'" in run_in_process("inspect", "memory://programs/none").stderr


V5E_4 = ("target=v5e-4", "precision=bfloat16", "sharding.on_replicated=allow", "sharding=fsdp_tensor", "mesh.tensor=2")


def test_an_artifact_of_ours_has_the_figures_of_its_own_report(tmp_path):
    """Its declaration says the target, and where the devices of its mesh lie."""
    plan, text = plan_of(*V5E_4), TEXT.replace("{{0,1,2,3}}", "{{0,1},{2,3}}")
    (tmp_path / "run").mkdir()
    write_declaration(plan, tmp_path / "run")
    memory = ProgramMemory(1000, 400, 300, 5000, 70, 0, 6100)
    built = Built(text, memory, None, {}, {}, 1.0, ())
    write_artifact(tmp_path / "run/artifact", Fingerprint({}, {}, {}, {}, {}, {}), built, ())
    own = analyse_schedule(parse_module(text), plan, estimate_step(plan).communication)
    for place in ("run", "run/artifact"):
        done = run_in_process("inspect", str(tmp_path / place), "--to", str(tmp_path / "out"), "--json")
        assert (done.returncode, done.stderr) == (0, "")
        found = Report.model_validate_json(done.stdout)
        assert [each.mesh_axes for each in found.collectives] == [("tensor",)]
        assert found.collectives[0].alone_seconds == own.collectives[0].alone_seconds
        assert found.compiled.compute_seconds_by_kind == own.step.compute_seconds_by_kind
        assert (found.compiled.step_seconds, found.compiled.mfu) == (own.step.step_seconds, Unknown(NOT_DECLARED))
        assert (found.compiled.peak_bytes, found.compiled.fits) == (memory.peak_bytes, True)
        assert found.target.placement == plan.mesh.placement.describe()
    done = run_in_process("inspect", str(tmp_path / "run"), "target=v5e-8")
    assert "says where its program runs" in done.stderr
    (tmp_path / "run/spec.yaml").write_text("target: {kind: nothing}")
    done = run_in_process("inspect", str(tmp_path / "run"))
    assert (done.returncode, "spec.yaml: is damaged, or of another version" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("step.txt",), "target: it is missing"),
        (("step.txt", "target=v5p-7"), "there is no slice of 7 cores"),
        (("step.txt", "target=v5e-4", "remat=full"), "remat=full: this says nothing about a program that is compiled"),
        (("step.txt", "target=v5e-8"), "the program is for 4 devices, and v5e-8 has 8"),
        (("half.txt", "target=v5e-4"), "half.txt: this is not a whole HLO module"),
        (("binary", "target=v5e-4"), "binary: is not text: byte 2 is NUL"),
        ((".", "target=v5e-4"), "there is no *after_optimizations.txt in it"),
        (("nowhere", "target=v5e-4"), "nowhere: there is no such file or directory"),
        (("target=v5e-4",), "PROGRAM is missing"),
        (("step.txt", "target=v5e-4", "--trips", "many"), "--trips: many is not a number of iterations from 0"),
        (("step.txt", "target=v5e-4", "--trips", "7"), "trips: the program has no loop of an unknown number"),
        (("step.txt", "target=v5e-4", "--taken", "1.5"), "--taken: 1.5 is not a share from 0 to 1"),
        (("step.txt", "target=v5e-4", "--module", "n"), "module: step.txt has no program n\n  fix: use one of step"),
        (("step.txt", "target=v5e-4", "--to", "step.txt"), "step.txt cannot be written"),
    ],
)
def test_a_mistake_is_one_error_with_a_fix(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.txt").write_text(TEXT)
    (tmp_path / "half.txt").write_text(TEXT[: len(TEXT) // 2])
    (tmp_path / "binary").write_bytes(b"\x80\x81\x00")
    done = run_in_process("inspect", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("error: ") == done.stderr.count("\n  fix: ") == 1
    assert not (tmp_path / "outputs").exists()


def test_two_inspected_programs_are_compared(tmp_path, monkeypatch):
    """A change that moves lines is none; longer compute is one."""
    monkeypatch.chdir(tmp_path)
    text = recorded_text("v5e_tensor")
    moved = re.sub(r"=(\d+) end_line=", lambda found: f"={int(found[1]) + 7} end_line=", text)
    assert moved != text
    texts = {"a": text, "moved": moved, "slower": text.replace('"estimated_cycles":"5', '"estimated_cycles":"95')}
    for name, changed in texts.items():
        (tmp_path / f"{name}.txt").write_text(changed)
        assert run_in_process("inspect", f"{name}.txt", "target=v5e-8", "--to", name).returncode == 0
    same = run_in_process("diff", "a", "moved")
    assert (same.returncode, same.stderr) == (0, "")
    assert same.stdout.splitlines()[-1] == "nothing changed"
    assert "a has no declaration: programs are compared alone" in same.stdout
    found = json.loads(run_in_process("diff", "a", "slower", "--json").stdout)
    assert "step_seconds" in [change["where"] for change in found["step"]]
    assert not any(found[part] for part in ("config", "plan", "shardings", "memory", "build"))


def test_a_calibration_of_ones_own_applies(tmp_path):
    (tmp_path / "step.txt").write_text(TEXT)
    (tmp_path / "mine/calibration").mkdir(parents=True)
    (tmp_path / "mine/calibration/slow.yaml").write_text(
        "{chip: v5e, matmul: 1.0, attention: 1.0, other: 3.0, links: {}, source: a run}\n"
    )
    line = ("inspect", str(tmp_path / "step.txt"), "target=v5e-4", "--to", str(tmp_path / "out"), "--json")
    plain = json.loads(run_in_process(*line).stdout)
    done = run_in_process(*line, "calibration=slow", "--config-dir", str(tmp_path / "mine"))
    assert done.returncode == 0, done.stderr
    slow = json.loads(done.stdout)
    assert slow["compiled"]["compute_seconds"] == pytest.approx(3 * plain["compiled"]["compute_seconds"])
    assert "other 3" in slow["target"]["calibration"]
