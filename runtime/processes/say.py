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


def say_labels(console: Console, spec: RunSpec) -> None:
    """Shows and logs what the user calls the run, where it is called anything."""
    labels = {key: value for key, value in spec.run.model_dump(mode="json").items() if value}
    if labels:
        say(console, f"run: {json.dumps(labels, ensure_ascii=False)}")
