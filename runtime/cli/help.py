"""`meshloom COMMAND --help`: the config groups and their options, a line each."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from hydra.plugins.config_source import ConfigSource

from meshloom.compiler.config.allowed_code import FLAG
from meshloom.compiler.config.compose import Request, chosen_options, config_sources, hydra_session
from meshloom.compiler.config.target_names import patterns
from meshloom.compiler.core.visible import write_out

from .commands import CHECK, Command


def show_help(command: Command, request: Request) -> None:
    """Prints the command's groups as Hydra finds them, a user's too, each option with the first line of its file."""
    write_out(f"meshloom {command.name}: {command.description}\n")
    write_out(
        f"usage: meshloom {command.name} [group=option ...] [group.key=value ...] [Hydra's flags: -m, --cfg job, ...]"
    )
    if command.name == "explain":
        write_out(f"       {CHECK}: exit code 3 if the step does not fit, by the estimate")
    write_out("")
    with hydra_session(request) as groups:
        chosen, sources = chosen_options(request), config_sources(request)
        for group, options in groups.items():
            write_out(f"{group}=")
            for name in patterns() if group == "target" else options:
                default = "  (default)" if chosen.get(group) == name else ""
                write_out(f"  {name:<16}{_description(sources, group, name)}{default}".rstrip())
    write_out("\nvalues: `--cfg job` prints all keys with their values; any of them is set as key=value")
    write_out(f"code of your own: {FLAG}=MODULE; a config cannot name modules that are not installed without it")


def _description(sources: Sequence[ConfigSource], group: str, name: str) -> str:
    """Returns the first comment for people in an option's file, or in the one that the sizes of a target are made
    from."""
    names = (name, f"_{name.removesuffix('-N')}") if group == "target" else (name,)
    texts = (_text(source, f"{group}/{each}.yaml") for each in names for source in sources)
    lines = next((text.splitlines() for text in texts if text is not None), [])
    comments = (line[1:].strip() for line in lines if line.startswith("#"))
    return next((line for line in comments if line and not line.startswith("@package")), "")


def _text(source: ConfigSource, name: str) -> str | None:
    """Returns a file of a place of configs; None if it does not have the file, or has no files."""
    if source.scheme() not in ("file", "pkg"):
        return None
    place = Path(source.path) if source.scheme() == "file" else files(source.path)
    file = place / name
    return file.read_bytes().decode(errors="replace") if file.is_file() else None
