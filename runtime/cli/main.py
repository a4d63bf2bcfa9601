"""Runs the `meshloom` command. Nothing heavy is imported before the subcommand is known."""

import os
import signal
import sys
import traceback
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from meshloom.compiler.core.errors import MISTAKE, use_one_of
from meshloom.compiler.core.visible import write_error, write_out, write_problems

from ..core.failures import EXIT_CODES, hear_interrupts
from ..core.garbage import collect_seldom
from .commands import COMMANDS, Command

USAGE = """\
meshloom: a training run is declared, compiled ahead of time, and run.

usage: meshloom COMMAND [group=option ...] [group.key=value ...]
       meshloom inspect PROGRAM target=NAME
       meshloom diff RUN_A RUN_B [--json]
       meshloom sweep DIR [--csv FILE] [--open]
       meshloom runs [DIR]
       meshloom generate RUN|DIR prompt=TEXT
       meshloom evaluate RUN|DIR [data=...]
       meshloom export RUN directory=OUT

commands:
{commands}

examples:
  meshloom train                       a small model on what is attached, or on
                                       eight simulated devices
  meshloom train model=tiny sharding=fsdp_tensor     options of config groups
  meshloom train num_steps=50 optimizer.learning_rate=1e-3
  meshloom train -m sharding=ddp,fsdp  a run for each value; type it again after
                                       Ctrl-C, and it goes on
  meshloom explain -m model=llama3_8b target=v5p-128 global_batch_size=256 \\
    remat=none,minimal,full
  meshloom explain model=llama3_405b target=cpu-4096 global_batch_size=4096
  meshloom compile model=llama2_7b target=v5e-256 global_batch_size=256 \\
    sequence_length=4096 remat=full
  meshloom tune model=llama3_8b target=v5p-128 global_batch_size=256 \\
    sequence_length=8192
  meshloom launch model=llama3_8b target=h100-64 launch=slurm \\
    global_batch_size=64 launch.dry_run=true
  meshloom data data=jsonl data.source.paths=[corpus/*.jsonl] \\
    shards.directory=tokens

`meshloom COMMAND --help` lists the config groups, and `--cfg job` prints the
whole config. The flags of Hydra work: -m, --config-dir, --info, ...
For completion in bash: eval "$(meshloom train -sc install=bash)"

exit codes:
{exit_codes}
"""


def main() -> NoReturn:
    """Runs the console script."""
    collect_seldom()
    hear_interrupts()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # an ASCII terminal shows other letters as escapes
            stream.reconfigure(errors="backslashreplace")
    sys.excepthook = _show_crash
    try:
        exit_code = run(sys.argv[1:])
    except SystemExit as left:
        exit_code = _left(left)
    except ValueError as error:
        if not _is_jax_variable(error):
            raise
        said = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("JAX_"))
        what = f"environment: JAX cannot read one of its variables: {error}"
        write_problems(f"error: {what}\n  fix: correct or unset one of {', '.join(said)}")
        exit_code = MISTAKE
    except BrokenPipeError:  # the reader of our output has gone: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest when it ends
        exit_code = 1
    except KeyboardInterrupt as interrupt:  # before the run began, or the second one
        saved = "; nothing was saved since the last checkpoint" if sys.argv[1:2] == ["train"] else ""
        write_error(f"\ninterrupted{saved}")
        exit_code = 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    sys.exit(exit_code)


def _left(error: SystemExit) -> int:
    """Reports a sys.exit in code that a command ran, such as the user's. Returns the exit code, which is not 0: no
    command ends this way."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    if "rich" in Path(last.filename).parts:  # the reader of our output has gone: `| head`
        return 1
    what = f"{last.filename}:{last.lineno}: sys.exit({error.code!r}) ended the command: {last.line}"
    write_problems(f"error: {what}\n  fix: raise an exception there that says what is wrong")
    return MISTAKE


def _is_jax_variable(error: ValueError) -> bool:
    """Returns True for an error of JAX about one of its environment variables, which it reads at import."""
    frames = traceback.extract_tb(error.__traceback__)
    return Path(frames[-1].filename).parts[-3:] == ("jax", "_src", "config.py") and any(
        frame.line and frame.line.startswith(("import jax", "from jax")) for frame in frames
    )


def _show_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Writes a traceback with the values of environment variables masked, as in all output."""
    write_error("".join(traceback.format_exception(kind, error, trace)).rstrip())


def run(args: list[str]) -> int:
    """Runs one command line and returns the exit code: 0 for done, 2 for a mistake of the user, 128 + signal if
    stopped, or one of failures.py if a run had to end."""
    if not args or args[0] in ("-h", "--help", "help"):
        listed = "\n".join(f"  {command.name:11}{command.description}" for command in COMMANDS.values())
        codes = "\n".join(f"  {code:<5}{what}" for code, what in EXIT_CODES.items())
        write_out(USAGE.format(commands=listed, exit_codes=codes), end="")
        return 0
    if args[0] == "--version":
        from meshloom import __version__

        write_out(f"meshloom {__version__}")
        return 0
    if args[0] in ("-sc", "--shell-completion"):
        command = complete_command()
        return run_command(command, args) if command else 0
    name, *rest = args
    if name not in COMMANDS:
        write_problems(f"error: there is no command '{name}'\n  fix: {use_one_of(name, COMMANDS)}")
        return 2
    if "--version" in rest:
        return run(["--version"])
    return run_command(COMMANDS[name], rest)


def run_command(command: Command, args: list[str]) -> int:
    """Runs an existing command with the words after its name; returns the exit code."""
    if command.paths:
        from .words import run_words

        return run_words(command, args)
    from .app import run_declared

    return run_declared(command, args)


def complete_command() -> Command | None:
    """Completes `COMP_LINE` for the shell: offers the commands while one is being typed. Returns the command whose
    overrides are being typed, removed from the line, as Hydra completes overrides; None if there is none."""
    line = os.environ.get("COMP_LINE", "")
    words = line.split()
    if len(words) < 2 or (len(words) == 2 and not line.endswith(" ")):
        write_out(" ".join(COMMANDS))
        return None
    program, name = words[:2]
    command = COMMANDS.get(name)
    if command is None or command.paths:  # the shell itself completes directories
        return None
    rest = line[line.index(name, len(program)) + len(name) :]
    if command.opens_weights:  # Hydra completes overrides; the shell itself completes the folder
        *typed, last = rest.split(" ")
        rest = " ".join([*(word for word in typed if not word or "=" in word or word.startswith("-")), last])
    os.environ["COMP_LINE"] = program + rest
    return command
