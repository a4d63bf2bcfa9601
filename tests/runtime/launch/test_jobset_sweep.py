"""A sweep as JobSets, on a cluster of one pod: a kubectl that runs the container's command on this machine."""

import json
import os
import sys
from pathlib import Path

import pytest

from conftest import SMALL
from support.commands import meshloom, run_in_process

KUBECTL = f"""#!{sys.executable}
import json, pathlib, subprocess, sys, yaml
jobs = pathlib.Path(__file__).parent / "jobs"
jobs.mkdir(exist_ok=True)
words = sys.argv[1:]
with (jobs.parent / "calls").open("a") as calls:
    print(json.dumps(words), file=calls)
if words[0] == "apply":
    made = yaml.safe_load(pathlib.Path(words[1].removeprefix("--filename=")).read_text())
    (container,) = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    command = [word.replace("$$(", "$(") for word in container["command"]]
    job = jobs / made["metadata"]["name"]
    if not job.exists():
        job.write_text(str(subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode))
elif words[:2] == ["get", "jobset"]:
    print("Failed" if int((jobs / words[2]).read_text()) else "Completed")
elif words[:2] == ["get", "pods"]:
    print((jobs / words[2].rpartition("=")[2]).read_text())
elif words[:2] == ["get", "jobsets"]:
    for job in jobs.iterdir():
        print(f"jobset.jobset.x-k8s.io/{{job.name}}")
"""


def sweep(folder: Path, *more: str) -> tuple[str, ...]:
    return (
        "train", "-m", *SMALL, "model.num_layers=1", "num_steps=4", "checkpoint=disabled",
        "hydra/launcher=meshloom_jobset", "launch=jobset", "launch.image=i", f"hydra.sweep.dir={folder}/sweep",
        f"launch.volumes=[{{kind: host, name: {folder}, mount: {folder}}}]",
        f"launch.program='{sys.executable} -m meshloom'", *more,
    )  # fmt: skip


def with_kubectl(folder: Path) -> dict[str, str]:
    (folder / "kubectl").write_text(KUBECTL)
    (folder / "kubectl").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def rows_of(folder: Path) -> list[dict]:
    rows = [json.loads(text) for text in (folder / "sweep/sweep.jsonl").read_text().splitlines()]
    return sorted(rows, key=lambda row: row["index"])


@pytest.mark.release
def test_a_sweep_is_a_jobset_for_each_point(tmp_path):
    environment = with_kubectl(tmp_path)
    told = meshloom(*sweep(tmp_path, "launch.dry_run=false", "seed=1,2", "mesh.data=1,3"), cwd=tmp_path, **environment)
    rows = rows_of(tmp_path)
    assert [row["status"] for row in rows] == ["done", "refused"] * 2, told
    assert [row["exit_code"] for row in rows] == [0, 2] * 2
    assert len({row["figures"]["final_loss"] for row in rows if row["figures"]}) == 2


@pytest.mark.ci
def test_a_dry_run_writes_manifests_and_no_rows(tmp_path):
    told = run_in_process(*sweep(tmp_path, "launch.dry_run=true", "seed=1,2"), cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    manifests = sorted((tmp_path / "sweep/.jobs").glob("*.yaml"))
    assert len(manifests) == 2
    assert all(f"not applied, as launch.dry_run=true: {path}" in told.stderr for path in manifests)
    assert not (tmp_path / "sweep/sweep.jsonl").exists() or rows_of(tmp_path) == []
