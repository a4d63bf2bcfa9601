"""`meshloom COMMAND --help`: the config groups and their options, a line each."""

from pathlib import Path

import yaml

from meshloom import conf
from meshloom.compiler.compose import Request, hydra_session
from meshloom.compiler.target_names import patterns

from .cli import COMMANDS

CONF = Path(str(conf.__file__)).parent


def show_help(command: str, request: Request) -> None:
    """Print the command's groups as Hydra finds them, each option with the first line of its file."""
    print(f"meshloom {command}: {COMMANDS[command]}\n")
    print(f"usage: meshloom {command} [group=option ...] [group.key=value ...] [Hydra's flags: -m, --cfg job, ...]\n")
    chosen = _defaults()
    with hydra_session(request) as groups:
        for group, options in groups.items():
            print(f"{group}=")
            for name in patterns() if group == "target" else options:
                default = "  (default)" if chosen.get(group) == name else ""
                print(f"  {name:<16}{_description(group, name)}{default}".rstrip())
    print("\nvalues: `--cfg job` prints all keys with their values; any of them is set as key=value")


def _description(group: str, name: str) -> str:
    """The first comment of an option's file that is for people; empty for files of others."""
    file = CONF / group / f"{name}.yaml"
    if not file.exists():
        file = CONF / group / f"_{name.removesuffix('-N')}.yaml"
    if not file.exists():
        return ""
    comments = (line[1:].strip() for line in file.read_text().splitlines() if line.startswith("#"))
    return next((line for line in comments if not line.startswith("@package")), "")


def _defaults() -> dict[str, str]:
    entries = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    return {group: option for entry in entries if isinstance(entry, dict) for group, option in entry.items()}
