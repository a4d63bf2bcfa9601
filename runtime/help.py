"""`meshloom COMMAND --help`: the config groups and their options, a line each."""

from pathlib import Path

from meshloom import conf
from meshloom.compiler.compose import Request, hydra_session
from meshloom.compiler.target_names import TARGET_PATTERNS

from .cli import COMMANDS

CONF = Path(str(conf.__file__)).parent


def show_help(command: str, request: Request) -> None:
    """Print the command's groups as Hydra finds them, each option with the first line of its file."""
    print(f"meshloom {command}: {COMMANDS[command]}\n")
    print(f"usage: meshloom {command} [group=option ...] [group.key=value ...] [Hydra's flags: -m, --cfg job, ...]\n")
    with hydra_session(request) as groups:
        chosen = _defaults()
    for group, options in groups.items():
        print(f"{group}=")
        names = TARGET_PATTERNS if group == "target" else options
        for name in names:
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
    lines = (line.strip() for line in (CONF / "config.yaml").read_text().splitlines())
    pairs = (line[2:].split("#")[0].split(":", 1) for line in lines if line.startswith("- ") and ":" in line)
    return {group.strip(): option.strip() for group, option in pairs}
