"""What the shell is offered when it completes: Hydra's words without files that are parts of others."""

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout

from meshloom.compiler.core.visible import write_out

_PART = re.compile(r"(?:\S*[=/])?_[\w.-]*$")  # model=_llama, data/_base: names with a first `_`


def offer_whole_options(complete: Callable[[], None]) -> None:
    """Prints what Hydra's completion prints, without parts."""
    out = io.StringIO()
    with redirect_stdout(out):
        complete()
    lines = out.getvalue().splitlines()
    words = [[word for word in line.split(" ") if not _PART.match(word)] for line in lines]
    write_out("\n".join(map(" ".join, words)))
