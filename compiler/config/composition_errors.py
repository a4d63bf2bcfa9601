"""Translates the exceptions of Hydra, OmegaConf and YAML into Problems."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from ..core.errors import ConfigError, Problem, use_one_of
from ..core.visible import visible_line
from . import target_names
from .override_parser import COMMAND_LINE, parsed_or_none, shortened


class ConfigGroups(dict[str, list[str]]):
    """The options of each config group. appended: users' groups for which the primary config has no default, so that
    Hydra requires `+` before a choice."""

    appended: frozenset[str] = frozenset()


MISTAKES = (ConfigError, HydraException, OmegaConfBaseException, OSError)  # what a user can fix
FOLLOWS = {"mesh": "sharding", "parallel": "overlap"}  # by conf/config.yaml, the option of the same name
LOOK = "see `meshloom train --help` and `--cfg job`"


@contextmanager
def reported(groups: ConfigGroups) -> Iterator[None]:
    """Turns any exception about a user's input into ConfigError.

    Hydra and its libraries raise far more than their own classes: RecursionError, ValueError, TypeError, KeyError.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError([composition_problem(error, groups)]) from error


def as_config_error(error: Exception) -> ConfigError:
    """Returns one of the MISTAKES as a ConfigError."""
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, OSError):
        fix = "free space there, give this process access to it, or choose another hydra.run.dir"
        if isinstance(error, FileExistsError | IsADirectoryError | NotADirectoryError):
            fix = "move the file that is there, or choose another hydra.run.dir"
        return ConfigError([Problem(str(error.filename or "disk"), error.strerror or str(error), fix)])
    return ConfigError([composition_problem(error, groups=ConfigGroups())])


def composition_problem(error: Exception, groups: ConfigGroups) -> Problem:
    """Returns an error of Hydra, OmegaConf or YAML as a Problem."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return Problem(f"{mark.name}:{mark.line + 1}", f"is not valid YAML: {error.problem}", "correct the file")
    if setting := re.match(r"Could not override '(hydra\.[^']+)'", str(error)):
        what = "there is no such setting of Hydra, or of the launcher or sweeper that is chosen"
        return Problem(setting[1], what, "`--cfg hydra` prints all that there are")
    if isinstance(error, RecursionError):
        what = "a value is nested too deeply, or the `defaults` lists of files form a cycle"
        return Problem("configs", what, "check the files that you chose last, and break the cycle")
    text = str(error) or str(error.__cause__ or type(error).__name__)
    if match := re.search(r"Error merging override (?P<override>.*)", text, re.S):
        return _merge_problem(match["override"], error.__cause__)
    if match := re.search(r"Could not delete from config. '(?P<key>[^']+)'", text):
        return Problem(match["key"], "does not exist, so it cannot be deleted", "leave the ~ override out")
    if match := re.search(r"Could not find '(?P<group>[^/']+)/(?P<option>[^']+)'", text):
        return _no_such_option(match["group"], match["option"], groups)
    key = re.search(r"full_key: (\S+)", text)
    if variable := re.search(r"Environment variable '([^']*)' not found", text):
        what = f"the environment variable {variable[1]} is not set"
        fix = f"export {variable[1]}=..., or give a default: ${{oc.env:{variable[1]},...}}"
        return Problem(key[1] if key else COMMAND_LINE, what, fix)
    return Problem(key[1] if key else COMMAND_LINE, shortened(text.partition("\n")[0], 300), LOOK)


def _merge_problem(override: str, cause: BaseException | None) -> Problem:
    parsed = parsed_or_none(override)
    why = shortened(str(cause).partition("\n")[0] or type(cause).__name__, 200)
    what = f"'{visible_line(shortened(override.lstrip('+')))}' cannot be set: {why}"
    fix = r"write \${ for text with ${ in it" if "${" in override else LOOK
    return Problem(parsed.key_or_group if parsed else COMMAND_LINE, what, fix)


def _no_such_option(group: str, option: str, groups: ConfigGroups) -> Problem:
    if group == "target":
        return target_names.problem_of(option, groups.get("target", []))
    if group not in groups:
        return Problem(group, "there is no such group", use_one_of(group, groups) if groups else LOOK)
    if option in groups.get(leader := FOLLOWS.get(group, ""), ()):
        what = f"{leader}={option} takes the {group} of its own name, and there is no {group}/{option}.yaml"
        fix = f"add {group}= with one of {', '.join(groups[group])}, or write {group}/{option}.yaml beside it"
        return Problem(group, what, fix)
    fix = f"choose {group}=...: {use_one_of(option, groups[group])}"
    return Problem(group, f"there is no '{option}' in this group", fix)
