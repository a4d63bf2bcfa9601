"""What a command prints with `--json` against the schema that `meshloom schema` prints for it."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema

from meshloom.runtime.cli.commands import COMMANDS
from meshloom.runtime.cli.schema import DOCUMENTS

SWEEPS = {"-m", "--multirun"}


@cache
def validator(command: str) -> Any:
    (document,) = (each for each in DOCUMENTS.values() if command in each.commands)
    kind = jsonschema.Draft202012Validator
    kind.check_schema(schema := document.make())
    return kind(schema)


def check_printed(words: Sequence[str], out: str) -> None:
    """Raises AssertionError if a command with `--json` has printed something else than its schema says."""
    if "--json" not in words or words[0] not in COMMANDS or words[0] == "schema" or not out.strip():
        return
    printed = out.splitlines() if COMMANDS[words[0]].streams else [out]
    for text in printed:
        check(json.loads(text), "sweep" if SWEEPS & {*words} else words[0])


def check(value: Any, command: str) -> None:
    wrong = [f"{list(each.absolute_path)}: {each.message}"[:300] for each in validator(command).iter_errors(value)]
    assert not wrong, "\n".join(wrong)
