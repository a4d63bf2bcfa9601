"""Runs a command whose words are flags and overrides of Hydra, and checks them before anything is written.

A single run is composed and checked first, then handed to Hydra, which makes the run directory. A sweep is checked
value by value, then runs each point in a process of its own: devices, compiler and signals belong to one run alone.
"""

import argparse
import os
from contextlib import suppress

from meshloom.compiler.core.errors import MISTAKE, ConfigError, Problem
from meshloom.compiler.declare.application import run_application
from meshloom.compiler.declare.compose import check_config_files, read_spec
from meshloom.compiler.declare.environment import masked
from meshloom.compiler.declare.problems import MISTAKES, as_config_error
from meshloom.compiler.declare.user_code import FLAG, VARIABLE, code_allowed_from, parse_allowed

from .commands import Command
from .hydra_app import offer_whole_options, parse_flags, request_of_flags, show_help, show_mistake


def run_declared(command: Command, args: list[str]) -> int:
    """Runs a command that takes overrides. Returns the exit code: 2 for the user's mistakes, which are all printed."""
    try:
        flags, problems = parse_flags(command, args)
        with code_allowed_from(_allowed(flags)):
            if problems:
                raise ConfigError([*problems, *_problems_beside(flags)])
            return _run(command, flags)
    except BrokenPipeError:  # not a mistake: main.py ends the command
        raise
    except MISTAKES as error:
        return show_mistake(as_config_error(error))


def _allowed(flags: argparse.Namespace) -> tuple[str, ...]:
    """Returns the modules whose code the user allows; no config file can add one."""
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
    else:
        return command.load()(request, flags)
    return 0


def _problems_beside(flags: argparse.Namespace) -> tuple[Problem, ...]:
    """Returns the problems of the overrides of a line whose flags have problems."""
    try:
        read_spec(request_of_flags(flags), then=lambda spec: spec)
    except MISTAKES as error:
        return as_config_error(error).problems
    return ()
