"""Compiled programs, kept between starts by JAX's persistent cache. What was found in it is told by JAX's own events.

JAX writes an entry in place: a kill at that moment leaves a damaged one, which JAX then neither loads nor replaces. So
such entries are removed here.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import jax
from etils import epath  # with Orbax; JAX opens its cache by it, too
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from meshloom.compiler.core.places import is_url

DIRECTORY = "jax_compilation_cache_dir"
REQUEST, HIT = (f"/jax/compilation_cache/{event}" for event in ("compile_requests_use_cache", "cache_hits"))
FAILED = re.compile(r"Error (reading|writing) persistent compilation cache entry for '(.*?)': (.*)", re.S)


@dataclass
class CacheUse:
    """num_requests, num_hits: programs asked for, and found. warnings: lines for the user."""

    num_requests: int = 0
    num_hits: int = 0
    warnings: list[str] = field(default_factory=list)

    def describe(self, seconds: float) -> str:
        """Returns how the programs came to be, in a line."""
        if self.num_hits == 0:
            return f"compiled in {seconds:.1f} s"
        if self.num_hits == self.num_requests:
            return f"compiled before: loaded in {seconds:.1f} s"
        return f"compiled in {seconds:.1f} s, {self.num_hits} of {self.num_requests} programs before"


@contextmanager
def cached_compilation(directory: str | None) -> Iterator[CacheUse]:
    """Loads programs from `directory` within the `with`, and saves compiled ones there; None: nowhere.

    A directory that cannot be used, and an entry that cannot be read or written, is a warning.
    """
    use = CacheUse()

    def count(event: str, **_: str | int) -> None:
        use.num_requests += event == REQUEST
        use.num_hits += event == HIT

    place = _prepared(directory, use)
    if getattr(jax.config, DIRECTORY) != (place and str(place)):
        jax.config.update(DIRECTORY, place and str(place))
        reset_cache()  # JAX opens a cache once, and keeps to it
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.monitoring.register_event_listener(count)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield use
    finally:
        jax.monitoring.unregister_event_listener(count)
    for warning in caught:
        failed = FAILED.match(str(warning.message))
        if failed and place:
            use.warnings.append(_failure(place, *failed.groups()))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _prepared(directory: str | None, use: CacheUse) -> epath.Path | None:
    """Returns the directory, made if need be; one that may be read only is used for what it holds."""
    if directory is None:
        return None
    place = epath.Path(directory if is_url(directory) else Path(directory).absolute())
    try:
        place.mkdir(parents=True, exist_ok=True)
        next(place.iterdir(), None)
    except Exception as error:  # each kind of store behind a URL raises its own
        if not isinstance(error, OSError) and not is_url(directory):
            raise
        why = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
        use.warnings.append(f"{place} cannot be used as compilation_cache ({why}): compiling without it")
        return None
    return place


def _failure(place: epath.Path, action: str, program: str, reason: str) -> str:
    if action == "writing":
        return f"{program} cannot be saved in compilation_cache {place}: {reason}"
    for entry in place.glob(f"{program}-*"):  # one of them; JAX does not say which
        entry.unlink(missing_ok=True)
    return f"{program} was damaged in compilation_cache {place} and compiled again; the next start keeps it"
