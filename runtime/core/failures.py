"""Defines how a run fails for reasons outside its declaration: an error with a fix, and an exit code for each kind."""

import os
import re
import signal

from meshloom.compiler.core.errors import DOES_NOT_FIT, EXPOSED, MISTAKE, ConfigError, Problem

NONFINITE = 5  # NaN or infinity where training cannot go on
STORAGE = 6  # a checkpoint or a metric cannot be written, or no checkpoint can be read
HUNG = 7  # no step ended for too long, and watchdog.abort asked for the end
LOST = 8  # another process of the run is gone, or never came
FAULTY = 9  # a device does not give the same result twice
PREEMPTED = 128 + signal.SIGTERM  # asked to stop; its work is saved
INTERRUPTED = 128 + signal.SIGINT  # by a person, who does not want it started again

# Starting again would end in the same way. After any other code but 0 a run is started again: a host was lost, the
# processes that waited for it ended, or a disk was full.
FINAL = (MISTAKE, DOES_NOT_FIT, EXPOSED, NONFINITE, INTERRUPTED)


class RunFailed(ConfigError):
    """The run ended early. It is reported like a mistake; the exit code tells a scheduler the kind of failure."""

    def __init__(self, problem: Problem, exit_code: int):
        super().__init__([problem])
        self.exit_code = exit_code


def is_of_one_process(error: BaseException) -> bool:
    """Returns True for an error that one of several processes may have while the others continue or are gone: its disk
    refuses a write, or another process did not come to a meeting."""
    return isinstance(error, OSError) or (isinstance(error, RunFailed) and error.exit_code in (STORAGE, LOST))


def storage_reason(error: BaseException) -> str | None:
    """Returns the operating system's reason for an error, such as `No space left on device`; None if it has none.

    TensorStore, which writes the arrays, puts it into the text of a ValueError.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    if match := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(match[1]))
    inner = error.__cause__ or error.__context__
    return storage_reason(inner) if inner else None
