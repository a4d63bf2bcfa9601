"""Cloud TPU VMs, xpk and SkyPilot: their commands, run by a shell with the tools replaced, and linted by gcloud."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from meshloom.compiler.core.errors import ConfigError
from support.launch import launched, rendered

RUNS = "launch.directory=/mnt/runs"
TPU_VM = ("launch=tpu_vm", "launch.zone=us-central2-b", "launch.project=mine", RUNS)
TWO_SLICES = ("target=v5p-128", "target.num_slices=2")
# `printf` writes line by line, between those of another process; `cat` writes a call at once.
FAKE_GCLOUD = """#!/bin/bash
(IFS=$'\\x1f'; printf '%s\\x1e' "$*" > "call-$$"; cat "call-$$" >> calls)
case "$*" in
  *describe*value*) [ -e asked ] && echo ACTIVE || { touch asked; echo WAITING_FOR_RESOURCES; } ;;
  *describe*) exit 1 ;;
  *ssh*) exit $(cat code 2>/dev/null || echo 0) ;;
esac
"""


def run_script(folder: Path, text: str, tools: dict[str, str], **environment: str) -> int:
    """Runs a script with these programs first on the path, in `folder`; `sleep` takes no time."""
    for name, code in {"sleep": "#!/bin/bash\n", **tools}.items():
        (folder / name).write_text(code)
        (folder / name).chmod(0o755)
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", **environment}
    return subprocess.run(["bash", "-c", text], cwd=folder, env=variables, check=False).returncode


def calls_of(folder: Path) -> list[list[str]]:
    return [call.split("\x1f") for call in (folder / "calls").read_text().split("\x1e")[:-1]]


def test_slices_are_created_waited_for_and_run_on(tmp_path):
    text = rendered(*TPU_VM, *TWO_SLICES, "launch.provisioning=spot", "launch.delete_after=true").text
    assert run_script(tmp_path, text, {"gcloud": FAKE_GCLOUD}) == 0
    calls = calls_of(tmp_path)
    name = launched(*TPU_VM, *TWO_SLICES, "launch.provisioning=spot", "launch.delete_after=true").name
    verbs = [" ".join(call[2:4]) for call in calls]
    assert verbs == ["queued-resources describe", "queued-resources create", "queued-resources describe",
                     "queued-resources describe", "tpu-vm ssh", "tpu-vm ssh", "queued-resources delete"]  # fmt: skip
    assert {"--node-count=2", f"--node-prefix={name}", "--accelerator-type=v5p-128", "--spot", "--async",
            "--runtime-version=v2-alpha-tpuv5", "--zone=us-central2-b", "--project=mine"} <= set(calls[1])  # fmt: skip
    assert sorted(call[4] for call in calls[4:6]) == [f"{name}-0", f"{name}-1"]
    assert all("--worker=all" in call for call in calls[4:6])


def test_the_exit_code_of_the_hosts_is_that_of_the_launch(tmp_path):
    (tmp_path / "code").write_text("3")
    assert run_script(tmp_path, rendered(*TPU_VM, "target=v5e-16").text, {"gcloud": FAKE_GCLOUD}) == 3


@pytest.mark.ci
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="no gcloud")
def test_gcloud_takes_each_command(tmp_path):
    text = rendered(*TPU_VM, *TWO_SLICES, "launch.provisioning=reserved", "launch.options={network: mine}").text
    assert run_script(tmp_path, text, {"gcloud": FAKE_GCLOUD}) == 0
    for call in calls_of(tmp_path):
        words = [word if not word.startswith("--command=") else "--command=true" for word in call]
        line = shlex.join(["gcloud", *words])
        lint = ["gcloud", "meta", "lint-gcloud-commands", f"--command-string={line}"]
        (told,) = json.loads(subprocess.run(lint, capture_output=True, text=True, check=True).stdout)
        assert told["success"], (line, told["error_message"])


@pytest.mark.parametrize(("codes", "last", "starts"), [("1 134 0", 0, 3), ("2", 2, 1), ("1 1 1 1", 1, 3)])
def test_each_host_starts_again_unless_the_exit_code_is_final(tmp_path, codes, last, starts):
    text = rendered(*TPU_VM, "target=v5e-16", "launch.max_restarts=2", "launch.environment={MINE: 'a b'}").text
    fake = '#!/bin/bash\necho "$MINE" >> started\nread -r -a codes < codes\nn=$(wc -l < started)\nexit ${codes[n-1]}\n'
    (tmp_path / "codes").write_text(codes + "\n")
    host = text[text.index("script=") : text.index("jobs=()")] + 'bash -c "$script"'
    assert run_script(tmp_path, host, {"meshloom": fake}) == last
    assert (tmp_path / "started").read_text().splitlines() == ["a b"] * starts


def test_xpk_gets_the_slices_and_the_command():
    xpk = ("launch=xpk", "launch.cluster=c", "launch.image=i:1", RUNS, "launch.max_restarts=7")
    command = rendered(*xpk, *TWO_SLICES, "launch.environment={A: 3}", "launch.setup=['cd /work']").command
    assert command[:3] == ("xpk", "workload", "create")
    assert {
        "--tpu-type=v5p-4x4x4",
        "--num-slices=2",
        "--max-restarts=7",
        "--restart-on-exit-codes=1,6,7,8",
        "--env=A=3",
        "--cluster=c",
    } <= set(command)
    assert command[-1].startswith("--command=cd /work && meshloom train ")
    other = rendered(*xpk, "target=v5e-256").command
    assert "--tpu-type=v5litepod-256" in other


def test_skypilot_tells_each_node_where_the_first_is(tmp_path):
    task = yaml.safe_load(
        rendered("launch=skypilot", RUNS, "target=h100-32", "launch.image=i", "launch.spot=true").text
    )
    assert task["num_nodes"] == 4
    assert task["resources"] == {"accelerators": "H100:8", "use_spot": True, "image_id": "docker:i",
                                 "job_recovery": {"max_restarts_on_errors": 3}}  # fmt: skip
    fake = "#!/bin/bash\nprintf '%s\\n' \"$@\" > words\n"
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "4", "SKYPILOT_NODE_RANK": "2"}
    assert run_script(tmp_path, task["run"], {"meshloom": fake}, **nodes) == 0
    assert (tmp_path / "words").read_text().splitlines()[-3:] == [
        "distributed.coordinator_address='10.0.0.1:8476'", "distributed.num_processes=4", "distributed.process_id=2",
    ]  # fmt: skip


def test_hosts_of_a_tpu_slice_find_each_other_by_themselves():
    task = yaml.safe_load(rendered("launch=skypilot", RUNS, "target=v5e-64").text)
    assert task["num_nodes"] == 1
    assert task["resources"]["accelerators"] == "tpu-v5litepod-64"
    assert "distributed." not in task["run"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("launch=tpu_vm", RUNS, "target=v5e-16"), "launch.zone: is not set"),
        (("launch=xpk", RUNS, "target=v5e-16", "launch.cluster=c"), "launch.image: is not set"),
        ((*TPU_VM, "target=h100-8"), "target: launch=tpu_vm starts TPUs"),
        ((*TPU_VM, "target=tpu7x-128"), "launch: tpu_vm has no tpu7x"),
        ((*TPU_VM, "target=v5p:4x4x16"), "4x4x16 is not the usual shape"),
        (("launch=skypilot", RUNS, *TWO_SLICES), "target.num_slices: SkyPilot starts one TPU slice"),
        (("launch=skypilot", "target=h100-8", "launch.directory=runs"), "runs/test-"),
    ],
)
def test_what_an_engine_cannot_do_is_said(overrides, message):
    with pytest.raises(ConfigError) as caught:
        rendered(*overrides)
    (problem,) = caught.value.problems
    assert message in f"{problem.where}: {problem.what}"
