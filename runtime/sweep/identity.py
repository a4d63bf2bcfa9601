"""Identifies the sweep that a command asks for, so that the same command continues an unfinished one."""

import hashlib
import json
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from meshloom import __version__
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.hydra_settings import SEARCH_PATH, SWEEP_DIR
from meshloom.compiler.declare.overrides import overridden_key
from meshloom.compiler.declare.sweep_request import SweepRequest
from meshloom.compiler.declare.user_code import allow_words

from .read import Sweep, read_sweep
from .rows import SWEEP_FILE, SweepCommand

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "jax-cuda12-pjrt")
# These keys say how points are run and which are run again, not what the points are.
NOT_IN_IDENTITY = (SWEEP_DIR, "hydra.launcher", "hydra/launcher", "sweep", "distributed", "launch")


def versions() -> dict[str, str]:
    """Returns the versions that figures depend on."""
    found = {"meshloom": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def identity_of(command: SweepCommand, asked: SweepRequest) -> str:
    """Returns a hash of the command, overrides, versions, and contents of the user's configs of a sweep."""
    request = asked.request
    typed = [text for text in request.overrides if not _is_outside(overridden_key(text))]
    told = {
        "command": command,
        "overrides": typed,
        "axes": {key: list(values) for key, values in asked.axes.items()},
        "config": [request.config_name, request.config_path],
        "allowed": allow_words(),
        "first": asked.spec.as_compared() | {"sweep": None, "distributed": None, "launch": None},
        "files": dict(_users_files(asked)),
        "versions": versions(),
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def find_unfinished(pattern: str, identity: str) -> Sweep | None:
    """Returns the newest sweep of this identity in a directory that the pattern of `hydra.sweep.dir` may have named;
    None if there is none.

    pattern: such as "multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}"; an interpolation matches any text without a slash.
    """
    found = [sweep for sweep in _sweeps(as_glob(pattern)) if sweep.file.identity == identity]
    return found[0] if found else None


def as_glob(pattern: str) -> str:
    """Returns the pattern with `*` for each interpolation: "multirun/*/*". Without an interpolation it names a
    directory."""
    while (replaced := re.sub(r"\$\{[^${}]*\}", "*", pattern)) != pattern:
        pattern = replaced
    return pattern


def num_left(sweep: Sweep) -> int:
    """Returns how many points have no row yet."""
    return max(0, (sweep.file.num_points or 0) - len(sweep.rows))


def _sweeps(glob: str) -> Iterator[Sweep]:
    """Yields the sweeps in the directories that match, the newest first; damaged ones are left out."""
    root = Path(glob)
    base = Path(*(part for part in root.parts[: next(i for i, part in enumerate(root.parts) if "*" in part)]))
    places = base.glob(str(root.relative_to(base) / SWEEP_FILE)) if base.is_dir() else []
    for place in sorted(places, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            yield read_sweep(place.parent)
        except ConfigError:
            continue


def _is_outside(key: str) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in NOT_IN_IDENTITY)


def _users_files(asked: SweepRequest) -> Iterator[tuple[str, str]]:
    """Yields the path and a hash of each config of the user."""
    request = asked.request
    places = [request.config_path] if request.config_path else []
    for text in request.search_path:
        places += re.findall(r"file://([^,'\]]+)", text.removeprefix(f"{SEARCH_PATH}="))
    for place in places:
        for path in sorted(Path(place).rglob("*.yaml")):
            yield str(path), hashlib.sha256(path.read_bytes()).hexdigest()
