"""`import meshloom` in a program of someone else's: what it gives, what it refuses, and what it leaves as it was."""

import dataclasses
import html
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from hydra import compose as compose_theirs
from hydra import initialize_config_dir
from hydra import version as hydra_version
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from omegaconf.resolvers import oc

import meshloom
from conftest import LINEAR_STACK, SMALL
from meshloom.compiler.core.console import Console
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.report.views.page import plan_table
from meshloom.runtime.compile.watched import Phases, watched
from support.commands import run_in_process

TINY = (*SMALL, *LINEAR_STACK, "model.num_layers=1", "global_batch_size=8", "num_steps=4", "compilation_cache=null")
WRONG = ("modl=tiny", "seed=x", "num_steps=-3")
MODEL = "from meshloom.models import ModelConfig\nclass Mine(ModelConfig): ...\n"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def step(run_dir) -> meshloom.CompiledStep:
    return meshloom.compile(*TINY, run_dir=run_dir)


def test_nothing_heavy_is_imported_before_a_name_is_used():
    code = "import sys, meshloom; dir(meshloom); print([m for m in ('jax', 'hydra', 'rich', 'pydantic') if m in sys.modules])"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_name_is_there_and_says_what_it_is():
    assert {*meshloom.__all__} <= {*dir(meshloom)}
    assert sorted(name for names in meshloom._PLACES.values() for name in names) == meshloom.__all__
    for name in meshloom.__all__:
        assert getattr(meshloom, name).__doc__, name
    with pytest.raises(AttributeError, match="has no attribute 'complie'"):
        meshloom.complie  # type: ignore[attr-defined]  # noqa: B018


def test_a_declaration_is_what_the_command_reads():
    typed = ("sharding=fsdp_tensor", "mesh.tensor=2", "run.extra.team=search")
    assert meshloom.compose(*typed) == read_spec(Request(typed), then=lambda spec: spec)
    assert meshloom.compose(*typed).origin.overrides == typed


def test_mistakes_are_those_of_the_command_all_at_once():
    with pytest.raises(meshloom.ConfigError) as ours:
        meshloom.plan(*WRONG)
    told = run_in_process("explain", *WRONG).stderr
    assert str(ours.value) + "\n" == told
    assert len(ours.value.problems) == told.count("error: ") >= 3


def test_what_only_the_command_can_do_is_refused_with_what_to_do():
    for override, fix in (("hydra.run.dir=x", "run_dir="), ("sharding=ddp,fsdp", "once per value")):
        with pytest.raises(meshloom.ConfigError) as error:
            meshloom.compose(override)
        assert fix in str(error.value)
    with pytest.raises(meshloom.ConfigError, match="or one declaration"):
        meshloom.plan(meshloom.compose(), "seed=3")
    several: Any = ["seed=3"]
    for function in (meshloom.compose, meshloom.plan):
        with pytest.raises(meshloom.ConfigError, match="one of them is a list, not a text"):
            function(several)
    with pytest.raises(meshloom.ConfigError, match="there is no such file"):
        meshloom.report("nowhere")


def test_configs_of_a_folder_are_found(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text("defaults: [tiny, _self_]\nnum_layers: 5\n")
    spec: Any = meshloom.compose("model=mine", config_dir=tmp_path)
    assert spec.model.num_layers == 5


def test_code_of_a_module_is_run_for_an_argument_alone(tmp_path, monkeypatch):
    """Not for the variable that opts in for every command of a shell: a notebook is started from anywhere."""
    (tmp_path / "theirs_in_a_notebook.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MESHLOOM_ALLOW_CODE_FROM", "theirs_in_a_notebook")
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/theirs.yaml").write_text("family: theirs_in_a_notebook:Mine\nvocab_size: 264\n")
    with pytest.raises(meshloom.ConfigError, match="importing it would run its code"):
        meshloom.compose("model=theirs", config_dir=tmp_path / "conf")
    assert "theirs_in_a_notebook" not in sys.modules
    path = list(sys.path)
    spec = meshloom.compose("model=theirs", config_dir=tmp_path / "conf", allow_code_from=["theirs_in_a_notebook"])
    assert type(spec.model).__mro__[1] is sys.modules["theirs_in_a_notebook"].Mine
    assert spec.origin.code_allowed_from == ("theirs_in_a_notebook",)
    assert sys.path == path


def test_a_changed_declaration_is_not_what_was_typed():
    changed = meshloom.compose(*TINY, allow_code_from=["mine"]).model_copy(update={"seed": 7})
    assert changed.origin.overrides is None
    assert changed.origin.code_allowed_from == ("mine",), "its classes may still be imported"
    assert changed.model_copy(deep=True).seed == 7


@pytest.fixture
def hydra_app(tmp_path) -> Iterator[None]:
    """A Hydra app of someone else's, at work, with a resolver of its own in the place of Hydra's."""
    (tmp_path / "config.yaml").write_text("x: 1\nname: ${oc.env:MESHLOOM_TEST_NAME}\n")
    with initialize_config_dir(str(tmp_path), version_base="1.2"):
        OmegaConf.register_new_resolver("oc.env", lambda name: f"theirs of {name}", replace=True)
        yield
    OmegaConf.clear_resolver("oc.env")
    OmegaConf.register_new_resolver("oc.env", oc.env)


def _state() -> dict[str, Any]:
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_platforms")
    return {
        "hydra": (GlobalHydra.instance().hydra, hydra_version.getbase(), dict(SourcesRegistry.instance().types)),
        "environment": dict(os.environ),
        "place": (Path.cwd(), list(sys.path), list(sys.argv), sorted(os.listdir())),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "jax": [getattr(jax.config, name) for name in names],
        "logging": [
            (logger.level, logger.propagate, list(logger.handlers))
            for logger in map(logging.getLogger, (None, "meshloom", "absl"))
        ],
    }


@pytest.mark.ci
@pytest.mark.usefixtures("hydra_app")
def test_a_program_is_as_it_was_though_it_is_a_hydra_app_itself(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    meshloom.train  # noqa: B018 (Orbax is imported once)
    before = _state()
    for _ in range(2):
        assert meshloom.explain(meshloom.plan(meshloom.compose(*TINY))).text
        with pytest.raises(meshloom.ConfigError):
            meshloom.compile(*TINY, "seed=x")
    meshloom.compile(*TINY)
    assert _state() == before
    assert compose_theirs("config") == {"x": 1, "name": "theirs of MESHLOOM_TEST_NAME"}
    assert capfd.readouterr() == ("", "")


def test_an_explanation_is_that_of_the_command():
    explanation = meshloom.explain("model=llama3_8b", "target=v5p-128", "global_batch_size=256")
    told = run_in_process("explain", "model=llama3_8b", "target=v5p-128", "global_batch_size=256").stdout
    assert [line.split() for line in repr(explanation).splitlines()] == [line.split() for line in told.splitlines()]
    assert explanation.json["program"]["num_parameters"] == explanation.plan.num_parameters
    assert json.loads(json.dumps(explanation.json))


def test_a_plan_shows_itself_and_runs_as_any_plan():
    spec = meshloom.compose(*TINY)
    plan = meshloom.plan(spec)
    assert len(repr(plan)) < 150
    shown = plan._repr_html_()
    paths = [each.array.path for each in plan.sharding.parameters]
    assert all(f"<code>{path}</code>" in shown for path in paths)
    assert plan.memory == plan_run(spec).memory


def test_nothing_that_a_plan_shows_is_markup():
    plan = meshloom.plan(*TINY)
    estimate = estimate_step(plan)
    first, *others = plan.sharding.parameters
    array = dataclasses.replace(first.array, path="<script>alert(1)</script>")
    parameters = (dataclasses.replace(first, array=array), *others)
    odd = dataclasses.replace(plan, sharding=dataclasses.replace(plan.sharding, parameters=parameters))
    assert isinstance(odd, meshloom.Plan)
    shown = plan_table(odd, estimate)
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown


def test_a_compiled_step_has_its_report_and_its_files(step, run_dir):
    assert {path.name for path in run_dir.iterdir()} >= {"spec.yaml", "plan.json", "report.html", "artifact", "logs"}
    assert json.loads((run_dir / "report.json").read_text()) == json.loads(step.report.model_dump_json())
    assert meshloom.report(run_dir) == meshloom.report(step) == step.report
    assert (step.fits, step.is_accepted) == (None, True), "what a simulated device has is not known"
    assert step.report.overrides == TINY
    assert step.report.program.model.startswith("linear_stack (")
    assert isinstance(step.plan, meshloom.Plan)
    assert max(len(repr(step)), len(repr(step.report)), len(str(step.report))) < 150


def test_a_report_is_the_page_in_a_frame_without_rights(step, run_dir):
    frame = step._repr_html_()
    assert frame == step.report._repr_html_() == meshloom.report(run_dir)._repr_html_()
    assert 'sandbox="allow-scripts"' in frame
    (page,) = re.findall(r'srcdoc="([^"]*)"', frame)
    assert html.unescape(page) == (run_dir / "report.html").read_text()


@pytest.mark.ci
def test_a_step_that_is_not_accepted_is_no_exception():
    step = meshloom.compile(*TINY, "overlap.max_exposed=0.01")
    assert not step.is_accepted, "simulated devices have no clock: what is not known is not delivered"
    assert "too-exposed" in [finding.rule for finding in step.report.findings]


def test_more_devices_than_jax_started_with_say_what_to_do():
    with pytest.raises(meshloom.ConfigError) as error:
        meshloom.compile(*TINY, "target=cpu-16", "global_batch_size=16")
    (problem,) = error.value.problems
    assert problem.where == "target"
    assert "JAX has started in this process with 8 devices (cpu), and 16" in problem.what
    assert "restart Python" in problem.fix


def test_several_processes_are_left_to_the_command():
    keys = ("distributed.coordinator_address=localhost:1", "distributed.num_processes=2", "distributed.process_id=0")
    with pytest.raises(meshloom.ConfigError, match="there are several processes"):
        meshloom.train(*TINY, *keys)


def test_ctrl_c_during_a_compile_ends_no_program_but_the_command(tmp_path):
    (tmp_path / "log").write_text("")
    quiet = Console(is_quiet=True)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), (tmp_path / "terminal").open("w") as terminal:
        watched(interrupted, log=tmp_path / "log", terminal=terminal.fileno(), phases=Phases(quiet, "compiling"),
                kept_in=None)  # fmt: skip
    assert (tmp_path / "terminal").read_text() == "interrupted while compiling\n"


@pytest.mark.ci
def test_a_run_goes_on_where_it_was_and_gives_the_bits_of_one_that_was_not_left(tmp_path, monkeypatch, capfd):
    """In a thread: some notebooks have no other, and Python hands it no signals."""
    monkeypatch.chdir(tmp_path)
    meshloom.train  # noqa: B018
    whole = meshloom.train(*TINY, "num_steps=6", "schedule=constant")
    assert list(tmp_path.iterdir()) == []
    before, runs = _state(), list[meshloom.TrainedRun]()

    def train(num_steps: int) -> None:
        runs.append(meshloom.train(*TINY, f"num_steps={num_steps}", "schedule=constant", run_dir=tmp_path / "run"))

    for num_steps in (3, 6, 6):
        thread = threading.Thread(target=train, args=[num_steps])
        thread.start()
        thread.join()
    first, resumed, done = runs
    assert first.losses == whole.losses[:3]
    assert resumed.losses == done.losses == whole.losses
    assert resumed.held_out_loss == whole.held_out_loss
    assert resumed.stopped_by is None
    assert (tmp_path / "run/checkpoints/6").is_dir()
    assert "meshloom train: " in (tmp_path / "run/logs/process-0.log").read_text()
    assert _state() | {"place": ()} == before | {"place": ()}
    assert capfd.readouterr() == ("", "")


@pytest.mark.ci
def test_ctrl_c_stops_a_run_in_order(tmp_path):
    rows = tmp_path / "run" / "metrics.jsonl"

    def interrupt() -> None:
        while not (rows.exists() and rows.read_text().count("\n") > 2):  # sooner, it would interrupt the compile
            time.sleep(0.1)
        signal.raise_signal(signal.SIGINT)

    asking = threading.Thread(target=interrupt, daemon=True)
    asking.start()
    run = meshloom.train(*TINY, "num_steps=1000000", "schedule=constant", run_dir=tmp_path / "run")
    asking.join()
    assert run.stopped_by == "SIGINT"
    assert 0 < len(run.metrics) < 1_000_000
    assert (tmp_path / f"run/checkpoints/{len(run.metrics)}").is_dir()
