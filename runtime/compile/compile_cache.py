"""Keeps compiled programs between starts, in `compilation_cache`.

    artifacts/DIGEST          artifacts by fingerprint (artifact.py), also of steps for devices that are not attached
    artifacts/DIGEST.aborted  why the compiler ended a process over this program
    artifacts/DIGEST.lock     held while a process compiles this program
    decisions/DIGEST.json     outcomes of searches (step_compiler.py)
    the rest                  JAX's persistent cache, for runs of one process

JAX's cache cannot read back programs for absent devices, and serves process 0 of several alone; artifacts do both. JAX
writes an entry in place, so a kill at that moment leaves a damaged one, which JAX then neither loads nor replaces. Such
entries are removed here.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import jax
from etils import epath  # with Orbax; JAX opens its cache by it, too
from filelock import FileLock
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from meshloom.compiler.core.errors import Problem
from meshloom.compiler.core.places import is_url
from meshloom.compiler.xla.programs import Fingerprint

from ..core.failures import RunFailed
from .abort_watchdog import read_abort_reason

DIRECTORY = "jax_compilation_cache_dir"
REQUEST, HIT = (f"/jax/compilation_cache/{event}" for event in ("compile_requests_use_cache", "cache_hits"))
FAILED = re.compile(r"Error (reading|writing) persistent compilation cache entry for '(.*?)': (.*)", re.S)


def store_of(cache: str | None, fingerprint: Fingerprint) -> Path | None:
    """Returns the folder in which programs of this fingerprint are saved between runs; None if they are not saved."""
    folder = cache_folder(cache)
    return folder and folder / "artifacts" / fingerprint.digest


def cache_folder(cache: str | None) -> Path | None:
    """Returns `compilation_cache` as a folder; None if it is null, or a URL, which only JAX's own cache can use."""
    return None if cache is None or is_url(cache) else Path(cache).absolute()


def unkept(cache: str | None) -> tuple[str, ...]:
    """Returns a warning if programs are to be saved behind a URL, which only a run of one process can do."""
    if cache is None or not is_url(cache):
        return ()
    return (f"programs are not saved in {cache}: a folder is needed, except to train in one process",)


@contextmanager
def one_compiles(store: Path | None) -> Iterator[None]:
    """Locks a stored program within the `with`, so that a second process waits and finds what the first has stored.

    The system releases the lock when a process dies. Nothing is locked in a store that cannot be written.
    """
    lock = None
    if store is not None:
        with suppress(OSError):
            store.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(store.with_name(f"{store.name}.lock"))
            lock.acquire()
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def check_did_not_abort(aborted: Path | None) -> None:
    """Raises RunFailed if this compiler has aborted on this program before: it would do so again."""
    if aborted and (why := read_abort_reason(aborted)):
        fix = f"other options or another version of it may do; remove {aborted} to let it try again"
        raise RunFailed(Problem("the compiler", f"aborted on this program before: {why}", fix), exit_code=1)


@dataclass
class CacheUse:
    """The use of JAX's cache, counted by its events. num_requests, num_hits: programs that were looked for, and found.
    warnings: lines for the user."""

    num_requests: int = 0
    num_hits: int = 0
    warnings: list[str] = field(default_factory=list)

    def describe(self, seconds: float) -> str:
        """Returns a line that says whether the programs were compiled or found."""
        if self.num_hits == 0:
            return f"compiled in {seconds:.1f} s"
        if self.num_hits == self.num_requests:
            return f"compiled before: loaded in {seconds:.1f} s"
        return f"compiled in {seconds:.1f} s, {self.num_hits} of {self.num_requests} programs before"


@contextmanager
def cached_compilation(directory: str | None) -> Iterator[CacheUse]:
    """Within the `with`, JAX loads programs from `directory` and saves compiled ones there; None: without a cache.

    A directory that cannot be used is a warning, and so is an entry that cannot be read or written.
    """
    use = CacheUse()

    def count(event: str, **_: str | int) -> None:
        use.num_requests += event == REQUEST
        use.num_hits += event == HIT

    place = _prepared(directory, use)
    if getattr(jax.config, DIRECTORY) != (place and str(place)):
        jax.config.update(DIRECTORY, place and str(place))
        reset_cache()  # JAX opens a cache only once
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
            action, program, reason = failed.groups()
            how = f"cannot be saved in compilation_cache {place}: {reason}"
            if action == "reading":
                how = f"was damaged in compilation_cache {place} and compiled again; the next start keeps it"
                for entry in place.glob(f"{program}-*"):  # JAX does not say which of them is damaged
                    entry.unlink(missing_ok=True)
            use.warnings.append(f"{program} {how}")
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _prepared(directory: str | None, use: CacheUse) -> epath.Path | None:
    """Returns the directory, created if necessary; a read-only one is used for what it holds."""
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
