"""The manifest of a folder of files: size and SHA-256 of each, so that damage is found before anything is loaded.

Orbax makes no checksums of arrays: one flipped bit comes back as another number. The manifest of a checkpoint is
written into the temporary directory of the save, before the rename that finishes it; so every finished checkpoint has
one.
"""

import hashlib
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, ValidationError

from meshloom.models.config import Record

from .files import replace_json

FILE = "manifest.json"
WRITTEN_LAST = {"_CHECKPOINT_METADATA", "commit_success.txt"}  # by Orbax, after the manifest; no array rests on them


Compared = Literal["content", "sizes"]


class FileEntry(Record):
    bytes: NonNegativeInt
    sha256: str


class Manifest(Record):
    """`manifest.json`. step: of a checkpoint, the steps done in it; null elsewhere. files: by path in the folder."""

    version: Literal[2]
    step: NonNegativeInt | None
    files: dict[str, FileEntry]


def write_manifest(folder: Path, *, step: int | None = None) -> None:
    """Writes the manifest of a folder whose files are all there. Reads each of them once."""
    names = list(_names(folder))
    with ThreadPoolExecutor() as threads:
        hashes = threads.map(_sha256, [folder / name for name in names])
    files = {
        name: FileEntry(bytes=(folder / name).stat().st_size, sha256=digest)
        for name, digest in zip(names, hashes, strict=True)
    }
    replace_json(folder / FILE, Manifest(version=2, step=step, files=files).model_dump())


def damage_in(
    folder: Path, *, expected: Collection[str], step: int | None = None, compare: Compared = "content"
) -> str | None:
    """Returns the first difference from what was saved, as a phrase; None if there is none.

    expected: files that every manifest of this kind of folder lists. step: that the folder is taken for. compare: of
    each file its content, which reads every byte, or its size alone.
    """
    if not folder.is_dir():
        return "it is a file, not a directory" if folder.exists() else "there is no such directory"
    try:
        manifest = Manifest.model_validate_json((folder / FILE).read_bytes())
    except FileNotFoundError:
        return f"it has no {FILE}: it was not saved to its end"
    except (ValidationError, IsADirectoryError):  # the text is not what write_manifest writes
        return f"its {FILE} is damaged"
    if manifest.step != step:
        return f"it was saved as step {manifest.step}"
    return _difference(folder, manifest.files, expected) or (
        _changed(folder, manifest.files) if compare == "content" else None
    )


def _difference(folder: Path, files: dict[str, FileEntry], expected: Collection[str]) -> str | None:
    there = set(_names(folder))
    if missing := sorted(files.keys() - there):
        return f"{missing[0]} is missing"
    # Operating systems leave hidden files; a file that is not hidden was saved, and has lost its entry.
    unlisted = [name for name in there - files.keys() if not any(part.startswith(".") for part in Path(name).parts)]
    if unlisted := sorted({*unlisted, *(set(expected) - files.keys())}):
        return f"its {FILE} does not list {unlisted[0]}"
    for name, entry in files.items():
        if (num_bytes := (folder / name).stat().st_size) != entry.bytes:
            return f"{name} has {num_bytes:,} bytes, {entry.bytes:,} were saved"
    return None


def _changed(folder: Path, files: dict[str, FileEntry]) -> str | None:
    with ThreadPoolExecutor() as threads:
        hashes = threads.map(_sha256, [folder / name for name in files])
    changed = (name for (name, entry), now in zip(files.items(), hashes, strict=True) if now != entry.sha256)
    first = next(changed, None)
    return f"the content of {first} has changed" if first else None


def _names(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in {FILE, *WRITTEN_LAST}:
            yield name


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
