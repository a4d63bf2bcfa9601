"""All processes stop after the same step, whoever is asked and whenever; by threads that are its processes, and JAX's
own coordination service."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

from meshloom.runtime.processes.stop import AgreedStop
from support.several import free_port

NUM_PROCESSES = 3
NUM_STEPS = 10_000


@pytest.fixture(scope="module")
def clients():
    port = free_port()
    service = _jax.get_distributed_runtime_service(f"[::]:{port}", NUM_PROCESSES)
    clients = [_jax.get_distributed_runtime_client(f"localhost:{port}", index) for index in range(NUM_PROCESSES)]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda client: client.connect(), clients))
        yield clients
        list(threads.map(lambda client: client.shutdown(), clients))
    service.shutdown()


def last_steps(clients, name, *, asked):
    """After how many steps each process stopped. asked: by process, the step from which it is asked; a process is told
    of it only at that one step, as by JAX."""
    random_delay = random.Random(name)

    def run(index: int) -> int:
        agreed = AgreedStop(clients[index], index, 30, name)
        agreed.start()
        try:
            for step in range(NUM_STEPS):
                if agreed.is_due(step, is_asked=step == asked.get(index)):
                    return step
                time.sleep(random_delay.random() * 0.004)
            return NUM_STEPS
        finally:
            agreed.stop()

    with ThreadPoolExecutor(NUM_PROCESSES) as threads:
        return list(threads.map(run, range(NUM_PROCESSES)))


@pytest.mark.parametrize("asked", [{0: 0}, {2: 5}, {0: 12, 1: 12, 2: 12}, {0: 13, 1: 14}, {1: 200}])
def test_all_stop_after_the_same_step(clients, asked):
    stopped = last_steps(clients, str(asked), asked=asked)
    assert len(set(stopped)) == 1
    assert min(asked.values()) <= stopped[0] < NUM_STEPS
