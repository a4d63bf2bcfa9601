"""From a declaration to hosts: their number, what each runs, and in which environment."""

import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import SMALL
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.target.target import plan_target
from meshloom.compiler.target.topology import find_devices
from meshloom.runtime.launch.plan import job_name
from support.launch import launched


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        launched(*overrides)
    return [f"{problem.where}: {problem.what}" for problem in caught.value.problems]


@pytest.mark.cases(plain=3)
@pytest.mark.parametrize(
    ("target", "num_slices", "per_slice", "chips"),
    [
        (["target=v5p-128"], 1, 16, 4),
        (["target=v5e-256", "target.num_slices=2"], 2, 64, 4),
        (["target=v5e-1"], 1, 1, 1),
        (["target=v6e-8"], 1, 2, 4),
        (["target=tpu7x-128"], 1, 16, 4),
        (["target=h100-64"], 1, 8, 8),
        (["target=h100-4"], 1, 1, 4),
        (["target=cpu-8", "launch.num_hosts=4"], 1, 4, None),
        (["target=local", "launch.num_hosts=3"], 1, 3, None),
    ],
)
def test_hosts_follow_from_the_target(target, num_slices, per_slice, chips):
    hosts = launched("launch=slurm", *target).hosts
    assert (hosts.num_slices, hosts.per_slice, hosts.chips) == (num_slices, per_slice, chips)


@pytest.mark.tpu
@pytest.mark.ci
@pytest.mark.parametrize("name", ["v4:2x2x4", "v5e-16", "v5p-32", "v6e-16", "tpu7x-32"])
def test_libtpu_counts_the_same_hosts(name):
    request = Request((*SMALL, "launch=slurm", f"target={name}"))
    spec = read_spec(request, then=lambda spec: spec)
    devices = find_devices(spec.target, plan_target(spec.target, "bfloat16"))
    hosts = launched("launch=slurm", f"target={name}").hosts
    assert len({device.process_index for device in devices}) == hosts.count


def test_every_host_runs_the_typed_declaration_in_one_directory():
    plan = launched("launch=slurm", "launch.directory=/runs", "seed=3", allowed=("mine",))
    words = shlex.split(plan.command("$MORE"))
    assert words[:3] == ["meshloom", "train", "--allow-code-from=mine"]
    assert not [word for word in words if "launch" in word]
    assert "seed=3" in words
    assert f"hydra.run.dir=/runs/{plan.name}" in words
    assert words[-1] == "$MORE"
    assert launched("launch=slurm", "hydra.run.dir=/mine").run_dir == "/mine"


def test_the_name_says_which_run_it_is_and_not_how_it_is_launched():
    names = [
        launched(*more).name
        for more in (
            (), ("launch=slurm",), ("launch.max_restarts=7",), ("logging.every_num_steps=3",), ("seed=1",),
        )
    ]  # fmt: skip
    assert len(set(names[:4])) == 1
    assert names[4] != names[0]


def test_an_environment_carries_what_compile_options_cannot_and_the_user_has_the_last_word():
    h100 = launched("launch=slurm", "target=h100-8", "launch.environment={CUDA_DEVICE_MAX_CONNECTIONS:4,MINE:'a b'}")
    assert h100.environment["NCCL_NVLS_ENABLE"] == "1"
    assert h100.environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.95"
    assert h100.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "4"
    assert h100.environment["MINE"] == "a b"
    assert "NCCL_NVLS_ENABLE" not in launched("launch=slurm", "target=a100-8").environment
    assert launched("launch=slurm", "target=v5p-128").environment == {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["launch=slurm", "target=v5p-128", "launch.num_hosts=3"],
         "launch.num_hosts: 3 hosts are not v5p-128, which is 16 hosts with 4 chips of v5p each"),
        (["launch=slurm", "target=cpu-8", "launch.num_hosts=3"],
         "target: 8 simulated devices do not divide over 3 processes"),
        (["target=cpu-1", "launch.num_processes=2"], "target: 1 simulated device does not divide over 2 processes"),
        (["launch.num_processes=1", "launch.num_slices=2"],
         "launch.num_processes: 1 process cannot be 2 slices of equal size"),
        (["launch.num_processes=3"], "target: 8 simulated devices do not divide over 3 processes"),
        (["launch.num_processes=4", "launch.num_slices=3"],
         "launch.num_processes: 4 processes cannot be 3 slices of equal size"),
        (["target=v5p-128"], "target: launch=local rehearses on simulated devices, and the target is v5p-128"),
        (["launch=slurm", "launch.directory=null"],
         "launch.directory: is not set: all hosts write one run directory, and a restart continues there"),
        (["launch=slurm", "hydra.run.dir='runs/${now:%H}'"],
         "hydra.run.dir: runs/${now:%H} is another directory on each host and at each restart"),
        (["launch=slurms"], "launch: there is no 'slurms' in this group"),
        (["launch.engine=slurms"], "launch.engine: 'slurms' is not allowed"),
        (["launch.environment={A B:3}"], "launch.environment: 'A B' is not the name of a variable"),
    ],
)  # fmt: skip
def test_each_mistake_is_one_clear_error(overrides, message):
    assert problems(*overrides) == [message]


def test_two_mistakes_are_reported_at_once():
    assert len(problems("launch=slurm", "target=v5p-128", "launch.num_hosts=3", "launch.directory=null")) == 2


def test_a_home_is_this_ones_where_hosts_share_it_and_a_url_is_an_error(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    words = ("launch=slurm", "target=h100-8")
    assert launched(*words, "launch.directory=~/runs").run_dir.startswith("/home/ada/runs/")
    assert launched(*words, "hydra.run.dir=~/mine").run_dir == "/home/ada/mine"
    (problem,) = problems(*words, "launch.directory=gs://bucket/runs")
    assert problem.startswith("launch.directory: 'gs://bucket/runs' is a URL")


@given(st.text(max_size=200), st.integers(1, 999), st.integers(1, 9999))
def test_a_pods_name_is_a_dns_label_of_at_most_63_characters(label, num_slices, num_hosts):
    """As JobSet's webhook makes the name of the last pod: pkg/webhooks/jobset_webhook.go."""
    pod = f"{job_name(label, {})}-hosts-{num_slices - 1}-{num_hosts - 1}-abcde"
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", pod)
    assert len(pod) <= 63


def test_two_runs_have_two_names_and_one_has_one():
    first, same, other = (job_name("x" * 100, {"a": {"b": seed, "c": 1}}) for seed in (0, 0, 1))
    assert first == same == job_name("x" * 100, {"a": {"c": 1, "b": 0}})
    assert first != other
    assert job_name("Llama 3 8B, v5p-128", {}).startswith("llama-3-8b-v5p-128-")
