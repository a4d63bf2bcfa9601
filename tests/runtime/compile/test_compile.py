"""Compiling ahead of time: the program that `train` runs, an artifact of it, and a verdict."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from conftest import SMALL, plan_of, spec_of
from meshloom.compiler.analysis.compiled_step import NO_PROGRAM, CompiledStep
from meshloom.compiler.analysis.lint import TOO_EXPOSED
from meshloom.compiler.analysis.program_memory import PeakMemory
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import DOES_NOT_FIT, ConfigError
from meshloom.compiler.core.known import Unknown, known, why_unknown
from meshloom.compiler.core.traffic import TrafficSource
from meshloom.compiler.core.user_code import code_allowed_from
from meshloom.compiler.declare.compose import Request
from meshloom.compiler.driver import compile_plan, report_of
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.schema import Report, StepReport
from meshloom.compiler.step.train_step import build_train_step
from meshloom.compiler.xla.aot import (
    Built,
    LoweredStep,
    OutOfMemory,
    ProgramMemory,
    compile_ahead,
    lower_ahead,
    option_problem,
    parse_out_of_memory,
)
from meshloom.compiler.xla.hlo import parse
from meshloom.compiler.xla.programs import Programs, build, lower
from meshloom.runtime.compile.artifact import Artifact, find_artifact, load_programs, read_artifact, write_artifact
from meshloom.runtime.compile.compile_command import CompileJob, compile_step, prepare_compile
from meshloom.runtime.compile.step_compiler import NOT_BY_CHILD
from meshloom.runtime.compile.watched import compile_in_child
from meshloom.runtime.core.stderr_capture import captured_stderr
from meshloom.runtime.train.train import find_precompiled
from support.commands import meshloom, run_in_process, run_python
from support.forked import start
from support.programs import on_devices
from support.run_files import documented_files, written_files

TINY = ("model.num_layers=1", "global_batch_size=8")
LINE = (*SMALL, *TINY, "experiment=smoke", "num_steps=4")
GIB = 2**30


@pytest.fixture(scope="module")
def lowered_step() -> LoweredStep:
    plan = plan_of(*TINY)
    return lower_ahead(plan, plan.mesh.of_devices(jax.devices()))


@pytest.fixture(scope="module")
def lowered(lowered_step) -> Programs:
    return lowered_step.programs


@pytest.fixture(scope="module")
def built(lowered_step) -> Built:
    return compile_ahead(lowered_step)


@pytest.fixture
def artifact(tmp_path, lowered_step, built) -> Artifact:
    return write_artifact(tmp_path / "artifact", lowered_step.fingerprint, built, ("seed=0",))


def _first_batch(programs: Programs, tokens: np.ndarray):
    return on_devices(programs, tokens[0, :8])


def _without_places(text: str | None) -> str:
    """A program without the lines of the source that asked for it, which differ by who called."""
    assert text
    head, *computations = re.split(r"^(?=%|ENTRY)", text, flags=re.M)
    return re.sub(r", metadata=\{[^}]*\}", "", "".join([head.splitlines()[0], *computations]))


@pytest.mark.ci
def test_ahead_of_time_and_just_in_time_are_one_program(lowered, built, tokens):
    """What XLA makes of the step from shapes is what `jax.jit` makes of it from arrays."""
    plan = plan_of(*TINY)
    mesh = plan.mesh.of_devices(jax.devices())
    shardings = jax.tree.map(lambda x: x.sharding, lowered.state)
    state = build(replace(lowered, by_name={"init": lowered["init"]}))["init"]()
    whole = NamedSharding(mesh, PartitionSpec())
    step = jax.jit(build_train_step(plan), donate_argnums=0, out_shardings=(shardings, whole))
    with jax.set_mesh(mesh):
        just_in_time = step.lower(state, _first_batch(lowered, tokens)).compile()
    assert "all-gather" in _without_places(built.text)
    assert _without_places(just_in_time.as_text()) == _without_places(built.text)


def test_a_loaded_program_gives_the_bits_of_a_compiled_one(artifact, lowered, tokens):
    mesh = plan_of(*TINY).mesh.of_devices(jax.devices())
    results = []
    for programs in (build(lowered), load_programs(read_artifact(artifact.place), lowered, mesh)):
        state, _ = programs["train"](programs["init"](), _first_batch(programs, tokens))
        state, metrics = programs["train"](state, _first_batch(programs, tokens))
        results.append(jax.device_get((metrics, state["params"])))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_a_program_that_an_artifact_lacks_is_compiled(artifact, lowered):
    kept = {"train": artifact.built.executables["train"]}
    partial = replace(artifact, built=replace(artifact.built, executables=kept))
    programs = load_programs(partial, lowered, plan_of(*TINY).mesh.of_devices(jax.devices()))
    assert bool(programs["is_finite"](programs["init"]()))


def test_an_artifact_is_refused_with_all_keys_that_differ(artifact):
    plan = plan_of(*TINY, "seed=3", "optimizer.b1=0.5", "num_steps=11")
    with pytest.raises(ConfigError) as refused:
        find_precompiled(plan, artifact.place)
    assert {problem.where for problem in refused.value.problems} == {"seed", "optimizer.b1", "num_steps"}
    assert "0.5 here, 0.9 in the artifact" in str(refused.value)
    assert "meshloom compile seed=0" in str(refused.value), "it says what the artifact is of"


def test_an_artifact_of_other_devices_is_refused(artifact):
    with pytest.raises(ConfigError, match="4 here, 8 in the artifact"):
        find_precompiled(plan_of(*TINY, "target=cpu-4"), artifact.place)


def test_an_artifact_of_another_version_of_the_compiler_is_refused(tmp_path, lowered_step, built):
    ours = lowered_step.fingerprint
    other = replace(ours, environment={**ours.environment, "jaxlib": "0.0.1", "XLA_FLAGS": "--xla_x=1"})
    place = write_artifact(tmp_path / "artifact", other, built, ()).place
    with pytest.raises(ConfigError) as refused:
        find_precompiled(plan_of(*TINY), place)
    assert {problem.where for problem in refused.value.problems} == {"environment.jaxlib", "environment.XLA_FLAGS"}


def test_what_is_read_is_what_was_written(artifact):
    again = read_artifact(artifact.place)
    assert again == artifact
    assert read_artifact(artifact.place.parent) == artifact, "the run directory names it too"


@pytest.mark.parametrize("name", ["train.executable", "train.hlo.txt", "built.json", "fingerprint.json"])
def test_damage_is_found_before_anything_is_loaded(artifact, name):
    path = artifact.place / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"damaged: the content of {name} has changed"):
        read_artifact(artifact.place)
    assert find_artifact(artifact.fingerprint, [artifact.place]) is None


def test_an_artifact_is_found_by_its_fingerprint_alone(artifact, tmp_path):
    places = [tmp_path / "nowhere", artifact.place]
    assert find_artifact(artifact.fingerprint, places) == artifact
    other = replace(artifact.fingerprint, programs={"train": "0" * 64})
    assert find_artifact(other, places) is None


@pytest.mark.parametrize(
    ("said", "needed_gib", "available_gib"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (192.00G) "
         "exceeds available HBM (15.75G).", 192, 15.75),
        ("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
         "temporaries (638.11G) exceeds available HBM (15.75G)\nmore", 638.11, 15.75),
        ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.12G of "
         "15.48G hbm. Exceeded hbm capacity by 4.64G.", 20.12, 15.48),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm: too much", None, None),
    ],
)  # fmt: skip
def test_a_refusal_for_memory_is_read(said, needed_gib, available_gib):
    refused = parse_out_of_memory(said)
    assert refused is not None
    assert refused.needed_bytes == (needed_gib and int(needed_gib * GIB))
    assert refused.available_bytes == (available_gib and int(available_gib * GIB))


@pytest.mark.parametrize(
    "said",
    ["INVALID_ARGUMENT: No such compile option: 'xla_nope'",
     "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.12M of 16.00M vmem."],
)  # fmt: skip
def test_another_error_is_no_refusal_for_memory(said):
    assert parse_out_of_memory(said) is None


@pytest.mark.parametrize("needed", [638 * GIB, None])
def test_a_refused_program_still_has_a_report(lowered_step, needed):
    refused = Built(None, None, OutOfMemory(needed, 16 * GIB, "too large"), {}, {}, 1.0, ())
    plan = plan_of(*TINY)
    report = report_of(CompiledStep(plan, estimate_step(plan), lowered_step, refused, NO_PROGRAM, NO_PROGRAM))
    assert known(report.compiled.peak_bytes) == needed
    assert report.compiled.fits is False
    assert "does not fit" in why_unknown(report.compiled.step_seconds)
    assert "refused" in why_unknown(report.memory.breakdown["gradients"])


def test_arrays_in_the_hosts_memory_are_a_figure_of_their_own(lowered_step):
    """v6e: 31.25 GiB of a chip, 180 GB of its host. What libtpu calls the peak of a step is its arguments with its
    temporaries on the device, or with its arrays on the host where those are more."""
    plan, arguments = plan_of(*TINY, "target=v6e-8"), GIB

    def memory(device: int, host: int, *, is_read: bool = True) -> StepReport:
        said = arguments + max(device - arguments, host)
        found = ProgramMemory(arguments, GIB, GIB, device - arguments, 0, host, said)
        peak = PeakMemory(device, {}, "", (), {}) if is_read else NO_PROGRAM
        built = Built(None, found, None, {}, {}, 1.0, ())
        return report_of(CompiledStep(plan, estimate_step(plan), lowered_step, built, NO_PROGRAM, peak)).compiled

    for device, host in ((16 * GIB, 4 * GIB), (16 * GIB, 36 * GIB)):
        both = memory(device, host)
        assert (both.peak_bytes, both.host_bytes) == (device, host)
        assert (both.fits, both.host_fits, both.host_limit_bytes) == (True, True, 180 * 10**9)
    too_much = memory(16 * GIB, 200 * GIB)
    assert (too_much.fits, too_much.host_fits) == (True, False)
    assert memory(16 * GIB, 36 * GIB, is_read=False).peak_bytes == NO_PROGRAM


def _report_with(built: Built) -> Report:
    """The report of the plan, where its programs were compiled to this."""
    return report_of(compile_plan(plan_of(*TINY), jax.devices(), compile_step=lambda _: built))


def test_memory_of_the_report_is_that_of_the_compiled_program(lowered, built):
    report = _report_with(built)
    memory = report.memory
    stats = build(replace(lowered, by_name={"train": lowered["train"]}))["train"].memory_analysis()
    known = {name: count or 0 for name, count in memory.breakdown.items() if name not in ("reserved", "code")}
    assert report.compiled.peak_bytes == sum(known.values())
    arguments = stats.argument_size_in_bytes
    assert sum(known[n] for n in ("parameters", "master", "optimizer", "scalars", "batch")) == arguments
    temporaries = [
        known[n] for n in ("working_parameters", "gathered_weights", "gradients", "activations", "temporaries")
    ]
    assert all(temporaries[1:]), "the cast of a weight is part of what gathers it"
    assert sum(temporaries) == stats.temp_size_in_bytes
    assert isinstance(report.compiled.fits, Unknown), "what a simulated device has is not known"


def test_what_is_counted_wrong_is_not_told_apart(built):
    """The text of one program beside the figures of another."""
    other = replace(built, memory=replace(built.memory, temporaries_bytes=2 * built.memory.temporaries_bytes))
    report = _report_with(other)
    assert report.memory.breakdown["temporaries"] == other.memory.temporaries_bytes
    assert "the compiler counts" in why_unknown(report.memory.breakdown["activations"])


def test_the_text_is_read_once(artifact, tmp_path, monkeypatch):
    """It is megabytes, and the most of what is left to do where the program was compiled before."""
    read = []

    class Counted(parse._Computations):
        def __init__(self):
            super().__init__()
            read.append(self)

    monkeypatch.setattr(parse, "_Computations", Counted)
    shutil.copytree(artifact.place, tmp_path / "run/artifact")
    (tmp_path / "run/logs").mkdir()
    job = CompileJob(plan_of(*TINY), jax.devices())
    console = Console(is_quiet=True)
    assert compile_step(job, tmp_path / "run", request=Request(TINY), model=None, console=console).refusal == 0
    report = Report.model_validate_json((tmp_path / "run/report.json").read_text())
    assert report.build
    assert (report.build.cache, report.program.model) == ("hit", "decoder")
    assert report.collectives
    assert report.memory.breakdown["gradients"]
    assert len(read) == 1


def _without_end(text: str) -> str:
    return text[: text.rindex("ROOT")]


def _without_groups(text: str) -> str:
    return text.replace("replica_groups=", "replica_groups=?")


def _without_a_value(text: str) -> str:
    """The first that a tuple of the entry computation holds."""
    entry = text.index("\nENTRY")
    name = re.search(r" tuple\((?:[^%)]* )?%?([\w.\-]+)", text[entry:])
    assert name
    made = re.search(rf"\n  %?{re.escape(name[1])} = .*", text[entry:])
    assert made
    return text.replace(made[0], "", 1)


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize(
    ("damage", "said", "is_memory_known"),
    [(_without_end, "line ", False), (_without_groups, "replica groups of an unknown form", True),
     (_without_a_value, "which is not there", False)],
)  # fmt: skip
def test_a_text_that_cannot_be_read_costs_no_artifact(artifact, tmp_path, capsys, damage, said, is_memory_known):
    run = tmp_path / "run"
    built = replace(artifact.built, text=damage(artifact.built.text))
    write_artifact(run / "artifact", artifact.fingerprint, built, ())
    (run / "logs").mkdir()
    job = CompileJob(plan_of(*TINY), jax.devices())
    assert compile_step(job, run, request=Request(TINY), model=None, console=Console()).refusal == 0
    report = Report.model_validate_json((run / "report.json").read_text())
    assert report.collectives == ()
    assert "cannot be read" in why_unknown(report.compiled.step_seconds)
    assert isinstance(report.memory.breakdown["gradients"], int) == is_memory_known
    assert report.compiled.peak_bytes, "what the compiler says of its memory is not in the text"
    assert read_artifact(run).built == built
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: the schedule is unknown: the program's text cannot be read: ")
    assert said in warnings[0]
    assert warnings[0].endswith(f"; it is kept as {run}/artifact/train.hlo.txt")


def test_a_schedule_that_cannot_be_read_delivers_no_demand(lowered_step, built):
    plan = plan_of(*TINY, "target=h100-8", "overlap.max_exposed=0.99")
    unread = Unknown("the program's text cannot be read: line 7")
    report = report_of(CompiledStep(plan, estimate_step(plan), lowered_step, built, unread, unread))
    assert TOO_EXPOSED in [finding.rule for finding in report.findings]
    assert report.compiled.step_seconds == unread


def test_wrong_compiler_options_are_all_told_before_anything_is_written():
    options = ("compiler_options={xla_nope: 1, xla_cpu_enable_fast_math: maybe, xla_embed_ir_in_executable: true}",)
    with pytest.raises(ConfigError) as refused:
        prepare_compile(spec_of(*TINY, *options))
    told = {problem.where for problem in refused.value.problems}
    assert told == {"compiler_options.xla_nope", "compiler_options.xla_cpu_enable_fast_math"}
    assert option_problem("RESOURCE_EXHAUSTED: too much", "cpu") is None


def test_compiler_options_reach_the_compiler(tmp_path):
    plan = plan_of(*TINY, f"compiler_options.xla_dump_to={tmp_path}", "compiler_options.xla_dump_hlo_as_text=true")
    programs = lower(plan, plan.mesh.of_devices(jax.devices()), ("is_finite",))
    build(programs)
    assert list(tmp_path.glob("*after_optimizations.txt"))


def test_compile_takes_no_artifact():
    with pytest.raises(ConfigError, match="compile writes an artifact and cannot load one"):
        prepare_compile(spec_of(*TINY, "artifact=somewhere"))


def test_what_c_prints_is_captured_and_kept(tmp_path, capfd):
    log = tmp_path / "compiler.log"
    log.write_text("before\n")

    def speak(text: bytes) -> None:
        with captured_stderr(log) as captured:
            os.write(2, text)
            print("by Python", file=sys.__stderr__, flush=True)
        told.append(captured.lines)

    told: list[tuple[str, ...]] = []
    speak(b"Involuntary full rematerialization\n")
    speak(b"two\n")
    os.write(2, b"after\n")
    assert told == [("Involuntary full rematerialization", "by Python"), ("two", "by Python")]
    assert log.read_text().splitlines()[:2] == ["before", "Involuntary full rematerialization"]
    assert capfd.readouterr().err == "after\n"


# From here on of a run that a process of its own compiled.


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """A folder with a finished run of `meshloom compile` in it, `run`."""
    folder = tmp_path_factory.mktemp("compiled")
    done = meshloom("compile", *LINE, "hydra.run.dir=run", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder


@pytest.mark.ci
def test_compile_writes_the_contract(compiled):
    run = compiled / "run"
    assert written_files(run) == documented_files("compile")
    report = Report.model_validate_json((run / "report.json").read_text())
    fingerprint = json.loads((run / "artifact/fingerprint.json").read_text())
    assert report.build
    assert report.build.fingerprint == fingerprint["digest"]
    assert set(fingerprint["programs"]) == {"init", "train", "evaluate", "is_finite"}
    assert report.build.cache == "miss"
    assert report.overrides == (*LINE, "hydra.run.dir=run")
    assert {path.name for path in run.iterdir()} >= {"spec.yaml", "plan.json", "report.json", "artifact", "logs"}


@pytest.mark.ci
def test_the_program_by_itself_says_what_the_report_does(compiled, tmp_path):
    """`inspect` reads the same text, without the names of parameters."""
    done = run_in_process("inspect", str(compiled / "run"), "--to", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    own, alone = (Report.model_validate_json((run / "report.json").read_text()) for run in (compiled / "run", tmp_path))
    assert alone.compiled.peak_bytes == own.compiled.peak_bytes
    assert alone.target == own.target
    assert [replace(c, origin=TrafficSource()) for c in alone.collectives] == [
        replace(c, origin=TrafficSource()) for c in own.collectives
    ]


@pytest.mark.ci
def test_compiling_the_same_again_is_a_no_op_that_says_so(compiled):
    run = compiled / "run" / "artifact"
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    done = run_in_process("compile", *LINE, "hydra.run.dir=run", "compilation_cache=null", cwd=compiled)
    assert (done.returncode, done.stderr) == (0, "")
    assert "compiled before, nothing to do: run/artifact" in done.stdout
    assert {path.name: path.stat().st_mtime_ns for path in run.iterdir()} == before


@pytest.mark.ci
def test_another_run_directory_takes_over_what_was_compiled(compiled):
    done = run_in_process("compile", *LINE, "hydra.run.dir=other", cwd=compiled)
    assert (done.returncode, done.stderr) == (0, "")
    assert "compiled before, nothing to do" in done.stdout
    assert json.loads((compiled / "other/report.json").read_text())["build"]["cache"] == "hit"
    ours, theirs = (read_artifact(compiled / name) for name in ("other", "run"))
    assert ours.built == theirs.built


@pytest.mark.ci
def test_a_compiler_that_takes_too_long_is_ended_and_its_options_named(compiled):
    """A process takes longer than a second to start."""
    late = ("compile.timeout_seconds=1", "compilation_cache=late", "hydra.run.dir=late_run")
    option = "compiler_options.xla_cpu_enable_fast_math=true"
    done = meshloom("compile", *LINE, *late, option, cwd=compiled)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == (
        "error: compile.timeout_seconds: the compiler is still at work after 1.00 s, with xla_cpu_enable_fast_math=True"
    )
    assert not (compiled / "late_run/report.json").exists()
    assert str(compiled) not in [each.info["cwd"] for each in psutil.process_iter(["cwd"])], "it has ended"


def without_frames(text: str) -> str:
    """A program without its tables of source lines: they name the file that Python was started with."""
    text = re.sub(r"\n(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*", "\n", text)
    return re.sub(r" ?stack_frame_id=\d+", "", text)


@pytest.mark.ci
def test_what_a_process_with_a_budget_compiled_is_the_same(compiled):
    """Also with the user's own configs, which the child gets: it leaves the one program."""
    shutil.copytree(Path(__file__).parents[3] / "conf", compiled / "own")
    config = compiled / "own/config.yaml"
    config.write_text(re.sub(r"^seed: .*", "seed: 7", config.read_text(), flags=re.M))
    budget = ("compile.timeout_seconds=900", "compilation_cache=budget", "hydra.run.dir=budget_run")
    done = meshloom("compile", "--config-path=own", *LINE, *budget, cwd=compiled)
    assert (done.returncode, done.stderr) == (0, "")
    assert len([path for path in (compiled / "budget/artifacts").iterdir() if path.is_dir()]) == 1
    assert json.loads((compiled / "budget_run/report.json").read_text())["build"]["cache"] == "miss"
    ours, theirs = (read_artifact(compiled / name) for name in ("budget_run", "run"))
    assert ours.built.text
    assert theirs.built.text
    assert without_frames(ours.built.text) == without_frames(theirs.built.text)
    assert "train it: meshloom train" in (compiled / "budget_run/logs/compiler.log").read_text()


@pytest.mark.release
def test_a_compile_that_goes_on_without_its_budget_says_so(compiled):
    """The child cannot keep what it compiled."""
    (compiled / "full").mkdir()
    (compiled / "full/artifacts").touch()
    budget = ("compile.timeout_seconds=900", "compilation_cache=full", "hydra.run.dir=full_run")
    done = meshloom("compile", *LINE, *budget, cwd=compiled)
    assert done.returncode == 0
    assert f"warning: {NOT_BY_CHILD}" in " ".join(done.stdout.split())


@pytest.mark.ci
def test_a_process_with_a_budget_may_run_the_code_that_this_one_may(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("theirs_in_a_child.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    with code_allowed_from(("theirs_in_a_child",)):
        compile_in_child(("model.family=theirs_in_a_child:Mine",), seconds=99, at_work=(), log=Path("log"))
    assert Path("imported").exists(), Path("log").read_text()


def test_a_budget_needs_a_place_for_what_is_compiled(tmp_path):
    done = run_in_process("compile", *LINE, "compile.timeout_seconds=9", "compilation_cache=null", cwd=tmp_path)
    assert done.returncode == 2
    assert "error: compile.timeout_seconds: the process that is ended then leaves what it compiled" in done.stderr


@pytest.mark.ci
def test_a_program_that_the_compiler_aborted_on_is_not_tried_again(compiled):
    digest = read_artifact(compiled / "run").fingerprint.digest
    words = compiled / f"fresh/artifacts/{digest}.aborted"
    words.parent.mkdir(parents=True)
    words.write_text("b.cc:560] Check failed: x == y")
    done = run_in_process("compile", *LINE, "hydra.run.dir=aborted", "compilation_cache=fresh", cwd=compiled)
    assert done.returncode == 1
    assert "error: the compiler: aborted on this program before: b.cc:560] Check failed: x == y" in done.stderr
    assert f"remove {words} to let it try again" in done.stderr
    assert not (compiled / "aborted/report.json").exists()


@pytest.mark.ci
def test_the_models_name_is_told_everywhere_and_is_no_part_of_the_program(compiled):
    (compiled / "conf/model").mkdir(parents=True)
    (compiled / "conf/model/same.yaml").write_text("defaults: [tiny, _self_]\n")
    done = run_in_process("compile", "--config-dir=conf", *LINE, "model=same", "hydra.run.dir=same", cwd=compiled)
    assert "compiled before, nothing to do" in done.stdout, done.stderr
    changes = "(initializer_stddev=0.2, embed_dim=32 and 5 more)"
    assert f"\nsame {changes} on cpu-8: 8 chips" in done.stdout
    assert f"<title>same {changes} on cpu-8" in (compiled / "same/report.html").read_text()
    timeline = json.loads((compiled / "same/timeline.json").read_text())
    assert f"same {changes} on cpu-8" in json.dumps(timeline)
    diff = json.loads(run_in_process("diff", "run", "same", "--json", cwd=compiled).stdout)
    (changed,) = diff["program"]
    expected = {"where": "program.model", "way": "changed", "before": f"tiny {changes}", "after": f"same {changes}"}
    assert changed == expected | {"verdict": None}
    assert [change for change in diff["config"] if change["where"].startswith("model")] == []


@pytest.mark.ci
def test_train_loads_the_artifact(compiled):
    done = meshloom("train", *LINE, "artifact=run", "hydra.run.dir=trained", cwd=compiled)
    assert done.returncode == 0, done.stderr
    assert "compiled before: init, train, evaluate, is_finite loaded from run/artifact" in done.stdout
    assert len((compiled / "trained/metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.ci
def test_train_refuses_another_declaration_and_writes_nothing(compiled):
    done = run_in_process("train", *LINE, "num_steps=5", "artifact=run", "hydra.run.dir=refused", cwd=compiled)
    assert done.returncode == 2
    assert done.stderr.startswith("error: num_steps: 5 here, 4 in the artifact\n")
    assert not (compiled / "refused").exists()


@pytest.mark.release
def test_a_sweep_compiles_for_several_targets(tmp_path):
    done = meshloom("compile", "-m", *LINE, "target=cpu-2,cpu-4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 points: 2 done" in done.stdout
    reports = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("multirun/*/*/*/report.json"))]
    assert [report["target"]["num_chips"] for report in reports] == [2, 4]


@pytest.mark.ci
def test_an_unwritable_directory_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    done = run_in_process("compile", *LINE, "hydra.run.dir=file/run", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "file" in done.stderr


@pytest.mark.ci
def test_a_missing_compiler_is_named_with_what_to_install():
    """In a process that cannot import it, as where the extra was not installed."""
    code = """if True:
        import sys
        class Hidden:
            def find_spec(self, name, path=None, target=None):
                if name.split('.')[0] in ('libtpu', 'jax_plugins'):
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Hidden())
        from meshloom.runtime.cli.main import run
        codes = [run(['compile', f'target={name}', 'global_batch_size=64']) for name in ('v5e-16', 'h100-8')]
        print(codes)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[2, 2]\n"
    assert done.stderr.splitlines() == [
        "error: target: compiling for v5e-16 needs libtpu, which is not installed",
        "  fix: pip install 'meshloom[tpu]'",
        "error: target: compiling for h100-8 needs JAX's CUDA plugin, which is not installed",
        "  fix: pip install 'meshloom[cuda]'",
    ]


@pytest.mark.ci
def test_ctrl_c_during_a_compile_ends_it_and_leaves_no_report(tmp_path):
    code = """
import sys
from meshloom.runtime.cli.main import main
sys.stdout.reconfigure(line_buffering=True)
main()
"""
    line = ["compile", *SMALL, "model.num_layers=40", "hydra.run.dir=run", "compilation_cache=null"]
    with start(["-c", code, *line], cwd=tmp_path, stderr=subprocess.STDOUT) as process:
        assert process.stdout
        assert "meshloom compile" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        told = process.stdout.read()
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in told
    assert "interrupted" in told
    assert not (tmp_path / "run/report.json").exists()
    assert not (tmp_path / "run/artifact").exists()
    shutil.rmtree(tmp_path / "run")


@pytest.mark.ci
def test_an_interrupt_that_a_callback_swallowed_is_heard_behind_it():
    """What is raised in `__del__` is ignored by Python, as in a callback of C++."""
    code = """
import os, signal
from meshloom.runtime.core.failures import hear_interrupts, interruptibly, raise_if_interrupted
class Swallows:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))
hear_interrupts()
raise_if_interrupted()
Swallows()
print("lost", flush=True)
try:
    interruptibly(lambda: print("compiled"))
except KeyboardInterrupt:
    print("heard")
"""
    done = run_python("-c", code)
    assert done.stdout.split() == ["lost", "heard"]


# A quarter of embed_dim fills a row of 128. Where it does not, and arrays are as small as these, libtpu 0.0.50.1 fails:
# "UNIMPLEMENTED: AllReduceScatterFusion ...".
WIDE_HEADS = ("model.embed_dim=512", "model.num_heads=1", "model.num_kv_heads=1", "model.head_dim=128",
              "sequence_length=128", "model.num_layers=1")  # fmt: skip


@pytest.mark.ci
@pytest.mark.tpu
def test_a_tpu_that_is_not_there_is_compiled_for_in_silence(tmp_path):
    pytest.importorskip("libtpu", reason="pip install -e '.[tpu]'")
    done = meshloom("compile", *SMALL, *WIDE_HEADS, "target=v5e-4", "hydra.run.dir=run", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    report = Report.model_validate_json((tmp_path / "run/report.json").read_text())
    assert (report.target.chip, report.target.num_chips, report.compiled.fits) == ("v5e", 4, True)
    assert report.build
    assert report.build.plugin is not None
    text = (tmp_path / "run/artifact/train.hlo.txt").read_text()
    assert "is_scheduled=true" in text
    assert "tpu_custom_call" in text, "the attention kernel of a TPU"


@pytest.mark.tpu
@pytest.mark.ci
def test_what_does_not_fit_is_a_verdict_and_an_exit_code(tmp_path):
    pytest.importorskip("libtpu", reason="pip install -e '.[tpu]'")
    large = ("model.vocab_size=4000000", "model.embed_dim=2048", "target=v5e-4", "hydra.run.dir=run")
    for words in ("does not fit", "compiled before, nothing to do"):
        done = meshloom("compile", *SMALL, *WIDE_HEADS, *large, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (DOES_NOT_FIT, "")
        assert words in done.stdout
        report = Report.model_validate_json((tmp_path / "run/report.json").read_text())
        step = report.compiled
        assert step.fits is False
        assert step.peak_bytes
        assert step.limit_bytes
        assert step.peak_bytes > step.limit_bytes
    assert not (tmp_path / "run/artifact").exists()


@pytest.mark.gpu
@pytest.mark.release
def test_a_gpu_that_is_not_there_is_compiled_for_in_silence(tmp_path):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="pip install -e '.[cuda]'")
    precision = "precision=bfloat16"
    done = meshloom("compile", *SMALL, *WIDE_HEADS, precision, "target=h100-8", "hydra.run.dir=run", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    report = Report.model_validate_json((tmp_path / "run/report.json").read_text())
    assert (report.target.chip, report.target.num_chips, report.compiled.fits) == ("h100", 8, True)
    text = (tmp_path / "run/artifact/train.hlo.txt").read_text()
    assert "all-gather-start" in text
    assert "cudnn" in text, "the attention kernel of a GPU"


@pytest.mark.gpu
@pytest.mark.release
def test_a_gpu_program_is_scheduled_by_its_prices_and_by_the_file_that_they_are_in(tmp_path):
    """The file of a compile gives the same program again, and is refused for another one."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="pip install -e '.[cuda]'")
    line = ("compile", *SMALL, *WIDE_HEADS, "precision=bfloat16", "target=h100-16")
    done = meshloom(*line, "overlap.pgle=prices", "hydra.run.dir=priced", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    by_file = meshloom(*line, "overlap.pgle=priced/artifact/train.pgle.pbtxt", "hydra.run.dir=again", cwd=tmp_path)
    assert (by_file.returncode, by_file.stderr) == (0, "")
    first, again = (tmp_path / run / "artifact/train.hlo.txt" for run in ("priced", "again"))
    assert first.read_text() == again.read_text()
    wider = meshloom(*line, "overlap.pgle=priced/artifact/train.pgle.pbtxt", "model.mlp_dim=512", cwd=tmp_path)
    assert wider.returncode == 2
    assert "is of another program: its fingerprint_before_lhs is" in wider.stderr


@pytest.mark.tpu
@pytest.mark.release
def test_nothing_of_attention_runs_again_in_a_compiled_ring_whose_attention_is_saved(tmp_path):
    """The steps of a ring of n: 2n + 1 calls of a kernel, forward and backward; keys and values of both chunks travel
    n - 1 times forward, and backward again, with their gradients."""
    pytest.importorskip("libtpu", reason="pip install -e '.[tpu]'")
    ring = ("target=v5p-8", "sharding=fsdp_context", "mesh.context=4", "mesh.fsdp=1", "parallel.context=ring")
    sizes = ("model.embed_dim=256", "model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=128",
             "model.num_layers=2", "global_batch_size=1", "sequence_length=4096", "precision=bfloat16")  # fmt: skip
    saved = ("remat=save_names", "remat.names=[attended]")
    done = meshloom("compile", *SMALL, *ring, *sizes, *saved, "hydra.run.dir=run", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    counts, n = Counter[tuple[str, str]](), 4
    module = parse.parse_module((tmp_path / "run/artifact/train.hlo.txt").read_text())
    for each in (i for computation in module.computations.values() for i in computation.instructions):
        is_backward = "transpose(jvp" in each.op_name
        part = "again" if "rematted" in each.op_name else "backward" if is_backward else "forward"
        if kernel := re.search(r"splash_mha_(fwd|dq|dkv)", each.op_name) if each.opcode == "custom-call" else None:
            counts[kernel[1], part] += 1
        elif each.opcode == "collective-permute-start":
            counts["permute", part] += 1
    assert counts == {
        ("fwd", "forward"): 2 * n + 1,
        ("dkv", "backward"): 2 * n + 1,
        ("permute", "forward"): 4 * (n - 1),
        ("permute", "backward"): 4 * (n - 1) + 4 * (n - 1),
    }
