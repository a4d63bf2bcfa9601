"""What a compiler raises, in a sentence: it does not fit, an option is wrong, or the compiler failed."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from meshloom.compiler.core.errors import DOES_NOT_FIT, ConfigError, Problem
from meshloom.compiler.core.format import human_bytes
from meshloom.compiler.target.compiler_options import option_problem
from meshloom.compiler.xla.aot import OutOfMemory, parse_out_of_memory

from ..core.failures import RunFailed

_EXCEPTION = re.compile(r"[\w.]+(Error|Exception): ")


@contextmanager
def compiler_errors_reported(log: Path) -> Iterator[None]:
    """Turns a compiler's exceptions within the `with` into RunFailed, or ConfigError for options that it refuses.

    log: what it printed; what it raised is added there, whole.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(f"{said}\n")
        raise _reported(said, log) from error


def _reported(said: str, log: Path) -> ConfigError:
    if refused := parse_out_of_memory(said):
        fix = "choose a smaller model or batch, more remat, or more devices; `meshloom compile` says what would help"
        return RunFailed(Problem("target", _lack(refused), fix), DOES_NOT_FIT)
    if problem := option_problem(said, "this target"):
        return ConfigError([problem])
    what = f"failed, and not for memory: {_reason(said)}"
    fix = f"see {log}; other compiler_options or another version of it may do"
    return RunFailed(Problem("the compiler", what, fix), exit_code=1)


def _reason(said: str) -> str:
    """Returns the line that says why: the first one, or the exception of Python code that the compiler called."""
    lines = said.splitlines() or ["it did not say why"]
    raised = [line for line in lines if _EXCEPTION.match(line)] if "Traceback" in lines[0] else []
    return raised[-1] if raised else lines[0]


def _lack(refused: OutOfMemory) -> str:
    if refused.needed_bytes is None or refused.available_bytes is None:
        return f"the train step does not fit the memory of a device: {refused.said}"
    needed, available = human_bytes(refused.needed_bytes), human_bytes(refused.available_bytes)
    return f"the train step does not fit: {needed} are needed on each device, and {available} are available"
