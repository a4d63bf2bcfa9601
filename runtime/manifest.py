"""The manifest of a checkpoint: size and SHA-256 of each of its files, so that damage is found before it is loaded.

Orbax makes no checksums of arrays: one flipped bit comes back as another number. The manifest is written into the
temporary directory of a save, before the rename that finishes it; so every finished checkpoint has one.
"""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .files import replace_json

FILE = "manifest.json"
WRITTEN_LAST = {"_CHECKPOINT_METADATA", "commit_success.txt"}  # by Orbax, behind the manifest; no array rests on them


def write_manifest(checkpoint: Path) -> None:
    """Write the manifest of a checkpoint whose files are all there. Reads each of them once."""
    paths = list(_files(checkpoint))
    with ThreadPoolExecutor() as threads:
        hashes = threads.map(_sha256, paths)
    files = {
        path.relative_to(checkpoint).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, hashes, strict=True)
    }
    replace_json(checkpoint / FILE, files)


def damage_in(checkpoint: Path) -> str | None:
    """What is not as it was saved, the first of it in a phrase; None where nothing is."""
    try:
        files = {checkpoint / name: (entry["bytes"], entry["sha256"])
                 for name, entry in json.loads((checkpoint / FILE).read_bytes()).items()}  # fmt: skip
    except FileNotFoundError:
        return f"it has no {FILE}: it was not saved to its end"
    except (ValueError, KeyError, TypeError, AttributeError):  # the text is not what write_manifest wrote
        return f"its {FILE} is damaged"
    for path, (num_bytes, _) in files.items():
        name = path.relative_to(checkpoint)
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != num_bytes:
            return f"{name} has {path.stat().st_size:,} bytes, {num_bytes:,} were saved"
    with ThreadPoolExecutor() as threads:
        hashes = threads.map(_sha256, files)
    changed = (path for (path, (_, saved)), now in zip(files.items(), hashes, strict=True) if now != saved)
    first = next(changed, None)
    return f"the content of {first.relative_to(checkpoint)} has changed" if first else None


def _files(checkpoint: Path) -> Iterator[Path]:
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and str(path.relative_to(checkpoint)) not in {FILE, *WRITTEN_LAST}:
            yield path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
