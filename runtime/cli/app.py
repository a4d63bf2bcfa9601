"""Runs a command whose words are flags and overrides of Hydra, and checks them before anything is written.

A single run is composed and checked first, then handed to Hydra, which makes the run directory. A sweep is checked
value by value, then runs each point in a process of its own: devices, compiler and signals belong to one run alone.

Settings have no dashes: a flag that looks like a setting is refused with the setting to type. A shell completes Hydra's
words without files that are parts of others.
"""

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import redirect_stdout, suppress
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path
from typing import NoReturn

from meshloom.compiler.core.errors import COMMAND_LINE, MISTAKE, ConfigError, Problem, all_of, raise_if_any
from meshloom.compiler.core.user_code import FLAG, VARIABLE, code_allowed_from, parse_allowed
from meshloom.compiler.core.visible import write_out, write_problems
from meshloom.compiler.declare.application import run_application
from meshloom.compiler.declare.choices import all_keys
from meshloom.compiler.declare.compose import Request, check_config_files, read_request, read_spec
from meshloom.compiler.declare.compositions import compositions_kept
from meshloom.compiler.declare.environment import masked
from meshloom.compiler.declare.hydra_private import hydra_flags
from meshloom.compiler.declare.hydra_settings import search_path_override
from meshloom.compiler.declare.peer_names import peer_words
from meshloom.compiler.declare.problems import MISTAKES, as_config_error
from meshloom.compiler.declare.sections import in_section

from ..inference.run_request import request_of_run
from .commands import SWEEP, Command
from .help import show_help
from .words import no_flag

_PART = re.compile(r"(?:\S*[=/])?_[\w.-]*$")  # model=_llama, data/_base: names with a first `_`
RESUMES = ("resume", "continue", "restart", "restore")  # what other trainers call it


def run_declared(command: Command, args: list[str]) -> int:
    """Runs a command that takes overrides. Returns the exit code: 2 for the user's mistakes, which are all printed."""
    try:
        flags, problems = parse_flags(command, args)
        allowed = parse_allowed(flags.allow_code_from, FLAG) + parse_allowed([os.environ.get(VARIABLE, "")], VARIABLE)
        with code_allowed_from(allowed):  # no config file can add a module
            if problems:  # those of the overrides, too
                all_of(lambda: raise_if_any(problems), lambda: _check_overrides(flags))
            return _run(command, flags)
    except BrokenPipeError:  # not a mistake: main.py ends the command
        raise
    except MISTAKES as error:
        return show_mistake(as_config_error(error))


def _check_overrides(flags: argparse.Namespace) -> None:
    try:
        read_spec(request_of_flags(flags), then=lambda spec: spec)
    except MISTAKES as error:  # not all are ConfigErrors, which alone are shown together
        raise as_config_error(error) from error


def _run(command: Command, flags: argparse.Namespace) -> int:
    if flags.help:
        names = [word for word in flags.overrides if "=" not in word]
        flags.overrides = [word for word in flags.overrides if "=" in word]
        show_help(command, request_of_flags(flags), [] if command.opens_weights else names)
        return 0
    request = request_of_flags(flags)
    if flags.multirun or "hydra.mode=MULTIRUN" in request.overrides:
        return _as_json(flags, lambda: SWEEP.load()(command.name, request, flags))
    elif flags.cfg:
        read_spec(request, then=lambda spec: spec)
        try:
            with masked():  # --resolve must not show values from the environment
                run_application(request, flags)
        except SystemExit:  # Hydra ends like this if there is no such --package, and has said so
            return MISTAKE
    elif flags.info or flags.hydra_help:
        check_config_files(request)  # Hydra sets up logging as they say
        with suppress(SystemExit):  # Hydra ends like this after its own help
            run_application(request, flags)
    elif flags.shell_completion:
        offer_whole_options(lambda: run_application(request, flags))
    elif command.joins_processes:  # all of them hear of a mistake that one finds
        run = command.load()
        return run(request, flags) if command.streams else _as_json(flags, lambda: run(request, flags))
    else:
        with compositions_kept():  # the command reads the declaration again
            reading = read_request(request)
            if reading.is_refused:  # before the command is imported, which takes longer
                raise ConfigError(reading.problems)
            return _as_json(flags, lambda: command.load()(request, flags))
    return 0


def _as_json(flags: argparse.Namespace, run: Callable[[], int]) -> int:
    """Runs a command. With `--json` its standard output is the result that it sets as `flags.result`, and nothing else;
    all that it says goes to standard error."""
    if not flags.json:
        return run()
    with redirect_stdout(sys.stderr):
        exit_code = run()
    if flags.result is not None:
        write_out(json.dumps(flags.result, indent=1))
    return exit_code


def parse_flags(command: Command, args: Sequence[str]) -> tuple[argparse.Namespace, list[Problem]]:
    """Returns the flags with the overrides, and their problems; `place` is the folder of weights that the line names.
    Raises ConfigError if a known flag lacks its value."""
    parser = hydra_flags()
    parser.add_argument(FLAG, action="append", default=[], metavar="MODULE")
    parser.set_defaults(check=False, show=False, json=False, result=None, place=None, predicts=command.predicts)
    for flag in command.flags:
        parser.add_argument(flag.name, action="store_true")
    parser.prog, parser.error = f"meshloom {command.name}", _refuse  # type: ignore[method-assign]
    flags, rest = parser.parse_known_args(list(args))
    flags.overrides += [text for text in rest if not text.startswith("-")]  # argparse takes only those before a flag
    problems = _problems_of_values(flags)
    for name, value in _unknown_flags(args, {text for text in rest if text.startswith("-")}):
        problems.append(_unknown_flag(command.name, name, value or ""))
        if value is not None and value in flags.overrides:
            flags.overrides.remove(value)
    if flags.experimental_rerun:
        fix = "type the line again with hydra.run.dir=RUN_DIR: spec.yaml of a run holds what it was"
        problems.append(Problem(COMMAND_LINE, "--experimental-rerun is not supported", fix))
    if command.opens_weights:
        problems += _take_place(command, flags)
    if command.section:
        flags.overrides = in_section(command.section, flags.overrides)
    return flags, problems


def _take_place(command: Command, flags: argparse.Namespace) -> list[Problem]:
    """Moves the word that names a folder of weights from the overrides to `flags.place`. Returns the problems."""
    if flags.help or flags.hydra_help or flags.shell_completion:
        return []
    places = [word for word in flags.overrides if "=" not in word and not re.match("~(?!/)", word)]  # ~key deletes it
    if not places and flags.overrides and Path(flags.overrides[0]).is_dir():  # a point of a sweep: seed=1,sharding=ddp
        places = flags.overrides[:1]
    line = f"type: meshloom {command.name} RUN|DIR [group=option ...] [key=value ...]"
    if flags.multirun:
        return [Problem(COMMAND_LINE, f"{command.name} opens one folder, and -m asks for several", "leave out -m")]
    if len(places) != 1:
        named = f"names {len(places)} folders ({', '.join(places)})" if places else "names no folder of weights"
        return [Problem(COMMAND_LINE, f"the line {named}", f"{line}; `meshloom runs` lists the runs on this machine")]
    flags.overrides.remove(places[0])
    flags.place = places[0]
    return []


def request_of_flags(flags: argparse.Namespace) -> Request:
    """Returns the request, in which `--config-dir` is one more place to look for configs. Raises ConfigError if the
    line names a folder of weights, and there is none."""
    if flags.place is not None:
        return request_of_run(flags.place, flags.overrides, flags)
    overrides = search_path_override(flags.overrides, flags.config_dir)
    path = str(Path(flags.config_path).resolve()) if flags.config_path else None
    return Request(tuple(overrides), flags.config_name or "config", path, predicts=flags.predicts)


def _refuse(message: str) -> NoReturn:
    fix = "`meshloom COMMAND --help` lists what there is; settings have no dashes: num_steps=20"
    raise ConfigError([Problem(COMMAND_LINE, message, fix)])


def _problems_of_values(flags: argparse.Namespace) -> list[Problem]:
    """Returns the problems of flags that would silently change nothing."""
    empty = [name for name in ("config_path", "config_name") if getattr(flags, name) == ""]
    problems = [Problem(f"--{name.replace('_', '-')}", "is empty", "name one, or leave it out") for name in empty]
    if flags.package is not None and not flags.cfg:
        problems.append(Problem("--package", "chooses a part of what --cfg shows", "add --cfg job, or leave it out"))
    if flags.check and flags.multirun:
        what = "checks a single plan; the table of a sweep shows which points do not fit"
        problems.append(Problem("--check", what, "leave out --check, or -m"))
    return problems


def _unknown_flags(args: Sequence[str], unknown: Set[str]) -> Iterator[tuple[str, str | None]]:
    """Yields each unknown flag as typed, with its value: after `=`, or the next word if that is not an override."""
    for text, following in zip_longest(args, args[1:], fillvalue="-"):
        if text in unknown:
            name, has_value, value = text.partition("=")
            is_value = not has_value and "=" not in following and not following.startswith("-")
            yield name, value if has_value else following if is_value else None


def _unknown_flag(command: str, name: str, value: str) -> Problem:
    bare = name.lstrip("-").replace("-", "_")
    if bare.startswith(RESUMES) and command in ("train", "data"):
        where = " with hydra.run.dir=RUN_DIR of the run" if command == "train" else ""
        return no_flag(name, f"type the same line again{where}: it goes on from where that stopped")
    if words := peer_words(bare, value or "..."):
        return no_flag(name, f"settings have no dashes: {words}")
    keys = _keys_like(bare)
    shown = f"{keys[0] if keys else 'key'}={value or '...'}"
    more = "" if keys else "; `--cfg job` prints all keys"
    return no_flag(name, f"settings have no dashes: {shown}{more}")


def _keys_like(name: str) -> list[str]:
    """Returns the keys that a flag may have meant, the likeliest first."""
    keys = all_keys()
    same = [key for key in keys if name in (key, key.rpartition(".")[2])]
    if same:
        return sorted(same, key=lambda key: key.count("."))
    ends = {key.rpartition(".")[2]: key for key in reversed(keys)}
    return [ends[end] for end in get_close_matches(name, ends, n=1, cutoff=0.7)]


def show_mistake(error: ConfigError) -> int:
    """Prints all problems, and returns the exit code."""
    write_problems(str(error))
    return error.exit_code


def offer_whole_options(complete: Callable[[], None]) -> None:
    """Prints the options that Hydra's completion prints, without files that are parts of others."""
    out = io.StringIO()
    with redirect_stdout(out):
        complete()
    lines = out.getvalue().splitlines()
    words = [[word for word in line.split(" ") if not _PART.match(word)] for line in lines]
    write_out("\n".join(map(" ".join, words)))
