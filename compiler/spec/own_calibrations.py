"""Finds the calibrations that `meshloom calibrate` keeps for a user, one for each chip.

    $XDG_CONFIG_HOME/meshloom/calibration/v5e.yaml      ~/.config, where the variable is not set

Commands that predict use them where `calibration` is `auto`. Runs do not: processes of several hosts have to make the
same choices.
"""

import os
from pathlib import Path

import yaml
from pydantic import ValidationError

from ..core.errors import ConfigError, Problem
from .calibration_spec import GROUP, Calibration
from .own_config import LOADER


def own_folder() -> Path:
    """Returns the folder that a user's calibrations are in, as a folder of configs; it need not be there. It is not
    absolute where a process has no home directory, such as in a container under an unknown user."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "meshloom"


def own_files() -> list[Path]:
    """Returns the files of all calibrations that the user keeps."""
    folder = own_folder()
    return sorted((folder / GROUP).glob("*.yaml")) if folder.is_absolute() else []


def own_calibration(chip: str) -> Calibration | None:
    """Returns the calibration that the user keeps for a chip; None if there is none. Its source says where it is.
    Raises ConfigError for a file that cannot be read."""
    file = next((each for each in own_files() if each.stem == chip), None)
    if file is None:
        return None
    found = read_calibration(file)
    if found.chip != chip:
        what = f"is of {found.chip}, and its name says {chip}"
        raise ConfigError([Problem(str(file), what, f"remove it, or name it {found.chip}.yaml")])
    where = f"{found.source or 'an unknown source'} (kept in {_short(file)}; calibration=none leaves it out)"
    return found.model_copy(update={"source": where})


def read_calibration(file: Path) -> Calibration:
    """Returns the calibration in a file. Raises ConfigError for anything else."""
    try:
        return Calibration.model_validate(yaml.load(file.read_text(encoding="utf-8"), LOADER))
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = f"{error.errors()[0]['msg']}" if isinstance(error, ValidationError) else str(error).splitlines()[0]
        what = f"is no calibration that can be read: {why}"
        fix = "remove it, or make it again by `meshloom calibrate`; calibration=none predicts without it"
        raise ConfigError([Problem(str(file), what, fix)]) from None


def _short(file: Path) -> str:
    """Returns a path with ~ for the home directory, which is no part of a report."""
    home = os.path.expanduser("~")
    return f"~/{file.relative_to(home)}" if file.is_relative_to(home) else str(file)
