"""From a command line to a run: Hydra's own grammar, checked before anything is written.

A single run is composed and checked first, then handed to Hydra, which makes the run directory. A sweep is checked
value by value, then runs each point in a process of its own: devices, compiler and signals belong to one run alone.
"""

import argparse
import os
from contextlib import suppress

from meshloom.compiler.core.errors import MISTAKE, ConfigError, Problem
from meshloom.compiler.declare.compose import check_config_files, read_spec
from meshloom.compiler.declare.environment import masked
from meshloom.compiler.declare.problems import MISTAKES, as_config_error
from meshloom.compiler.declare.user_code import FLAG, VARIABLE, code_allowed_from, parse_allowed

from .commands import Command
from .hydra_app import (
    do_nothing,
    offer_whole_options,
    parse_flags,
    request_of_flags,
    run_hydra_app,
    show_help,
    show_mistake,
)


def run_declared(command: Command, args: list[str]) -> int:
    """Runs a command that takes overrides. All of the user's mistakes are printed, and give exit code 2."""
    try:
        flags, problems = parse_flags(command.name, args)
        with code_allowed_from(_allowed(flags)):
            if problems:
                raise ConfigError([*problems, *_problems_beside(flags)])
            return _run(command, flags)
    except BrokenPipeError:  # no mistake: main.py ends the command
        raise
    except MISTAKES as error:
        return show_mistake(as_config_error(error))


def _allowed(flags: argparse.Namespace) -> tuple[str, ...]:
    """Modules that the user opted into; no config file has a say in it."""
    return (*parse_allowed(flags.allow_code_from, FLAG), *parse_allowed([os.environ.get(VARIABLE, "")], VARIABLE))


def _run(command: Command, flags: argparse.Namespace) -> int:
    request = request_of_flags(flags)
    if flags.help:
        show_help(command, request)
    elif flags.multirun or "hydra.mode=MULTIRUN" in request.overrides:
        from .sweep import run_sweep

        return run_sweep(command.name, request, flags)
    elif flags.cfg:
        read_spec(request, then=lambda spec: spec)
        try:
            with masked():  # --resolve is not a reason to show what came from the environment
                run_hydra_app(request, flags, task=do_nothing)
        except SystemExit:  # Hydra ends so where there is no such --package, and has said it
            return MISTAKE
    elif flags.info or flags.hydra_help:
        check_config_files(request)  # Hydra sets up logging as they say
        with suppress(SystemExit):  # Hydra ends so after its own help
            run_hydra_app(request, flags, task=do_nothing)
    elif flags.shell_completion:
        offer_whole_options(lambda: run_hydra_app(request, flags, task=do_nothing))
    else:
        return command.load()(request, flags)
    return 0


def _problems_beside(flags: argparse.Namespace) -> tuple[Problem, ...]:
    """Returns what is wrong with the overrides of a line whose flags are wrong."""
    try:
        read_spec(request_of_flags(flags), then=lambda spec: spec)
    except MISTAKES as error:
        return as_config_error(error).problems
    return ()
