"""Runs that have to end for a reason outside of their declaration: what happened, what to do, an exit code each."""

import os
import re

from meshloom.compiler.problems import Problem

NONFINITE = 3  # NaN or infinity where training cannot go on
STORAGE = 4  # a checkpoint or a metric cannot be written, or no checkpoint can be read


class RunFailed(Exception):
    """The run ended early. A problem for its user, and the exit code that tells a scheduler what kind it is."""

    def __init__(self, problem: Problem, exit_code: int):
        self.problem, self.exit_code = problem, exit_code
        super().__init__(str(problem))


def storage_reason(error: BaseException) -> str | None:
    """What the operating system said, where that is what an error is about: `No space left on device`.

    TensorStore, which writes the arrays, tells it inside of a ValueError.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    if match := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(match[1]))
    inner = error.__cause__ or error.__context__
    return storage_reason(inner) if inner else None
