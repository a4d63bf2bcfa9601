"""Imports classes from a user's own package by import path ("my_package.models:MyConfig"), and reports errors in their
code with the last lines of its traceback, without Meshloom's and its libraries'.

Importing a module runs its code, so a module that a config names is checked by its location before any part of it is
imported: in the site-packages of the running Python, in an editable project, or on the list of `--allow-code-from` and
MESHLOOM_ALLOW_CODE_FROM. No config file can change that list. docs/security.md says what this protects against.
"""

import importlib
import json
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlparse

from .errors import ConfigError, Problem, use_one_of

_REGISTERING = set[tuple[str, str]]()  # groups of entry points, and their modules that were imported
NUM_FRAMES = 3  # of a user's traceback that are shown
OURS = Path(__file__).resolve().parents[2]
STDLIB = Path(sysconfig.get_paths()["stdlib"])
LIBRARIES = frozenset({  # of whose code a line says nothing to a user
    "brax", "chex", "diffrax", "einops", "equinox", "flax", "grain", "haiku", "haliax", "jax", "jaxlib", "jaxopt",
    "jaxtyping", "keras", "meshloom", "numpy", "numpyro", "optax", "orbax", "pydantic", "qwix", "tensorflow",
    "tf_keras",
})  # fmt: skip


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


T = TypeVar("T")

FLAG = "--allow-code-from"
VARIABLE = "MESHLOOM_ALLOW_CODE_FROM"
OUR_MODULES = ("meshloom", "hydra")  # this process already runs their code, wherever it was imported from

_ALLOWED: ContextVar[tuple[str, ...]] = ContextVar("allowed", default=())


def is_class_path(text: str) -> bool:
    """Returns True for text such as "my_package.module:Class"."""
    module, colon, name = text.partition(":")
    return bool(colon) and _is_module_name(module) and name.isidentifier()


def load_class(path: str, where: str, base: type[T]) -> type[T]:
    """Returns the class that `my_package.module:Class` names, in an installed package or a module that the user opted
    into.

    Raises ConfigError at `where` if there is no such class, it may not be imported, its import fails,
    or it does not derive from `base`: a declaration can name classes of the declared kinds and call nothing else.
    """
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
    loaded = getattr(module, name)
    if _derives(loaded, base):
        return loaded
    what = f"'{path}' is not a class that derives from {base.__name__}"
    raise ConfigError([Problem(where, what, f"derive it from {_public_name(base)}")])


def import_registering(group: str) -> bool:
    """Imports the modules that installed packages name by the entry points of a group, and those that the user opted
    into: they register what they have. Returns whether any is imported now. Raises ConfigError if one fails."""
    named = [each.value.partition(":")[0].strip() for each in metadata.entry_points(group=group)]
    modules = [name for name in dict.fromkeys([*named, *_ALLOWED.get()]) if (group, name) not in _REGISTERING]
    for name in modules:
        check_importable(name, group)
        with blamed_on_user(group, f"importing {name}", is_theirs=True):
            importlib.import_module(name)
        _REGISTERING.add((group, name))
    return bool(modules)


def _public_name(base: type) -> str:
    """Returns the shortest name that a class is imported by: meshloom.models.ModelConfig, not
    meshloom.models.config."""
    package, _, _ = base.__module__.rpartition(".")
    is_exported = getattr(sys.modules.get(package), base.__name__, None) is base
    return f"{package if is_exported else base.__module__}.{base.__name__}"


def _derives(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base) and value is not base


@contextmanager
def code_allowed_from(modules: Sequence[str]) -> Iterator[None]:
    """Allows these modules and all below them to be imported within the `with`; the working directory is searched
    last."""
    previous, here = _ALLOWED.set(tuple(modules)), os.getcwd()
    is_added = bool(modules) and here not in sys.path
    sys.path += [here] if is_added else []
    try:
        yield
    finally:
        _ALLOWED.reset(previous)
        if is_added:
            sys.path.remove(here)


def allow_words() -> list[str]:
    """Returns the command-line arguments that allow the code that this process allows."""
    return [f"{FLAG}={','.join(_ALLOWED.get())}"] if _ALLOWED.get() else []


def allowed_modules() -> tuple[str, ...]:
    """Returns the modules that the user opted into."""
    return _ALLOWED.get()


def parse_allowed(texts: Sequence[str], where: str) -> tuple[str, ...]:
    """Returns the names in the texts: ["my_code,tools.data"] -> ("my_code", "tools.data"). Raises ConfigError for text
    that does not name a module."""
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    wrong = [name for name in names if not _is_module_name(name)]
    fix = "give the module's name as in a config: my_code for my_code:Documents, not a file or a folder"
    if wrong:
        raise ConfigError([Problem(where, f"'{name}' is not the name of a module", fix) for name in wrong])
    return tuple(dict.fromkeys(names))


def check_importable(module: str, where: str) -> None:
    """Raises ConfigError at `where` if a config may not import the module. Imports nothing."""
    if not _is_module_name(module):
        fix = "write it as my_package.my_module; a program (__main__) is not imported"
        raise ConfigError([Problem(where, f"'{module}' is not the name of a module", fix)])
    top = module.partition(".")[0]
    if top in OUR_MODULES or any(f"{module}.".startswith(f"{name}.") for name in _ALLOWED.get()):
        return
    try:
        spec = find_spec(top)  # imports nothing
    except (ValueError, ImportError):  # a module that was created in memory
        spec = None
    if not (spec and all(_is_installed(place) for place in _places(spec))):
        raise ConfigError([_refusal(module, top, spec, where)])


def _refusal(module: str, top: str, spec: ModuleSpec | None, where: str) -> Problem:
    if top in sys.stdlib_module_names:
        what = f"'{module}' is a module of Python's standard library, which has no class of this kind"
        return Problem(where, what, "name a class of your own or of an installed package")
    spec = spec or PathFinder.find_spec(top, [os.getcwd()])
    if spec is None:
        what = f"there is no module '{top}', neither installed nor in the working directory"
        return Problem(where, what, "install its package, or start Meshloom in the directory that has it")
    place = next(place for place in _places(spec) if not _is_installed(place))
    seen = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
    what = f"'{module}' is not from an installed package ({seen}), and importing it would run its code"
    return Problem(where, what, f"if you trust that code, add {FLAG}={top} to the command line")


def _is_module_name(text: str) -> bool:
    parts = text.split(".")
    return all(part.isidentifier() for part in parts) and "__main__" not in parts


def _places(spec: ModuleSpec) -> list[Path]:
    """Returns the file of a module or package; all folders of a namespace package; nothing for a built-in module."""
    if spec.has_location and spec.origin:
        return [Path(spec.origin)]
    return [Path(place) for place in spec.submodule_search_locations or ()] or [Path(spec.origin or "built-in")]


def _is_installed(place: Path) -> bool:
    """Returns True for a place in site-packages, or in a project that is installed there as editable."""
    scheme = sysconfig.get_paths()
    folders = [scheme["purelib"], scheme["platlib"], *site.getsitepackages()]
    folders += [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    roots = [*map(Path, folders), *_editable_projects(tuple(dict.fromkeys(folders)))]
    return any(place.is_relative_to(root) or place.resolve().is_relative_to(root) for root in roots)


@cache
def _editable_projects(folders: tuple[str, ...]) -> list[Path]:
    """Returns projects of `pip install -e`, without Meshloom. Reads site-packages only: other folders could claim
    anything."""
    projects = []
    for installed in metadata.distributions(path=list(folders)):
        url = json.loads(installed.read_text("direct_url.json") or "{}")
        if url.get("dir_info", {}).get("editable") and installed.metadata["Name"] != OUR_MODULES[0]:
            projects.append(Path(unquote(urlparse(url["url"]).path)))
    return projects
