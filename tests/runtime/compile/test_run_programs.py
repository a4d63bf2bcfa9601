"""The programs of a run: what their compiler prints goes to its log, and what matters of it is said."""

import json
import os

import jax
import numpy as np
import pytest

from conftest import LINEAR_STACK, plan_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import DOES_NOT_FIT, ConfigError, Problem
from meshloom.compiler.xla.programs import Programs, build
from meshloom.runtime.compile import run_programs
from meshloom.runtime.compile.artifact import cached_compilation
from meshloom.runtime.compile.run_programs import made_together, make_programs
from meshloom.runtime.core.failures import RunFailed
from meshloom.runtime.processes.distributed import Processes
from meshloom.runtime.processes.stop import StopRequest
from support.commands import run_in_process

# As jax 0.12 prints it; 0.10.2 prints none.
WHOLE = (
    "W0000 00:00:1 1 spmd_partitioner.cc:669] [SPMD] Involuntary full rematerialization. The compiler cannot go from "
    "sharding {devices=[2,1]<=[2]} to {devices=[1,2]<=[2]} efficiently for HLO operation %dot.3 = f32[8,16]{1,0} "
    'dot(%a, %b), metadata={op_name="jit(train_step)/head/dot_general"}'
)


def test_what_the_compiler_prints_is_in_its_log_and_a_whole_gather_is_a_warning(tmp_path, capfd, monkeypatch):
    def build_aloud(lowered: Programs) -> Programs:
        os.write(2, f"{WHOLE}\nsomething else\n".encode())
        return build(lowered)

    monkeypatch.setattr(run_programs, "build", build_aloud)
    (tmp_path / "logs").mkdir()
    plan = plan_of(*LINEAR_STACK, "target=cpu-2", "model.num_layers=1", "compilation_cache=null")
    processes = Processes()
    with StopRequest(processes) as stop:
        make_programs(plan, None, tmp_path, stop=stop, console=Console(), processes=processes)
    out, err = capfd.readouterr()
    assert err == ""
    assert (tmp_path / "logs" / "compiler.log").read_text() == f"{WHOLE}\nsomething else\n"
    assert out.count("warning: ") == 1
    assert "warning: jit(train_step)/head/dot_general (dot.3): an array of f32[8,16] is gathered whole" in out
    assert f"(see {tmp_path}/logs/compiler.log)" in out
    assert "something else" not in out


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize(
    ("said", "exit_code", "words"),
    [
        ("INTERNAL: no such layout\nat x.cc", 1, "the compiler: failed, and not for memory: INTERNAL: no such layout"),
        ("INTERNAL: custom_partitioner: Traceback (most recent call last):\n  x.py\nValueError: no spec\n\nin x.py",
         1, "the compiler: failed, and not for memory: ValueError: no spec"),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.12G of 15.48G hbm.", DOES_NOT_FIT,
         "target: the train step does not fit: 20.1 GiB are needed on each device, and 15.5 GiB are available"),
        ("INVALID_ARGUMENT: No such compile option: 'xla_nope'", 2, "compiler_options.xla_nope: "),
        pytest.param(
            "", 1, "the compiler: failed, and not for memory: it did not say why", marks=pytest.mark.ci
        ),
    ],
)  # fmt: skip
def test_what_a_compiler_raises_in_a_run_is_an_error_in_our_words(said, exit_code, words, tmp_path, monkeypatch):
    def fail(lowered: Programs) -> Programs:  # noqa: ARG001
        raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr(run_programs, "build", fail)
    done = run_in_process("train", "model=linear_stack", "target=cpu-8", "data=synthetic", "num_steps=1", cwd=tmp_path)
    assert done.returncode == exit_code
    assert f"error: {words}" in done.stderr
    assert done.stderr.count("\n  fix: ") == 1
    assert "Traceback" not in done.stderr
    assert said in (tmp_path / next(tmp_path.glob("outputs/*/*/logs/compiler.log"))).read_text()


def test_a_compile_that_fails_in_one_process_ends_the_others(monkeypatch):
    """The others have compiled by then, and would wait for it."""
    told = []

    def gather(_, name, text, **__):  # noqa: ARG001
        told.append(text)
        return [text, json.dumps({"is_disagreement": False, "problems": [], "exit_code": 0})]

    monkeypatch.setattr(Processes, "gather", gather)

    def fail() -> Programs:
        raise RunFailed(Problem("the compiler", "failed", "see its log"), exit_code=1)

    with pytest.raises(ConfigError, match="the compiler \\(process 0\\): failed") as raised:
        made_together(plan_of(*LINEAR_STACK), fail, Processes(0, 2))
    assert raised.value.exit_code == 1
    assert "failed" in told[0]


@pytest.fixture(autouse=True)
def settings_put_back():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_process_keeps_programs_in_the_folder_of_each_run(tmp_path):
    found = []
    for name, factor in (("first", 2.0), ("second", 3.0), ("second", 3.0), (None, 3.0)):
        with cached_compilation(name and str(tmp_path / name)) as use:
            assert jax.jit(lambda x, factor=factor: x * factor)(np.float32(2)) == 2 * factor
        found.append(use.num_hits)
    assert found == [0, 0, 1, 0]
    assert all([*(tmp_path / name).glob("jit__lambda*-cache")] for name in ("first", "second"))
