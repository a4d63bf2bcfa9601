"""Writes and reads artifacts: compiled programs in a directory, with the fingerprint that identifies them.

    fingerprint.json     devices, versions, compiler options, keys of the declaration, hashes of the lowered programs
    built.json           memory of the train step, seconds of the compile; or why it does not fit
    train.hlo.txt        the train step as the compiler scheduled it
    train.pgle.pbtxt     the PGLE file by which it did, if it had one
    NAME.executable      each program that can be saved, as JAX serialises it
    manifest.json        sizes and SHA-256 of all of these

Loading an executable runs code: load only artifacts whose source you would trust with a program.

Compiled programs are kept between starts, in `compilation_cache`:

    artifacts/DIGEST          artifacts by fingerprint, also of steps for devices that are not attached
    artifacts/DIGEST.aborted  why the compiler ended a process over this program
    artifacts/DIGEST.lock     held while a process compiles this program
    decisions/DIGEST.json     outcomes of searches (step_compiler.py)
    the rest                  JAX's persistent cache, for runs of one process

JAX's cache cannot read back programs for absent devices, and serves process 0 of several alone; artifacts do both. JAX
writes an entry in place, so a kill at that moment leaves a damaged one, which JAX then neither loads nor replaces. Such
entries are removed here.
"""

import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import jax
from etils import epath  # with Orbax; JAX opens its cache by it, too
from filelock import FileLock
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.places import is_url
from meshloom.compiler.xla.aot import Built, OutOfMemory, ProgramMemory, load_program
from meshloom.compiler.xla.programs import PROGRAMS, Fingerprint, Programs, build, differences

from ..core.failures import RunFailed
from ..core.files import FILE as MANIFEST
from ..core.files import damage_in, parse_json, replace_json, write_manifest
from .abort_watchdog import read_abort_reason

SCHEMA_VERSION = 2
FOLDER = "artifact"
TEXT = "train.hlo.txt"
PGLE = "train.pgle.pbtxt"
EXPECTED = ("fingerprint.json", "built.json")  # files of every artifact
DIRECTORY = "jax_compilation_cache_dir"
REQUEST, HIT = (f"/jax/compilation_cache/{event}" for event in ("compile_requests_use_cache", "cache_hits"))
FAILED = re.compile(r"Error (reading|writing) persistent compilation cache entry for '(.*?)': (.*)", re.S)


@dataclass(frozen=True)
class Artifact:
    """A directory of compiled programs. overrides: the overrides of its compile, as typed."""

    place: Path
    fingerprint: Fingerprint
    built: Built
    overrides: tuple[str, ...]


def write_artifact(place: Path, fingerprint: Fingerprint, built: Built, overrides: tuple[str, ...]) -> Artifact:
    """Writes a directory so that it is complete or absent, and replaces an existing one."""
    place.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        umask = os.umask(0)
        os.umask(umask)
        unfinished.chmod(0o777 & ~umask)
        told = asdict(fingerprint) | {"digest": fingerprint.digest, "overrides": list(overrides)}
        replace_json(unfinished / "fingerprint.json", {"schema_version": SCHEMA_VERSION} | told)
        saved = ("memory", "out_of_memory", "not_serialised", "compile_seconds", "notes")
        fields = asdict(replace(built, executables={})).items()
        replace_json(unfinished / "built.json", {name: value for name, value in fields if name in saved})
        if built.text is not None:
            (unfinished / TEXT).write_text(built.text)
        if built.pgle is not None:
            (unfinished / PGLE).write_text(built.pgle)
        for name, executable in built.executables.items():
            (unfinished / f"{name}.executable").write_bytes(executable)
        write_manifest(unfinished)
        if place.exists():  # for a moment there is none
            shutil.rmtree(place)
        os.rename(unfinished, place)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Artifact(place, fingerprint, built, overrides)


def read_artifact(named: Path) -> Artifact:
    """Returns the artifact of a run directory, or of its own folder. Raises ConfigError if there is none or it is
    damaged."""
    place = next((p for p in (named, named / FOLDER) if (p / MANIFEST).is_file()), None)
    if place is None:
        what = f"there is no artifact in {named}"
        raise ConfigError([Problem("artifact", what, "name the run directory of a `meshloom compile` that fits")])
    if damage := damage_in(place, expected=EXPECTED):
        raise ConfigError([Problem("artifact", f"{place} is damaged: {damage}", "compile it again")])
    try:
        return _read(place)
    except (ValueError, LookupError, TypeError, AttributeError):
        what = f"{place} was written by another version of Meshloom"
        raise ConfigError([Problem("artifact", what, "compile it again")]) from None


def _read(place: Path) -> Artifact:
    """Returns the artifact of a complete folder. An exception means that another version wrote its files."""
    told = parse_json((place / "fingerprint.json").read_bytes())
    if told.pop("schema_version") != SCHEMA_VERSION:
        raise ValueError
    del told["digest"]
    overrides = tuple(told.pop("overrides"))
    made = parse_json((place / "built.json").read_bytes())
    files = {name: place / f"{name}.executable" for name in PROGRAMS}
    built = Built(
        text=(place / TEXT).read_text() if (place / TEXT).exists() else None,
        memory=made["memory"] and ProgramMemory(**made["memory"]),
        out_of_memory=made["out_of_memory"] and OutOfMemory(**made["out_of_memory"]),
        executables={name: path.read_bytes() for name, path in files.items() if path.exists()},
        not_serialised=made["not_serialised"],
        compile_seconds=made["compile_seconds"],
        notes=tuple(made["notes"]),
        pgle=(place / PGLE).read_text() if (place / PGLE).exists() else None,
    )
    return Artifact(place, Fingerprint(**told), built, overrides)


def find_artifact(fingerprint: Fingerprint, places: Iterable[Path]) -> Artifact | None:
    """Returns the first undamaged artifact of this fingerprint; None if there is none."""
    for place in places:
        try:
            artifact = read_artifact(place)
        except ConfigError:
            continue
        if artifact.fingerprint.digest == fingerprint.digest:
            return artifact
    return None


def check_artifact(artifact: Artifact, wanted: Fingerprint) -> None:
    """Raises ConfigError with all differences between an artifact and the program that is about to run."""
    compiled_by = " ".join(["meshloom compile", *artifact.overrides])
    fix = f"take the artifact's, or compile again: it is of `{compiled_by}`"
    if problems := differences(wanted, artifact.fingerprint, folder="the artifact", fix=fix):
        raise ConfigError(problems)
    if not artifact.built.executables:
        why = "; ".join(dict.fromkeys(artifact.built.not_serialised.values()))
        what = f"{artifact.place} has no program that could be saved: {why}"
        raise ConfigError([Problem("artifact", what, "leave artifact= out: the programs are compiled at the start")])


def load_programs(
    artifact: Artifact, lowered: Programs, mesh: Mesh, compile_: Callable[[Programs], Programs] = build
) -> Programs:
    """Returns the artifact's programs on these devices, and compiles those that it lacks."""
    executables = artifact.built.executables
    missing = replace(lowered, by_name={name: each for name, each in lowered.items() if name not in executables})
    rest = compile_(missing) if missing else missing
    loaded = {name: load_program(data, lowered[name], mesh) for name, data in executables.items()}
    return replace(rest, by_name={**rest, **loaded})


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
        return f"compiled in {seconds:.1f} s; {self.num_hits} of {self.num_requests} programs were compiled before"


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
