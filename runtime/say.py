"""What is said goes to the terminal and to the log alike."""

import logging

from rich.console import Console

LOG = logging.getLogger("meshloom")  # runtime/process_log.py gives it a file


def say(console: Console, line: str, *, is_shown: bool = True) -> None:
    """A line as it is, to the terminal and the log: no wrapping, no markup, so that it can be searched and copied."""
    LOG.info(line)
    if is_shown:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
