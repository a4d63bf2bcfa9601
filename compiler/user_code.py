"""Classes from a user's own package, chosen by import path where one of ours is chosen by name.

    model: {family: decoder, ...}                         one of ours
    model: {family: "my_package.models:MyConfig", ...}    theirs: its fields become the keys of the node, as checked

What goes wrong in their code is told with the last lines of their traceback.
"""

import importlib
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
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
    """What `my_package.module:name` names. Raises ConfigError at `where` where there is none, or its import fails."""
    module_name, _, name = path.partition(":")
    try:
        with blamed_on_user(where, f"importing {module_name}"):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        fix = "install its package (pip install -e .), or add its folder to PYTHONPATH"
        raise ConfigError([Problem(where, f"there is no module '{error.name}'", fix)]) from None
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError([Problem(where, f"module '{module_name}' has no '{name}'", use_one_of(name, public))])
    return getattr(module, name)


@contextmanager
def blamed_on_user(where: str, doing: str) -> Iterator[None]:
    """Turn an exception from a user's code into a ConfigError at `where`, with the last frames that are theirs; one in
    which no frame is theirs passes."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        frames = _their_frames(error.__traceback__)
        if not frames:
            raise
        lines = "".join(f"\n    {frame.filename}:{frame.lineno}: {frame.line}" for frame in frames[-NUM_FRAMES:])
        what = f"{doing} failed: {type(error).__name__}: {error}{lines}"
        raise ConfigError([Problem(where, what, "mend the code there")]) from error


def _load_class(path: str, point: ExtensionPoint) -> type[Config]:
    loaded = load_object(path, point.where)
    if isinstance(loaded, type) and issubclass(loaded, point.base):
        return loaded
    base = f"{point.base.__module__}.{point.base.__qualname__}"
    raise ConfigError([Problem(point.where, f"'{path}' is no {point.base.__name__}", f"derive it from {base}")])


def _their_frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    """Frames outside of our code, the libraries that are installed, and Python's own."""
    frames = traceback.extract_tb(trace)
    return [frame for frame in frames if not _is_library(Path(frame.filename))]


def _is_library(path: Path) -> bool:
    return path.is_relative_to(OURS) or "site-packages" in path.parts or str(path).startswith("<") or _is_stdlib(path)


def _is_stdlib(path: Path) -> bool:
    return path.is_relative_to(Path(importlib.__file__).resolve().parents[1])
