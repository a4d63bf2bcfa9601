"""What is said goes to the terminal and to the log alike."""

import json
import logging

from meshloom.compiler.config.spec import RunSpec
from meshloom.compiler.core.console import Console

LOG = logging.getLogger("meshloom")  # runtime/processes/process_log.py gives it a file


def say(console: Console, text: str, *, is_shown: bool = True) -> None:
    """Shows text as it is, and logs it: its lines are not broken, so that they can be searched and copied."""
    LOG.info("%s", text)
    if is_shown:
        for line in text.split("\n"):
            console.line(line)


def say_notes(console: Console, spec: RunSpec) -> None:
    """Shows and logs the user's own notes, where a run has any."""
    if spec.notes:
        say(console, f"notes: {json.dumps(spec.notes, ensure_ascii=False)}")
