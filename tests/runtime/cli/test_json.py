"""Every command prints JSON, and what it prints is what `meshloom schema` says. support/commands.py checks it for every
`--json` of any test."""

import json

import jsonschema
import pytest

from conftest import spec_of
from meshloom.compiler.core.errors import MISTAKE
from meshloom.compiler.report.explain import plan_as_json
from meshloom.runtime.cli.commands import COMMANDS
from meshloom.runtime.cli.main import run as command
from meshloom.runtime.cli.schema import DOCUMENTS
from support import reports
from support.commands import run_in_process
from support.published import write_published
from support.recorded import recorded_text
from support.schemas import check, validator


def test_every_command_has_json_and_one_schema():
    assert all("--json" in [flag.name for flag in each.flags] for each in COMMANDS.values())
    printed = [name for each in DOCUMENTS.values() for name in each.commands]
    assert sorted(printed) == sorted(COMMANDS.keys() - {"schema"})


@pytest.mark.parametrize("name", DOCUMENTS)
def test_each_schema_is_one_and_says_which_keys_there_are(name, capsys):
    assert command(["schema", name]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    for part in filter(None, (schema, *schema.get("$defs", {}).values())):  # {}: any JSON
        for each in part.get("anyOf", [part]):
            assert "$ref" in each or each["type"] in ("array", "object")
            assert each.get("type") != "object" or "properties" in each


@pytest.mark.parametrize("case", reports.CASES)
def test_reports_are_what_their_schema_says(case):
    report = json.loads(reports.CASES[case]()[0].model_dump_json())
    check(report, "compile")
    for key in report.keys() - {"unknown"}:
        assert list(validator("compile").iter_errors({k: v for k, v in report.items() if k != key})), key
    wrong = [report | {"other": 1}, report | {"step": report["step"] | {"predicted_seconds": "long"}}]
    assert all(list(validator("compile").iter_errors(each)) for each in wrong)


def test_plans_are_what_their_schema_says():
    plan = json.loads(json.dumps(plan_as_json(reports.llama_plan())))
    check(plan, "explain")
    plan["operations"][0]["strategie"] = plan["operations"][0].pop("strategy")
    assert list(validator("explain").iter_errors(plan))


def test_a_program_is_inspected_compared_and_judged_as_the_schemas_say(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(recorded_text("v5e_fsdp16"))
        line = ("inspect", f"{name}.txt", "target=v5e-16", "--to", name, "--json")
        assert run_in_process(*line, cwd=tmp_path).returncode == 0
    for line in (("diff", "a", "b"), ("guard", "a", "--base", "b"), ("runs", "."), ("explain",)):
        ended = run_in_process(*line, "--json", cwd=tmp_path)
        assert ended.returncode == 0
        assert json.loads(ended.stdout) is not None


def test_explain_says_what_was_chosen_for_this_machine_in_json_too(tmp_path, capsys):
    write_published(tmp_path, spec_of("model=tiny").model)
    line = ["explain", "model=from_hf", f"model.path={tmp_path}", "target=cpu-1", "global_batch_size=1"]
    assert command([*line, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["chosen_here"]
    assert command(line) == 0
    assert capsys.readouterr().out.startswith(said)
    assert command([*line, "precision=float32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen_here"] is None


def test_an_unknown_schema_is_one_error(capsys):
    assert command(["schema", "reports"]) == MISTAKE
    assert "did you mean 'report'?" in capsys.readouterr().err


def test_what_a_command_says_goes_to_standard_error(tmp_path):
    words = ("export.directory=out", "launch=local", "launch.dry_run=true")
    ended = run_in_process(
        "launch", "target=cpu-2", "launch.num_processes=2", words[1], words[2], "--json", cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["engine"] == "local"
