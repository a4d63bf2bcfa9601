"""Prints the help of a command that takes overrides: at most a screen, and by name the options of the groups.

meshloom train --help            usage, the keys that people set first, those of the command, the groups
meshloom train --help model      the options of a group, a line each
meshloom train --help all        of all groups
"""

import json
import shutil
import sys
import textwrap
from typing import Any

from meshloom.compiler.core.errors import Problem, raise_if_any, use_one_of
from meshloom.compiler.core.key_paths import leaves
from meshloom.compiler.core.user_code import FLAG
from meshloom.compiler.core.visible import write_out
from meshloom.compiler.declare.choices import default_values, described_groups
from meshloom.compiler.declare.compose import Request
from meshloom.compiler.declare.sections import SECTION_KEYS

from .commands import Command
from .words import WIDTH

# What people set first, and what it is; defaults are added.
SET_FIRST = {
    "model": "from_hf with model.path=DIR is a published one",
    "target": "the chips: local, cpu-8, v5p-128, h100-64",
    "data": "chats, jsonl, text_files, ... with data.source.paths=[FILES]",
    "adapter": "lora, or all weights",
    "global_batch_size": "sequences in a step, over all devices",
    "sequence_length": "tokens in a sequence",
    "num_steps": "null: data.num_epochs=N counts them; without, 300",
    "optimizer.learning_rate": "null: the usual one of the task",
    "sharding": "what is split over the devices; mesh.AXIS=N: how far",
    "remat": "what is computed twice, to save memory",
}
OWN_NODES = {"tune": "tune", "launch": "launch", "data": "shards"}  # commands whose keys have a section of the config
ALL_GROUPS = "all"
SHOWN_VALUE = 24  # characters of a default


def show_help(command: Command, request: Request, names: list[str]) -> None:
    """Prints the help of a command. names: the groups whose options are listed. Raises ConfigError for a name that is
    none."""
    if names:
        _show_groups(request, names)
        return
    values = default_values(request)
    _write(f"meshloom {command.name}: {command.description}", indent=2)
    first = "RUN|DIR " if command.opens_weights else ""
    _write(f"usage: meshloom {command.name} {first}[group=option ...] [key=value ...] [FLAG ...]", indent=2)
    if command.opens_weights:
        write_out("  RUN: a run directory, or RUN/checkpoints/STEP; DIR: published weights")
    for flag in command.flags:
        _write(f"  {flag}: {flag.does}", indent=4)
    if command.section:
        own = {key: values[f"{command.section}.{key}"] for key in SECTION_KEYS[command.section]}
        _write_keys("keys of its own, with their defaults", own)
    elif command.name in OWN_NODES:
        own = {key: value for key, value in values.items() if key.startswith(f"{OWN_NODES[command.name]}.")}
        _write_keys("keys of its own, with their defaults", own)
    if command.name in OWN_NODES:
        _write_keys("set first", {key: values.get(key) for key in SET_FIRST})
    elif not command.section:
        write_out("set first, with the defaults:")
        for key, what in SET_FIRST.items():
            word = f"{key}={_shown(values.get(key))}"
            _write(f"  {word:<30} {what}", indent=33)
    _write(f"groups: {', '.join(described_groups(request))}", indent=2)
    _write(f"`meshloom {command.name} --help GROUP` lists its options, `--help all` all of them", indent=2)
    write_out("`--cfg job` prints all keys with their values; others of Hydra: -m, --config-dir")


def _show_groups(request: Request, names: list[str]) -> None:
    """Lists the options of groups, also those of the user, each with the first line of its file."""
    groups = described_groups(request)
    wanted = list(groups) if ALL_GROUPS in names else names
    known = [*groups, ALL_GROUPS]
    raise_if_any(
        Problem(name, "there is no such group", use_one_of(name, known)) for name in wanted if name not in groups
    )
    for group in wanted:
        write_out(f"{group}=")
        width = max(len(option.name) for option in groups[group]) + 2
        for option in groups[group]:
            default = "  (default)" if option.is_default else ""
            _write(f"  {option.name:<{width}}{option.description}{default}".rstrip(), indent=2 + width)
    _write(f"code of your own: {FLAG}=MODULE lets a config name modules that are not installed", indent=2)


def _write_keys(title: str, values: dict[str, Any]) -> None:
    """Prints keys with their defaults in lines that fit."""
    found = [f"{key}={_shown(value)}" for name, node in values.items() for key, value in leaves(node, name)]
    write_out(f"\n{title}:")
    _write("  " + "  ".join(found), indent=2)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = "..." if "${" in text else text
    return text if len(text) <= SHOWN_VALUE else f"{text[: SHOWN_VALUE - 2]}.."


def _width() -> int | None:
    """Returns the columns of the terminal; None where lines are not to be broken."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _write(text: str, *, indent: int) -> None:
    """Prints a line; on a terminal, in lines that fit, broken between words, the others indented."""
    width = _width() or max(WIDTH, len(text))
    for line in text.split("\n"):
        wrapped = textwrap.wrap(
            line, max(width, 2 * indent), subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
        )
        write_out("\n".join(wrapped))
