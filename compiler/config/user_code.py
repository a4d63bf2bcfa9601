"""Classes from a user's own package, chosen by import path as Meshloom's are chosen by name.

    model: {family: decoder, ...}                         one of ours
    model: {family: "my_package.models:MyConfig", ...}    theirs: its fields become the keys of the node, as checked

Errors in a user's code are reported with the last lines of its traceback.
"""

import importlib
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

from pydantic import Field, create_model

from meshloom.models import ModelConfig
from meshloom.models.config import Config
from meshloom.models.registry import MODELS

from ..core.errors import ConfigError, Problem, use_one_of
from ..optim.contract import OptimizerConfig, ScheduleConfig
from ..optim.registry import OPTIMIZERS, SCHEDULES
from .allowed_code import check_importable
from .spec import RunSpec

T = TypeVar("T")
NUM_FRAMES = 3  # of a user's traceback that are shown
OURS = Path(__file__).resolve().parents[2]
STDLIB = Path(sysconfig.get_paths()["stdlib"])
LIBRARIES = frozenset({  # of whose code a line says nothing to a user
    "brax", "chex", "diffrax", "einops", "equinox", "flax", "grain", "haiku", "haliax", "jax", "jaxlib", "jaxopt",
    "jaxtyping", "keras", "meshloom", "numpy", "numpyro", "optax", "orbax", "pydantic", "qwix", "tensorflow",
    "tf_keras",
})  # fmt: skip


@dataclass(frozen=True)
class ExtensionPoint:
    """A node of the spec whose class the declaration names. key: the key that names it. base: its required base class.
    ours: the registered classes, each with its name as the only value of the key."""

    node: str
    key: str
    base: type[Config]
    ours: tuple[type[Config], ...]

    @property
    def where(self) -> str:
        return f"{self.node}.{self.key}"

    def field(self, *theirs: type[Config]) -> Any:
        """Returns the field's type: one of the registered classes and `theirs`, told apart by the key."""
        return Annotated[Union[*self.ours, *theirs], Field(discriminator=self.key)]


EXTENSION_POINTS = (
    ExtensionPoint("model", "family", ModelConfig, MODELS),
    ExtensionPoint("optimizer", "name", OptimizerConfig, OPTIMIZERS),
    ExtensionPoint("schedule", "kind", ScheduleConfig, SCHEDULES),
)
_FIELDS: dict[str, Any] = {point.node: (point.field(), ...) for point in EXTENSION_POINTS}

# The declaration of a run that names registered classes alone.
DeclaredRun: type[RunSpec] = create_model("DeclaredRun", __base__=RunSpec, __module__=__name__, **_FIELDS)


def spec_class(values: Mapping[str, Any]) -> tuple[type[RunSpec], list[Problem]]:
    """Returns DeclaredRun, extended with the users' classes that `values` name. A node whose class cannot be loaded is
    a problem, and is not checked."""
    nodes: dict[str, Any] = {}
    problems: list[Problem] = []
    for point in EXTENSION_POINTS:
        node = values.get(point.node)
        path = node.get(point.key) if isinstance(node, Mapping) else None
        if not isinstance(path, str) or ":" not in path:
            continue
        try:
            tag: dict[str, Any] = {point.key: (Literal[path], ...)}
            theirs = create_model(path, __base__=load_class(path, point.where, point.base), **tag)
        except ConfigError as error:
            problems += error.problems
            nodes[point.node] = (Any, ...)
            continue
        nodes[point.node] = (point.field(theirs), ...)
    return (create_model("DeclaredRun", __base__=DeclaredRun, **nodes) if nodes else DeclaredRun), problems


def load_class(path: str, where: str, base: type[T]) -> type[T]:
    """Returns the class that `my_package.module:Class` names, in an installed package or a module that the user opted
    into.

    Raises ConfigError at `where` if there is no such class, it may not be imported (allowed_code.py), its import fails,
    or it does not derive from `base`: a declaration can name classes of the declared kinds and call nothing else.
    """
    loaded = _load(path, where, base)
    if _derives(loaded, base):
        return loaded
    what = f"'{path}' is not a class that derives from {base.__name__}"
    raise ConfigError([Problem(where, what, f"derive it from {_public_name(base)}")])


def _public_name(base: type) -> str:
    """Returns the shortest name that a class is imported by: meshloom.models.ModelConfig, not
    meshloom.models.config."""
    package, _, _ = base.__module__.rpartition(".")
    is_exported = getattr(sys.modules.get(package), base.__name__, None) is base
    return f"{package if is_exported else base.__module__}.{base.__name__}"


def _derives(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base) and value is not base


def _load(path: str, where: str, base: type) -> Any:
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise ConfigError([Problem(where, f"'{path}' names no class", "write module:Class, as my_package.module:Name")])
    check_importable(module_name, where)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):  # theirs imports it
            raise ConfigError([problem_in_user_code(where, f"importing {module_name}", error)]) from error
        what, fix = f"there is no module '{error.name}'", "correct the name, or install the package that has it"
        raise ConfigError([Problem(where, what, fix)]) from error
    except (Exception, SystemExit) as error:
        raise ConfigError([problem_in_user_code(where, f"importing {module_name}", error)]) from error
    if not hasattr(module, name):
        classes = [key for key, value in vars(module).items() if _derives(value, base) and key[0] != "_"]
        fix = use_one_of(name, classes) if classes else f"define it there, derived from {_public_name(base)}"
        raise ConfigError([Problem(where, f"module '{module_name}' has no '{name}'", fix)])
    return getattr(module, name)


@contextmanager
def blamed_on_user(where: str, doing: str, *, is_theirs: bool) -> Iterator[None]:
    """Turns an exception from a user's code into a ConfigError at `where`; Meshloom's own exceptions pass.

    is_theirs: the running object was built from a user's class, so an exception without a frame of theirs counts too.
    """
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        if not is_theirs and not _their_frames(error):
            raise
        raise ConfigError([problem_in_user_code(where, doing, error)]) from error


def problem_in_user_code(where: str, doing: str, error: Exception | SystemExit) -> Problem:
    """Returns an exception as a sentence, with the last frames of the user's code, or else the last frame."""
    text = " ".join(str(error).split())
    frames = _their_frames(error)[-NUM_FRAMES:] or traceback.extract_tb(error.__traceback__)[-1:]
    lines = "".join(f"\n    {_short(f.filename)}:{f.lineno}: {f.line}" for f in frames if f.line)
    told = f"{doing} failed: {type(error).__name__}" + (f": {text}" if text else "")
    if isinstance(error, SystemExit):
        told = f"{doing} called sys.exit({text if error.code is not None else ''})"
    return Problem(where, told + lines, "correct it there")


def _their_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns the frames outside of Meshloom, Python and the libraries between them and the user's code."""
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
