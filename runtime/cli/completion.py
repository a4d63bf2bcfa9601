"""What the shell is offered when it completes: commands, then Hydra's words without files that are parts of others."""

import io
import os
import re
from collections.abc import Callable
from contextlib import redirect_stdout

from meshloom.compiler.core.visible import write_out

from .commands import COMMANDS, Command

_PART = re.compile(r"(?:\S*[=/])?_[\w.-]*$")  # model=_llama, data/_base: names with a first `_`


def complete_command() -> Command | None:
    """Answers the shell, which knows of no commands, in `COMP_LINE`: offers them where one is being typed. Returns the
    one whose overrides are being typed, without it in the line, as Hydra completes these; None where there is none."""
    line = os.environ.get("COMP_LINE", "")
    words = line.split()
    if len(words) < 2 or (len(words) == 2 and not line.endswith(" ")):
        write_out(" ".join(COMMANDS))
        return None
    program, name = words[:2]
    command = COMMANDS.get(name)
    if command is None or not command.takes_overrides:  # the shell itself completes directories
        return None
    os.environ["COMP_LINE"] = program + line[line.index(name, len(program)) + len(name) :]
    return command


def offer_whole_options(complete: Callable[[], None]) -> None:
    """Prints what Hydra's completion prints, without parts."""
    out = io.StringIO()
    with redirect_stdout(out):
        complete()
    lines = out.getvalue().splitlines()
    words = [[word for word in line.split(" ") if not _PART.match(word)] for line in lines]
    write_out("\n".join(map(" ".join, words)))
