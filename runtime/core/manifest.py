"""Lists the size and SHA-256 of each file of a folder, so that damage is found before anything is loaded.

Orbax does not check arrays: a flipped bit is loaded as another number. The manifest of a checkpoint is written into the
temporary directory of the save, before the rename that finishes it, so every finished checkpoint has one. Behind a URL
it lists only names and sizes: hashing would fetch everything again, and object stores check their content themselves.
"""

from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import NonNegativeInt, ValidationError

from meshloom.models.record import Record

from .files import Folder, file_sha256, file_sizes, is_remote, replace_json

FILE = "manifest.json"
WRITTEN_LAST = {"_CHECKPOINT_METADATA", "commit_success.txt"}  # by Orbax, after the manifest; no array needs them


VerifiedBy = Literal["content", "sizes"]


class FileEntry(Record):
    bytes: NonNegativeInt
    sha256: str | None  # None: unknown, because the file is behind a URL


class Manifest(Record):
    """The content of `manifest.json`. step: the steps done in a checkpoint; null for other folders. files: the entries
    by path in the folder."""

    version: Literal[2]
    step: NonNegativeInt | None
    files: dict[str, FileEntry]


def write_manifest(folder: Folder, *, step: int | None = None) -> None:
    """Writes the manifest of a folder that is complete. Reads each file once, if it is on a disk."""
    sizes = _sizes(folder)
    hashes = dict.fromkeys(sizes) if is_remote(folder) else _hashes(Path(folder), sizes)
    files = {name: FileEntry(bytes=size, sha256=hashes[name]) for name, size in sizes.items()}
    manifest = Manifest(version=2, step=step, files=files)
    if is_remote(folder):
        (folder / FILE).write_text(manifest.model_dump_json(indent=1) + "\n")  # a store shows whole files alone
    else:
        replace_json(Path(folder) / FILE, manifest.model_dump())


def damage_in(
    folder: Folder, *, expected: Collection[str], step: int | None = None, compare: VerifiedBy = "content"
) -> str | None:
    """Returns the first difference from what was saved, as a phrase; None if there is none.

    expected: files that every manifest of this kind of folder lists. step: the step that the folder should hold.
    compare: "content" reads every byte of each file; "sizes" compares sizes only, as is always done behind a URL.
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
    files, there = manifest.files, _sizes(folder)
    if missing := sorted(files.keys() - there.keys()):
        return f"{missing[0]} is missing"
    # Operating systems leave hidden files. A file that is not hidden was saved, and has lost its entry.
    is_hidden = {name: any(part.startswith(".") for part in PurePosixPath(name).parts) for name in there}
    unlisted = {name for name in there.keys() - files.keys() if not is_hidden[name]}
    if unlisted := sorted(unlisted | (set(expected) - files.keys())):
        return f"its {FILE} does not list {unlisted[0]}"
    for name, entry in files.items():
        if (num_bytes := there[name]) != entry.bytes:
            return f"{name} has {num_bytes:,} bytes, {entry.bytes:,} were saved"
    if compare == "sizes" or is_remote(folder):
        return None
    saved = {name: entry.sha256 for name, entry in files.items() if entry.sha256 is not None}
    now = _hashes(Path(folder), saved)
    first = next((name for name in saved if now[name] != saved[name]), None)
    return f"the content of {first} has changed" if first else None


def _sizes(folder: Folder) -> dict[str, int]:
    """Returns the sizes of the files that a manifest lists."""
    return {name: size for name, size in file_sizes(folder).items() if name not in {FILE, *WRITTEN_LAST}}


def _hashes(folder: Path, names: Iterable[str]) -> dict[str, str]:
    names = list(names)
    with ThreadPoolExecutor() as threads:
        return dict(zip(names, threads.map(file_sha256, [folder / name for name in names]), strict=True))
