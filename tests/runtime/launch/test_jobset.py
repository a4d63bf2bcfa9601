"""JobSets by the published schema, and what decides how one restarts."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conftest import SMALL
from meshloom.compiler.core.errors import ConfigError
from meshloom.runtime.core.failures import FINAL, HUNG, LOST, PREEMPTED, STORAGE
from meshloom.runtime.launch.engines import schema_problems
from support.commands import meshloom, run_in_process
from support.launch import launched, rendered

NEEDED = ("launch=jobset", "launch.image=registry/image:1", "launch.directory=/mnt/runs",
          "launch.volumes=[{kind: claim, name: runs, mount: /mnt}]")  # fmt: skip
TWO_SLICES = ("target=v5p-128", "target.num_slices=2")
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


def manifest(*overrides):
    return yaml.safe_load(rendered(*NEEDED, *overrides).text)


def job_of(made):
    return made["spec"]["replicatedJobs"][0]["template"]["spec"]


def pod_of(made):
    return job_of(made)["template"]["spec"]


def script_of(made):
    """The script as a container gets it: Kubernetes replaces `$$(` by `$(`."""
    return pod_of(made)["containers"][0]["command"][-1].replace("$$(", "$(")


EVERYTHING = (
    "launch.queue=team", "launch.namespace=ml", "launch.priority_class=high", "launch.service_account=trainer",
    "launch.spot=true", "launch.host_network=true", "launch.secrets=[tokens]", "launch.node_selector={pool: mine}",
    "launch.resources={memory: 300Gi, cpu: 100}", "launch.labels={team: search}", "launch.annotations={a/b: c}",
    "launch.setup=['source env.sh']", "launch.environment={MINE: 7}",
    "launch.volumes=[{kind: bucket, name: runs, mount: /mnt}, {kind: host, name: /data, mount: /data}]",
)  # fmt: skip


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize("more", [pytest.param((), marks=pytest.mark.ci), EVERYTHING], ids=["least", "everything"])
@pytest.mark.parametrize(
    "target", [TWO_SLICES, ("target=v5e-1",), ("target=tpu7x-128",), ("target=h100-64",), ("target=cpu-8",)],
    ids=lambda target: target[0],
)  # fmt: skip
def test_a_manifest_is_valid_by_the_published_schema(target, more):
    made = manifest(*target, *(text for text in more if "cpu" not in target[0] or "spot" not in text))
    assert list(schema_problems(made)) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["spec", "replicatedJobs", 0, "replicas"], "two"),
        (["spec", "failurePolicy", "maxRestart"], 3),
        (["spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "nodeSelectors"], {}),
        (["spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers"], None),
    ],
)  # fmt: skip
def test_the_schema_refuses_what_is_wrong(path, value):
    made = manifest()
    node = made
    for key in path[:-1]:
        node = node[key]
    if value is None:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    assert len(list(schema_problems(made))) >= 1


def test_slices_are_jobs_and_hosts_are_pods():
    made = manifest(*TWO_SLICES)
    (job,) = made["spec"]["replicatedJobs"]
    assert job["replicas"] == 2
    spec = job["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["backoffLimit"]) == (16, 16, 0)
    assert pod_of(made)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
    }
    (container,) = pod_of(made)["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": "4"}
    assert made["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    assert "distributed." not in script_of(made)


def test_keys_of_the_declaration_arrive():
    made = manifest("target=v5e-16", *EVERYTHING)
    pod, container = pod_of(made), pod_of(made)["containers"][0]
    assert made["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team", "team": "search"}
    assert (pod["priorityClassName"], pod["serviceAccountName"], pod["hostNetwork"]) == ("high", "trainer", True)
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert container["envFrom"] == [{"secretRef": {"name": "tokens"}}]
    assert container["resources"]["limits"] == {"google.com/tpu": "4", "memory": "300Gi", "cpu": "100"}
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/mnt", "/data"]
    assert job_of(made)["template"]["metadata"]["annotations"] == {"a/b": "c", "gke-gcsfuse/volumes": "true"}
    assert script_of(made).splitlines()[:2] == ["set -e", "source env.sh"]


def test_processes_on_gpus_are_told_where_the_first_pod_is():
    made = manifest("target=h100-32")
    name = made["metadata"]["name"]
    lines = f"meshloom() {{ printf '%s\\n' \"$@\"; }}\n{script_of(made).replace('exec ', '')}"
    words = subprocess.run(
        ["bash", "-c", lines], capture_output=True, text=True, check=True, env={"JOB_COMPLETION_INDEX": "3"}
    ).stdout.splitlines()
    # JobSet's DNS name of a pod: JOBSET-JOB-SLICE-HOST.JOBSET
    assert f"distributed.coordinator_address='{name}-hosts-0-0.{name}:8476'" in words
    assert words[-2:] == ["distributed.num_processes=4", "distributed.process_id=3"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod_of(made)["containers"][0]["volumeMounts"]


def test_an_exit_code_decides_whether_the_set_restarts():
    made = manifest("launch.max_restarts=7")
    policy = made["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7
    assert [(rule["action"], rule["onJobFailureReasons"]) for rule in policy["rules"]] == [
        ("FailJobSet", ["PodFailurePolicy"])
    ]
    (rule,) = job_of(made)["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {"containerName": "run", "operator": "In", "values": [2, 3, 4, 5, 130]}
    assert list(FINAL) == rule["onExitCodes"]["values"]
    assert not {1, 134, 137, PREEMPTED, STORAGE, HUNG, LOST} & set(FINAL)


@pytest.mark.parametrize("value", ["$(HOME)", "a $(touch hacked) b", "`touch hacked`", "'"])
def test_values_are_text_for_kubernetes_and_the_shell(tmp_path, value):
    typed = "'" + value.replace("'", r"\'") + "'"
    made = manifest(f"launch.environment={{MINE: {typed}}}", f"run.extra.mine={typed}")
    (variable,) = pod_of(made)["containers"][0]["env"]
    assert variable["value"].replace("$$(", "$(") == value
    assert "$(" not in variable["value"].replace("$$(", "")
    lines = f"meshloom() {{ printf '%s\\n' \"$@\"; }}\n{script_of(made).replace('exec ', '')}"
    done = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert f"run.extra.mine={typed}" in done.stdout.splitlines()
    assert not list(tmp_path.iterdir())


def test_what_is_missing_is_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        rendered("launch=jobset", "launch.directory=runs", "launch.spot=true")
    assert [problem.where for problem in caught.value.problems] == [
        "launch.image", "launch.directory", "launch.spot",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="no volume is mounted at /mnt/runs/test-"):
        rendered("launch=jobset", "launch.image=i", "launch.directory=/mnt/runs")


@pytest.mark.parametrize("word", [
    "data.source.paths=[/mnt/a.txt,/corpus/b.txt]", "checkpoint.directory=/corpus/c", "compilation_cache=/corpus/d",
])  # fmt: skip
def test_every_path_of_the_run_is_below_a_mount(word):
    words = ("data=text_files", "data.source.paths=[/mnt/a.txt]", word)
    with pytest.raises(ConfigError, match=f"no volume is mounted at /corpus/[bcd].*{word.partition('=')[0]}"):
        rendered(*NEEDED, *words)
    assert rendered(*NEEDED, *(each.replace("/corpus", "/mnt/corpus") for each in words))


def test_the_script_is_readable():
    text = rendered(*NEEDED, *TWO_SLICES).text
    assert "&id001" not in text
    assert f"exec {launched(*NEEDED, *TWO_SLICES).command()}" in text
    assert shlex.split(text[text.index("exec ") :].splitlines()[0])[1:3] == ["meshloom", "train"]


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
