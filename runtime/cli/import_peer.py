"""Runs `meshloom import TRAINER FILE|COMMAND`: another trainer's declaration as overrides of Meshloom."""

import json
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from meshloom.compiler.core.console import Column, Console, Table
from meshloom.compiler.core.errors import COMMAND_LINE, ConfigError, Problem
from meshloom.compiler.core.format import be, counted
from meshloom.compiler.core.visible import write_out
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.peers.importing import import_declaration
from meshloom.compiler.peers.reading import Imported

from ..core.files import replace_text
from ..core.inputs import text_of_file
from ..processes.devices import plan_without_devices
from .words import Words

FOLDER_OF_OPTIONS = "experiment"


def import_command(words: Words) -> None:
    """Imports a declaration. Raises ConfigError for what cannot be honoured, or does not compose here."""
    peer, *rest = words.texts
    targets = [word.partition("=")[2] for word in rest if word.startswith("target=")]
    rest = [word for word in rest if not word.startswith("target=")]
    found = import_declaration(peer, rest, targets[-1] if targets else None, _read)
    _check(found)
    path = Path(words.flags["--write"]) if "--write" in words.flags else None
    if path:
        _write(found, path)
    if "--json" in words.flags:
        write_out(json.dumps(_as_json(found, path), indent=1))
    else:
        _show(found, path, Console(off_terminal_width=120))


def _read(place: str) -> str:
    return text_of_file(place, COMMAND_LINE, "name a file that is there, or quote a whole command")


def _check(found: Imported) -> None:
    """Raises ConfigError with the problems of a plan of the overrides, each with the peer's keys it comes from."""

    def plan(spec: Any) -> None:
        plan_run(spec)

    try:
        plan_without_devices(read_spec(Request(found.words), lambda spec: spec).target)
        read_spec(Request(found.words), then=plan)
    except ConfigError as error:
        sources = {each.text.partition("=")[0]: each.because for each in found.overrides}
        raise ConfigError(
            Problem(each.where, f"{each.what} (from {sources[each.where]})", each.fix)
            if each.where in sources
            else each
            for each in error.problems
        ) from None


def _write(found: Imported, path: Path) -> None:
    """Writes the overrides as a command, or as an option of the user's own configs where the file is a YAML."""
    is_config = path.suffix in (".yaml", ".yml")
    if is_config and path.parent.name != FOLDER_OF_OPTIONS:
        what = f"{path} is not in a folder '{FOLDER_OF_OPTIONS}', and so no option of a group"
        fix = f"name {path.parent / FOLDER_OF_OPTIONS / path.name}, or a script, {path.stem}.sh"
        raise ConfigError([Problem("--write", what, fix)])
    text = _config(found) if is_config else f"# {_source(found)}\n{shlex.join(['meshloom', 'explain', *found.words])}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        raise ConfigError([Problem("--write", f"{path} cannot be written: {error.strerror}", "name another")]) from None


def _source(found: Imported) -> str:
    return f"{found.peer.title}'s {found.place}, by meshloom import"


def _config(found: Imported) -> str:
    groups: list[dict[str, str]] = []
    values: dict[str, Any] = {}
    for word in found.words:
        key, _, value = word.partition("=")
        if (files("meshloom.conf") / key).is_dir():
            groups.append({f"override /{key}": value})
            continue
        *folders, last = key.split(".")
        inside = values
        for folder in folders:
            inside = inside.setdefault(folder, {})
        inside[last] = yaml.safe_load(value)
    head = f"# @package _global_\n# {_source(found)}\n"
    return head + yaml.safe_dump({"defaults": groups} | values, sort_keys=False, width=110)


def _as_json(found: Imported, path: Path | None) -> dict[str, Any]:
    return {
        "peer": found.peer.name,
        "place": found.place,
        "peer_version": found.peer.source,
        "overrides": [{"override": each.text, "because": each.because} for each in found.overrides],
        "without_effect": {what: list(keys) for what, keys in found.without_effect.items()},
        "notes": list(found.notes),
        "written": str(path) if path else None,
    }


def _shortened(override: str) -> str:
    """Returns an override for a table: the options of XLA are counted, and stand whole in the command below."""
    if not override.startswith("compiler_options="):
        return override
    return f"compiler_options={{{counted(override.count(': '), 'option')} of XLA}}"


def _show(found: Imported, path: Path | None, console: Console) -> None:
    num_left = sum(map(len, found.without_effect.values()))
    console.line((f"{found.peer.title}: {found.place}", "bold"))
    columns = (Column("override", overflow="fold"), Column("because of", overflow="fold"))
    console.table(Table(columns, [[_shortened(each.text), each.because] for each in found.overrides]))
    if num_left:
        console.line()
        console.wrapped(f"{counted(num_left, 'key')} {be(num_left)} without effect here:")
    for what, keys in found.without_effect.items():
        console.wrapped(f"  {what}: {', '.join(keys)}")
    for note in found.notes:
        console.wrapped(("note ", "bold"), note)
    console.line()
    if path:
        console.line(f"wrote {path}")
    if path and path.suffix in (".yaml", ".yml"):
        option = f"{FOLDER_OF_OPTIONS}={path.stem}"
        console.command("use it", ["meshloom", "explain", "--config-dir", str(path.parents[1]), option])
    else:
        console.command("use it", ["meshloom", "explain", *found.words])
