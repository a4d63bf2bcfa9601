"""A process that is gone, or never comes, is named by those that are left, and they end to be started again."""

import json
import signal
import socket
import time
from contextlib import closing
from pathlib import Path

import pytest

from conftest import spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.runtime.core.failures import FINAL, LOST
from meshloom.runtime.processes.initialize import check_port_is_free
from meshloom.runtime.processes.lost import Group, Loss, describe_loss, read_loss
from support.several import Started, free_port, keys

# As jaxlib 0.10.2 wrote them; the stack is shortened.
SAID = """E1125 00:05:33.439280    1093 coordination_service_agent.cc:289] Polled an error from coordination service.
F1125 00:05:33.439401    1093 client.h:80] Terminating process because the JAX distributed service detected fatal \
errors. This most likely indicates that another task died; see the other task logs for more details. absl::Status: {}
*** Check failure stack trace: ***
    @     0x7ffa24c40634  absl::lts_20260107::log_internal::LogMessage::SendToLog()
"""
UNHEALTHY = """UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):
11
2
The tasks have crashed. Check the task logs for an earlier error.

RPC: /xla.coordination.CoordinationService/PollForError [type.googleapis.com/tensorflow.CoordinationServiceError='']"""
NO_LEADER = """UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task was preempted or died"""
BARRIER = """DEADLINE_EXCEEDED: Barrier timed out. Id: {}::0.
# of tasks that reached the barrier: 2/4.
The first task at the barrier: 0. Some timed out task names:
3
1


"""
NEVER = BARRIER.format("[Init]Wait_for_all_tasks_to_register")
NO_END = f"INTERNAL: Shutdown barrier has failed.\nBarrier result: '{BARRIER.format('Shutdown')}"
ALONE = "DEADLINE_EXCEEDED: Deadline Exceeded\n\nRPC: /xla.coordination.CoordinationService/RegisterTask"


@pytest.mark.parametrize(
    ("status", "kind", "missing"),
    [
        (UNHEALTHY, "gone", (2, 11)),
        (UNHEALTHY.replace("\n11\n2\n", "\n/job:jax_worker/replica:0/task:3\n"), "gone", (3,)),
        (NO_LEADER, "gone", (0,)),
        ("DEADLINE_EXCEEDED: Deadline Exceeded\n\nRPC: /xla.coordination.CoordinationService/Heartbeat", "gone", (0,)),
        (NEVER, "never came", (1, 3)),
        (ALONE, "never came", (0,)),
        (NO_END, "did not end", (1, 3)),
        ("INTERNAL: something new", "unknown", ()),
    ],
)
def test_what_jax_says_is_read(status, kind, missing):
    loss = read_loss("before\n" + SAID.format(status))
    assert loss is not None
    assert (loss.kind, loss.missing) == (kind, missing)
    assert loss.why == status.partition("\n")[0]


def test_another_abort_is_not_taken_for_a_loss():
    assert (
        read_loss("F1125 00:05:33.439401    1093 rendezvous.cc:80] Expected 8 threads to join the rendezvous\n") is None
    )


@pytest.mark.parametrize(
    ("loss", "step", "speaker", "words"),
    [
        (
            Loss("gone", (1,), ""),
            119,
            0,
            "process 1 on b is gone: no heartbeat for 100 s; the last step that ended is 119",
        ),
        (
            Loss("gone", (0, 2), ""),
            None,
            1,
            "process 0 on a and process 2 on c are gone: nothing answers at a:1; no step",
        ),
        (
            Loss("never came", (1,), ""),
            None,
            0,
            "process 1 of 3 did not come within 300 s; process 0 and process 2 did",
        ),
        (Loss("never came", (0,), ""), None, 1, "process 0 of 3 did not come to a:1 within 300 s"),
        (Loss("did not end", (2,), ""), 9, 0, "process 2 on c did not come to the end of the run within 300 s"),
        (Loss("unknown", (), "INTERNAL: new"), 9, 0, "JAX's coordination service ended the run: INTERNAL: new"),
    ],
)
def test_who_is_missing_is_said_by_one_that_is_left(loss, step, speaker, words):
    hosts = () if loss.kind == "never came" else ("a", "b", "c")
    group = Group(0, 3, "a:1", spec_of().distributed, hosts)
    problem = describe_loss(loss, group, step)
    assert problem.what.startswith(words)
    assert group.speaker(loss.missing) == speaker
    assert LOST not in FINAL, "such a run is started again"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_port_that_is_taken_is_named(family):
    with closing(socket.socket(family)) as owner:
        owner.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        with pytest.raises(ConfigError) as raised:
            check_port_is_free(f"[::]:{port}")
        assert raised.value.problems[0].what.startswith(f"port {port} of {socket.gethostname()} is taken")
        assert raised.value.exit_code == LOST
    check_port_is_free(f"[::]:{port}")


RUN = ("model=linear_stack", "model.num_layers=2", "target=cpu-2", "global_batch_size=8", "sequence_length=16",
       "data=synthetic", "precision=float32", "evaluation.every_num_steps=1000", "evaluation.num_batches=1",
       "logging=quiet", "sharding=fsdp", "checkpoint.every_num_steps=20", "hydra.run.dir=run")  # fmt: skip


def _metrics(run_dir: Path) -> list[dict]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def _wait_for_steps(started: Started, run_dir: Path, number: int) -> None:
    deadline = time.monotonic() + 200
    while len(_metrics(run_dir)) < number:
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in started.processes), started.end()
        time.sleep(0.01)


@pytest.mark.ci
def test_a_port_that_is_taken_ends_process_0_with_a_message(tmp_path):
    with closing(socket.socket(socket.AF_INET6)) as owner:
        owner.bind(("::", 0))
        owner.listen()
        port = owner.getsockname()[1]
        ((code, out, said),) = Started(tmp_path, (*RUN, *keys(2, port)[0])).end()
    assert (code, out) == (LOST, "")
    assert said.startswith(f"error: distributed: port {port} of {socket.gethostname()} is taken")
    assert said.count("\n") == 2


@pytest.mark.parametrize("missing", [pytest.param(0, marks=pytest.mark.release), pytest.param(2, marks=pytest.mark.ci)])
def test_a_host_that_never_comes_is_named(tmp_path, missing):
    timeout = "distributed.initialization_timeout_seconds=15"
    lines = keys(3, free_port())
    came = [index for index in range(3) if index != missing]
    ended = Started(tmp_path, *((*RUN, *lines[index], timeout) for index in came)).end()
    assert [code for code, _, _ in ended] == [LOST] * 2, ended
    told = ended[0][2]
    assert f"error: distributed: process {missing} of 3 did not come" in told
    assert ("process 0 and process 1 did" in told) == (missing == 2)
    assert "absl" not in told
    kept = Path(told.partition("JAX's own words are in ")[2].strip())
    assert "the JAX distributed service detected fatal errors" in kept.read_text()
    kept.unlink()
    assert (ended[1][2] == "") == (missing == 2), "one process speaks for those that came"


# An abort has to wait until it is looked for.
LOOKS_SELDOM = """
from meshloom.runtime.cli import main as cli
from meshloom.runtime.processes import lost
lost._POLL_SECONDS = 3
cli.main()
"""


@pytest.mark.ci
@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.release)])
def test_a_killed_host_is_named_with_the_last_step(tmp_path, lost):
    """bench/chaos.py shows that the next start goes on as if nothing had happened."""
    lines = [(*RUN, *each, "num_steps=100000") for each in keys(2, free_port())]
    started = Started(tmp_path, *lines, code=dict.fromkeys(range(2), LOOKS_SELDOM))
    run_dir = tmp_path / "run"
    _wait_for_steps(started, run_dir, 30)
    started.processes[lost].kill()
    ended, left = started.end(), 1 - lost
    code, _, said = ended[left]
    assert (code, ended[lost][0]) == (LOST, -signal.SIGKILL), ended
    sign = f"nothing answers at 127.0.0.1:{lines[0][-4].rpartition(':')[2]}" if lost == 0 else "no heartbeat for 10 s"
    told = f"error: distributed: process {lost} on {socket.gethostname()} is gone: {sign}; the last step that ended is "
    assert said.startswith(told), said
    assert abs(int(said.removeprefix(told).split()[0]) - _metrics(run_dir)[-1]["step"]) < 10
    assert said.count("\n") == 2
    log = (run_dir / "logs" / f"process-{left}.log").read_text()
    assert "the JAX distributed service detected fatal errors" in log
    assert told.removeprefix("error: ") in log
