"""Places that a declaration names: folders and files of this machine, and URLs. `~` and `file://` are expanded once,
where a declaration is checked."""

import os
import re
from urllib.parse import unquote, urlsplit

CACHE_SCHEMES = ("gs", "s3", "az")  # of etils.epath, by which jax/_src/lru_cache.py opens its directory
CHECKPOINT_SCHEMES = ("gs", "s3")  # of TensorStore, which writes the arrays; it has no driver for others
PUBLISHED = "hf:"  # begins the place of a folder of published weights: hf:DIR
COPY_FOLDER = {"s3": "aws s3 sync tokens {}", "gs": "gcloud storage rsync -r tokens {}"}  # by scheme

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(text: str) -> bool:
    """Returns True for text such as gs://bucket/run; file:///home/u/run is a path."""
    return bool(_URL.match(text)) and not text.lower().startswith("file://")


class PlaceError(ValueError):
    """A place that cannot be used. what, fix: as of a Problem."""

    def __init__(self, what: str, fix: str):
        super().__init__(what)
        self.what, self.fix = what, fix


def expanded(text: str) -> str:
    """Returns a place with `~` and `file://` as the path that they mean; a URL stays as it is.

    Raises PlaceError where there is no such home directory, or `file://` names another host.
    """
    if is_url(text):
        return text
    if text.lower().startswith("file://"):
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            what = f"'{text}' names a file of the host '{parts.netloc}'"
            raise PlaceError(what, "write file:///PATH, with three slashes, for a path of this machine")
        text = unquote(parts.path)
    found = os.path.expanduser(text)
    if text.startswith("~") and found == text:
        what = f"'{text}' begins with a home directory that does not exist"
        raise PlaceError(what, "write the whole path, or ./~ for a folder of that name")
    return found


def local_path(text: str) -> str:
    """Returns a place as a path of this machine. Raises PlaceError for a URL, and for what `expanded` refuses."""
    if is_url(text):
        what = f"'{text}' is a URL, and this takes a path of this machine alone"
        raise PlaceError(what, "mount the bucket (gcsfuse, mountpoint-s3) or copy it here, and give that path")
    return expanded(text)


def cache_place(text: str) -> str:
    """Returns the place of JAX's compilation cache: a path, or a URL that JAX opens itself. Raises PlaceError."""
    return _of_schemes(text, CACHE_SCHEMES, f"JAX saves no compiled programs in '{text}'")


def checkpoint_place(text: str) -> str:
    """Returns a folder of checkpoints: a path, or a URL that TensorStore opens itself. Raises PlaceError."""
    return _of_schemes(text, CHECKPOINT_SCHEMES, f"checkpoints cannot be in '{text}'")


def weights_place(text: str) -> str:
    """Returns the place of weights: that of checkpoints, or hf:DIR, a folder of this machine. Raises PlaceError."""
    return f"{PUBLISHED}{local_path(text[len(PUBLISHED) :])}" if is_published(text) else checkpoint_place(text)


def is_published(text: str) -> bool:
    """Returns True for hf:DIR, the place of published weights."""
    return text.startswith(PUBLISHED)


def shards_place(text: str) -> str:
    """Returns a folder of token shards to read: a path, or a URL, without a slash at its end. Raises PlaceError."""
    return _of_schemes(text, (text.partition("://")[0],), "") if is_url(text) else expanded(text)


def written_shards_place(text: str) -> str:
    """Returns a folder of token shards to write. Raises PlaceError for a URL: unfinished shards grow, and are cut back
    where a killed command goes on."""
    if not is_url(text):
        return expanded(text)
    copy = COPY_FOLDER.get(text.partition("://")[0], "copy it to {}").format(text)
    what = f"'{text}' is a URL, and shards are written on a disk"
    raise PlaceError(what, f"write them into a folder, and then copy it there: shards.directory=tokens, then {copy}")


def _of_schemes(text: str, schemes: tuple[str, ...], what: str) -> str:
    """Returns a path, or a URL of one of the schemes, without a slash at its end."""
    if not is_url(text):
        return expanded(text)
    scheme, _, rest = text.partition("://")
    if scheme not in schemes:
        raise PlaceError(what, f"name a directory, or a URL of {', '.join(f'{known}://' for known in schemes)}")
    if not rest.strip("/"):
        raise PlaceError(f"'{text}' names no bucket", f"write {scheme}://BUCKET/FOLDER")
    return text.rstrip("/")
