"""Ctrl-C is answered at once, and says what it waits for."""

import ctypes
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

from meshloom.runtime.core.stderr_capture import captured_stderr
from meshloom.runtime.processes.distributed import Processes
from meshloom.runtime.processes.stop import AgreedStop, StopRequest
from support.several import free_port

NOTE = "waiting for {}. Another Ctrl-C ends at once and loses what is not saved.\n"
NUM_PROCESSES = 3
NUM_STEPS = 10_000


def test_the_first_ctrl_c_is_answered_and_the_second_interrupts(capfd):
    with StopRequest(Processes()) as stop:
        assert not stop.is_due(3)
        signal.raise_signal(signal.SIGINT)
        assert stop.is_due(3)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    expected = NOTE.format("the step that is running and its checkpoint")
    assert capfd.readouterr().err == f"\nCtrl-C: stopping; {expected}"
    assert stop.exit_code == 130


def test_the_answer_is_on_the_terminal_while_stderr_is_a_log(capfd):
    with StopRequest(Processes()) as stop, stop.waiting_for("the compiler"), captured_stderr() as captured:
        signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr().err == f"\nSIGTERM: stopping; {NOTE.format('the compiler')}"
    assert captured.lines == ()


ENDS_A_JOB = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGXCPU)


@pytest.fixture
def heard():
    """Has this process hear of signals that end a job, also where a shell had it ignore some (nohup, a job with &)."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDS_A_JOB}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", ENDS_A_JOB)
def test_each_signal_that_ends_a_job_asks_to_stop_once(capfd, number):
    with StopRequest(Processes()) as stop:
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)  # schedulers send more when the time is up
        assert stop.is_due(3)
    assert capfd.readouterr().err.count("waiting for") == 1
    assert stop.exit_code == 128 + number


@pytest.mark.usefixtures("heard")
def test_a_signal_that_a_library_has_the_process_ignore_is_heard_from_the_next_step_on():
    """libtpu does so by sigaction when it is loaded, of which Python knows nothing."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    with StopRequest(Processes()) as stop:
        libc.signal(signal.SIGHUP, int(signal.SIG_IGN))
        assert not stop.is_due(1)
        signal.raise_signal(signal.SIGHUP)
        assert stop.is_due(2)


def test_a_signal_that_was_ignored_when_python_began_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as by nohup
    try:
        with StopRequest(Processes()) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.is_due(1)
            signal.raise_signal(signal.SIGHUP)
            assert not stop.is_due(2)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_loses_nothing_is_left_at_once_by_a_process_alone(capfd):
    with StopRequest(Processes()) as stop:
        with pytest.raises(KeyboardInterrupt), stop.waiting_for("the compiler", can_be_left=True):
            signal.raise_signal(signal.SIGTERM)
        assert stop.exit_code == 143
    assert capfd.readouterr().err == ""


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
