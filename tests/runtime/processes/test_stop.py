"""Ctrl-C is answered at once, and says what it waits for."""

import signal

import pytest

from meshloom.runtime.core.stderr_capture import captured_stderr
from meshloom.runtime.processes.distributed import Processes
from meshloom.runtime.processes.stop import StopRequest

NOTE = "waiting for {}. Another Ctrl-C ends at once and loses what is not saved.\n"


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


def test_what_loses_nothing_is_left_at_once_by_a_process_alone(capfd):
    with StopRequest(Processes()) as stop:
        with pytest.raises(KeyboardInterrupt), stop.waiting_for("the compiler", can_be_left=True):
            signal.raise_signal(signal.SIGTERM)
        assert stop.exit_code == 143
    assert capfd.readouterr().err == ""
