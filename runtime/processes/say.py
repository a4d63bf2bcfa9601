"""What is said goes to the terminal and to the log alike."""

import json
import logging
import shlex
from collections.abc import Sequence

from meshloom.compiler.config.spec import RunSpec
from meshloom.compiler.core.console import Console

LOG = logging.getLogger("meshloom")  # runtime/processes/process_log.py gives it a file


def say(console: Console, text: str, *, is_shown: bool = True) -> None:
    """Shows and logs text; a terminal gets its lines wrapped between words."""
    LOG.info("%s", text)
    if is_shown:
        for line in text.split("\n"):
            console.wrapped(line)


def say_command(console: Console, label: str, words: Sequence[str]) -> None:
    """Shows a command to paste, in lines that the terminal does not break, and logs it as one line."""
    LOG.info("%s: %s", label, shlex.join(words))
    console.command(label, words)


def say_labels(console: Console, spec: RunSpec) -> None:
    """Shows and logs what the user calls the run, where it is called anything."""
    labels = {key: value for key, value in spec.run.model_dump(mode="json").items() if value}
    if labels:
        say(console, f"run: {json.dumps(labels, ensure_ascii=False)}")
