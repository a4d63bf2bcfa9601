"""What a declaration takes from the environment is not written or shown; it is still used, and still compared."""

import json
import logging
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
import yaml

from conftest import LINEAR_STACK, SMALL, plan_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.user_code import code_allowed_from
from meshloom.compiler.core.visible import hidden, hide, visible
from meshloom.compiler.declare.application import run_application
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.report.views.page import _config
from meshloom.compiler.spec.step_spec import StepSpec
from meshloom.compiler.xla.programs import flat
from meshloom.runtime.checkpoint.checkpoints import Checkpoints
from meshloom.runtime.cli.app import parse_flags
from meshloom.runtime.cli.commands import COMMANDS
from meshloom.runtime.cli.main import _show_crash
from meshloom.runtime.data import open_data
from meshloom.runtime.processes.distributed import Processes
from meshloom.runtime.processes.process_log import announce, process_log
from meshloom.runtime.rundir.run_dir import write_declaration
from support.commands import meshloom, run_in_process

SECRET = 'hunter2"\\ of-a-token'
CODE = """
from meshloom.runtime.data import DataSource

class Remote(DataSource):
    seen = []
    def __init__(self, token, place):
        self.seen.append((token, place))
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        return [index % 200] * 17

class Refusing(Remote):
    def __getitem__(self, index):
        raise RuntimeError(f"no access with {self.seen[-1]}")
"""
REMOTE = (
    "data=python", "data.source.object=remote_code:Remote", "data.source.items=sequences",
    "data.source.arguments={token: '${oc.env:TOKEN}', place: 'https://${oc.env:TOKEN}@example.com'}",
)  # fmt: skip
SEED = 'seed="${oc.decode:${oc.env:STEPS}}"'
SHOWN = {"token": "${oc.env:TOKEN}", "place": "https://${oc.env:TOKEN}@example.com"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", SECRET)
    monkeypatch.setenv("STEPS", "3")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "remote_code.py").write_text(CODE)
    with code_allowed_from(["remote_code"]):
        yield tmp_path
    sys.modules.pop("remote_code", None)


def spec_of(*overrides: str) -> RunSpec:
    return read_spec(Request((*SMALL, *overrides)), then=lambda spec: spec)


def files_with(text: str, folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_the_files_of_a_run_name_the_variable(folder):
    """Declaration, plan, checkpoint, log and Hydra's own record; the user's class has the value."""
    run_dir, words = folder / "run", (*SMALL, *REMOTE, SEED)
    run_application(Request((*words, "hydra.run.dir=run")), parse_flags(COMMANDS["train"], [])[0])
    assert (run_dir / ".hydra/config.yaml").exists()
    plan = read_spec(Request(words), then=plan_run)
    write_declaration(plan, run_dir)
    batches = iter(open_data(plan.spec)["train"])
    with Checkpoints(run_dir, plan.spec) as checkpoints:
        checkpoints.save(1, {"x": jnp.zeros(3)}, batches, num_tokens=0, eval_loss=None)
    with process_log(run_dir, Processes()):
        announce(Console(is_quiet=True), f"reading {SECRET}")
        logging.getLogger("a library").error("no access with %r", SECRET)
    assert sys.modules["remote_code"].Remote.seen[-1] == (SECRET, f"https://{SECRET}@example.com")
    assert (run_dir / "checkpoints/1/data").is_dir()
    assert files_with("hunter2", folder) == []
    assert "reading ${oc.env:TOKEN}" in (run_dir / "logs/process-0.log").read_text()
    spec = yaml.safe_load((run_dir / "spec.yaml").read_text())
    assert spec["data"]["source"]["arguments"] == SHOWN
    assert spec["seed"] == "${oc.decode:${oc.env:STEPS}}"


@pytest.mark.ci
def test_a_run_leaves_the_value_nowhere_and_a_resume_compares_it(folder, monkeypatch):
    few = ("num_steps=4", "evaluation.every_num_steps=2", "evaluation.num_batches=1", "checkpoint.every_num_steps=2")
    line = ("--allow-code-from=remote_code", *SMALL, *LINEAR_STACK, *REMOTE, SEED, *few, "target=cpu-1", "sharding=ddp",
            "compilation_cache=cache", "hydra.run.dir=run")  # fmt: skip
    done = meshloom("train", *line, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert files_with("hunter2", folder) == []
    assert "hunter2" not in done.stdout + done.stderr
    again = meshloom("train", *line, "num_steps=6", cwd=folder).stdout
    assert "continuing after step 4" in again
    assert "the data start" not in again
    monkeypatch.setenv("TOKEN", "another-token")
    other = meshloom("train", *line, "num_steps=8", cwd=folder).stdout
    assert "the data start at their beginning: not the same data.source.arguments" in other


def test_keys_that_rest_on_the_environment_through_others_are_found_and_defaults_are_not(monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    monkeypatch.setenv("SIZES", "{data: 2, fsdp: 4}")
    words = (
        "artifact=${oc.env:TOKEN}",
        "checkpoint.restore_from=${artifact}/run",
        "shards.directory=${oc.env:NOT_SET,tokens}",
        "mesh.data=${.fsdp}",
        'mesh.fsdp="${oc.decode:${oc.env:STEPS}}"',
        "hydra.run.dir=${oc.env:HOME}/run",
    )
    spec = spec_of(*words, "target=cpu-9", "global_batch_size=9")
    written = spec.as_written()
    assert (spec.artifact, spec.checkpoint.restore_from, spec.mesh.data) == (SECRET, f"{SECRET}/run", 3)
    assert (written["artifact"], written["checkpoint"]["restore_from"]) == ("${oc.env:TOKEN}", "${artifact}/run")
    assert (written["mesh"]["data"], written["mesh"]["fsdp"]) == ("${.fsdp}", "${oc.decode:${oc.env:STEPS}}")
    assert written["shards"]["directory"] == "tokens"
    assert written["compilation_cache"].endswith("meshloom/xla")


def test_a_program_is_still_told_from_another_by_the_value(monkeypatch):
    """By a digest, which does not show it."""
    first = dict(flat(StepSpec.of(spec_of(SEED)).as_compared()))
    monkeypatch.setenv("STEPS", "4")
    second = dict(flat(StepSpec.of(spec_of(SEED)).as_compared()))
    assert {key for key in first if first[key] != second[key]} == {"seed"}
    assert first["seed"].startswith('"${oc.decode:${oc.env:STEPS}} (digest ')


def test_messages_name_the_variable():
    """Short values too, where it is known which key has them."""
    with pytest.raises(ConfigError) as error:
        spec_of("num_steps=${oc.env:TOKEN}", "global_batch_size=${oc.env:STEPS}", "model.family=${oc.env:TOKEN}")
    told = visible(str(error.value))
    assert "num_steps: '${oc.env:TOKEN}' is not a whole number" in told
    assert "global_batch_size: '${oc.env:STEPS}' is not a whole number" in told
    assert "model.family: '${oc.env:TOKEN}' is not allowed" in told
    assert "hunter2" not in told


def test_messages_of_users_code_and_tracebacks_name_the_variable(capsys):
    data = open_data(spec_of(*REMOTE, "data.source.object=remote_code:Refusing"))
    with pytest.raises(ConfigError) as error:
        next(iter(data["train"]))
    told = visible(str(error.value))
    assert "RuntimeError: no access with" in told
    assert "${oc.env:TOKEN}" in told
    assert "hunter2" not in told
    _show_crash(ValueError, ValueError(f"no access with {SECRET}"), None)
    assert capsys.readouterr().err == "ValueError: no access with ${oc.env:TOKEN}\n"


def test_the_page_and_a_printed_config_show_the_interpolation():
    plan = plan_of("artifact=${oc.env:TOKEN}")
    assert "artifact: ${oc.env:TOKEN}" in dict(_config(plan.spec))["keys"]
    for flags in ((), ("--resolve",)):
        done = run_in_process("train", "--cfg", "job", *flags, "artifact=${oc.env:TOKEN}")
        assert "artifact: ${oc.env:TOKEN}\n" in done.stdout, done.stderr


@pytest.mark.parametrize("write", [str, repr, json.dumps, lambda text: json.dumps(text, ensure_ascii=False)])
def test_a_value_is_found_in_each_form_that_it_is_written_in(write):
    value = "pässwörd\"\\'"
    hide("ODD", value)
    assert hidden(write(value)).strip("\"'") == "${oc.env:ODD}"


def test_short_values_are_not_looked_for_in_texts():
    spec_of(SEED)
    assert hidden("3 of 3") == "3 of 3"
