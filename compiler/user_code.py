"""Classes from a user's own package, chosen by import path where one of ours is chosen by name.

    model: {family: decoder, ...}                         one of ours
    model: {family: "my_package.models:MyConfig", ...}    theirs: its fields become the keys of the node, as checked

What goes wrong in their code is told with the last lines of their traceback.
"""

import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args

from pydantic import Field, create_model

from meshloom.models import ModelConfig
from meshloom.models.config import Config

from .optimizers import OptimizerConfig
from .problems import ConfigError, Problem, use_one_of
from .schedules import ScheduleConfig
from .spec import RunSpec

NUM_FRAMES = 3  # of a user's traceback that are shown
OURS = Path(__file__).resolve().parents[1]
STDLIB = Path(sysconfig.get_paths()["stdlib"])
LIBRARIES = {"flax", "grain", "jax", "jaxlib", "numpy", "optax", "pydantic"}


@dataclass(frozen=True)
class ExtensionPoint:
    """A node of the spec whose class may be a user's. key: the one that names it. base: what it must be a class of."""

    node: str
    key: str
    base: type[Config]

    @property
    def where(self) -> str:
        return f"{self.node}.{self.key}"


EXTENSION_POINTS = (
    ExtensionPoint("model", "family", ModelConfig),
    ExtensionPoint("optimizer", "name", OptimizerConfig),
    ExtensionPoint("schedule", "kind", ScheduleConfig),
)


def spec_class(values: Mapping[str, Any]) -> tuple[type[RunSpec], list[Problem]]:
    """RunSpec with the users' classes that `values` name beside ours. A node whose class cannot be had is a problem,
    and goes unchecked."""
    nodes: dict[str, Any] = {}
    problems: list[Problem] = []
    for point in EXTENSION_POINTS:
        node = values.get(point.node)
        path = node.get(point.key) if isinstance(node, Mapping) else None
        if not isinstance(path, str) or ":" not in path:
            continue
        try:
            tag: dict[str, Any] = {point.key: (Literal[path], ...)}
            theirs = create_model(path, __base__=_load_class(path, point), **tag)
        except ConfigError as error:
            problems += error.problems
            nodes[point.node] = (Any, ...)
            continue
        ours = get_args(RunSpec.model_fields[point.node].annotation)
        nodes[point.node] = (Annotated[Union[*ours, theirs], Field(discriminator=point.key)], ...)
    return (create_model("RunSpec", __base__=RunSpec, **nodes) if nodes else RunSpec), problems


def load_object(path: str, where: str) -> Any:
    """What `my_package.module:name` names, in an installed package or in the working directory.

    Raises ConfigError at `where` where there is none, or its import fails.
    """
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise ConfigError([Problem(where, f"'{path}' names no class", "write module:Class, as my_package.module:Name")])
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):  # theirs imports it
            raise ConfigError([problem_in_user_code(where, f"importing {module_name}", error)]) from error
        what = f"there is no module '{error.name}', neither installed nor in the working directory"
        raise ConfigError([Problem(where, what, "install its package, or start where it lies")]) from error
    except Exception as error:
        raise ConfigError([problem_in_user_code(where, f"importing {module_name}", error)]) from error
    if not hasattr(module, name):
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and key[0] != "_"]
        raise ConfigError([Problem(where, f"module '{module_name}' has no '{name}'", use_one_of(name, classes))])
    return getattr(module, name)


@contextmanager
def blamed_on_user(where: str, doing: str) -> Iterator[None]:
    """Turn an exception from a user's code into a ConfigError at `where`; one in which no frame is theirs passes."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if not _their_frames(error):
            raise
        raise ConfigError([problem_in_user_code(where, doing, error)]) from error


def problem_in_user_code(where: str, doing: str, error: Exception) -> Problem:
    """An exception in a sentence, with the last frames that are the user's."""
    text = " ".join(str(error).split())
    lines = "".join(f"\n    {_short(f.filename)}:{f.lineno}: {f.line}" for f in _their_frames(error)[-NUM_FRAMES:])
    told = f"{doing} failed: {type(error).__name__}" + (f": {text}" if text else "")
    return Problem(where, told + lines, "mend it there")


def _load_class(path: str, point: ExtensionPoint) -> type[Config]:
    loaded = load_object(path, point.where)
    if isinstance(loaded, type) and issubclass(loaded, point.base):
        return loaded
    base = f"{point.base.__module__}.{point.base.__qualname__}"
    raise ConfigError([Problem(point.where, f"'{path}' is no {point.base.__name__}", f"derive it from {base}")])


def _their_frames(error: Exception) -> list[traceback.FrameSummary]:
    """Frames outside of our code, of Python's own, and of the libraries that we or they call through."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if _is_theirs(Path(frame.filename))]


def _is_theirs(path: Path) -> bool:
    if str(path).startswith("<") or path.is_relative_to(OURS):
        return False
    if "site-packages" in path.parts:
        return path.parts[path.parts.index("site-packages") + 1] not in LIBRARIES
    return not path.is_relative_to(STDLIB)


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
