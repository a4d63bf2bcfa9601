"""Writes and reads artifacts: compiled programs in a directory, with the fingerprint that identifies them.

    fingerprint.json     devices, versions, compiler options, keys of the declaration, hashes of the lowered programs
    built.json           memory of the train step, seconds of the compile; or why it does not fit
    train.hlo.txt        the train step as the compiler scheduled it
    NAME.executable      each program that can be saved, as JAX serialises it
    manifest.json        sizes and SHA-256 of all of these

Loading an executable runs code: load only artifacts whose source you would trust with a program.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jax.sharding import Mesh

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.xla.aot import Built, OutOfMemory, ProgramMemory, load_program
from meshloom.compiler.xla.programs import PROGRAMS, Fingerprint, Programs, build, differences

from ..core.files import FILE as MANIFEST
from ..core.files import damage_in, parse_json, replace_json, write_manifest

SCHEMA_VERSION = 2
FOLDER = "artifact"
TEXT = "train.hlo.txt"
EXPECTED = ("fingerprint.json", "built.json")  # files of every artifact


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
