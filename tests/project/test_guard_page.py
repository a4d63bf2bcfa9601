"""The page of the guard: its workflows are valid, and their commands are commands. The exit codes are in one table."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.runtime.cli.commands import COMMANDS
from meshloom.runtime.cli.words import parse_words
from meshloom.runtime.core import failures
from meshloom.runtime.core.failures import EXIT_CODES

DOCS = Path(__file__).parents[2] / "docs"
GITHUB, GITLAB = (
    yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", (DOCS / "guard.md").read_text(), re.S)
)
SCRIPTS = {
    "GitHub": (GITHUB["env"]["STEP"], [step["run"] for step in GITHUB["jobs"]["guard"]["steps"] if "run" in step]),
    "GitLab": (GITLAB["guard"]["variables"]["STEP"], [*GITLAB["guard"]["script"], *GITLAB["guard"]["after_script"]]),
}


def test_github_runs_on_pull_requests_and_may_comment():
    assert GITHUB[True] == "pull_request", "YAML reads the key `on` as true"
    assert GITHUB["permissions"]["pull-requests"] == "write"
    assert all(("uses" in step) != ("run" in step) for step in GITHUB["jobs"]["guard"]["steps"])
    assert GITLAB["guard"]["rules"] == [{"if": '$CI_PIPELINE_SOURCE == "merge_request_event"'}]


@pytest.mark.parametrize("host", SCRIPTS)
def test_the_commands_of_a_workflow_are_commands(host):
    step, lines = SCRIPTS[host]
    for line in lines:
        script = re.sub(r"\$\{\{.*?\}\}", "x", line)  # which GitHub replaces before the shell sees it
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    found = [words for line in lines for words in re.findall(r"meshloom (\w+) ([^\n|&]*)", line)]
    assert [name for name, _ in found] == ["compile", "guard"]
    for name, text in found:
        words = shlex.split(text.replace("$STEP", step))
        at = words.index("--config-dir")
        if name == "guard":
            given = parse_words(COMMANDS["guard"], words)
            assert given.overrides == tuple(step.split())
            assert given.flags["--base"] == "base-step"
        else:
            assert words[at + 2 : -1] == step.split()
            assert words[-1] == "hydra.run.dir=base-step"


def test_the_step_of_the_workflows_can_be_planned():
    assert SCRIPTS["GitHub"][0] == SCRIPTS["GitLab"][0]
    plan = read_spec(Request(tuple(SCRIPTS["GitHub"][0].split())), then=plan_run)
    assert plan.spec.model.model_dump()["num_layers"] == 2


def test_the_exit_codes_are_in_one_table():
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", (DOCS / "json.md").read_text(), re.M)
    assert {int(code): what for code, what in rows} == EXIT_CODES
    named = "MISTAKE DOES_NOT_FIT EXPOSED WORSE WRONG NONFINITE STORAGE HUNG LOST FAULTY PREEMPTED INTERRUPTED"
    assert {getattr(failures, name) for name in named.split()} | {0, 1} == EXIT_CODES.keys()
    assert set(failures.FINAL) <= EXIT_CODES.keys()
