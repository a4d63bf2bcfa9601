"""Downloads token shards behind a URL once into the cache of this machine.

Training draws sequences from all parts of a corpus, and a memory map needs a disk. A copy belongs to one URL and one
index: if the index at the URL changes, the shards are downloaded again. A file gets its name after the hash of its
shard was checked, and index.json comes last. So a copy with an index is complete, and an interrupted download continues
after its last complete shard.
"""

import hashlib
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import counted, human_bytes

from ..core.exclusive import in_turn
from ..core.files import blocks_of, replace_bytes
from .progress import TextProgress
from .shards import INDEX, Index, ShardFiles, parse_index

NUM_AT_ONCE = 8  # shards: one stream from an object store is slower than the network of a host
COPY_AGAIN = "copy the whole folder of shards there again"


def local_copy(url: str, where: str) -> Path:
    """Returns the folder with the shards of a URL, after downloading those that it lacks. Raises ConfigError if shards
    cannot be read, differ from the index, or do not fit on the disk."""
    try:
        content = b"".join(blocks_of(url, INDEX, where))
    except FileNotFoundError as error:
        fix = "name a folder that holds what `meshloom data` wrote, in a bucket that exists"
        raise ConfigError([Problem(where, f"'{url}' has no {INDEX}", fix)]) from error
    index = parse_index(content, f"{url}/{INDEX}", where)
    folder = cache_of_shards() / hashlib.sha256(url.encode() + b"\0" + content).hexdigest()[:24]
    if _is_whole(folder, index):
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with in_turn(folder, lambda: Console().line(f"waiting for another process, which downloads {url}")):
            if not _is_whole(folder, index):
                _download(url, folder, index, where)
                replace_bytes(folder / INDEX, content)
    except OSError as error:
        what = f"the shards of {url} cannot be kept in {folder}: {error.strerror or error}"
        raise ConfigError([Problem(where, what, _other_disk())]) from error
    return folder


def cache_of_shards() -> Path:
    """Returns the folder of all downloaded shards, beside the one of compiled programs."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache)).absolute() / "meshloom" / "shards"


def _is_there(folder: Path, sizes: dict[str, int]) -> bool:
    paths = {folder / name: size for name, size in sizes.items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


def _is_whole(folder: Path, index: Index) -> bool:
    return (folder / INDEX).is_file() and all(_is_there(folder, shard.sizes(index.dtype)) for shard in index.shards)


def _download(url: str, folder: Path, index: Index, where: str) -> None:
    """Downloads the shards that a folder lacks, several at once. The first problem ends all downloads."""
    missing = [shard for shard in index.shards if not _is_there(folder, shard.sizes(index.dtype))]
    num_bytes = sum(sum(shard.sizes(index.dtype).values()) for shard in missing)
    free_bytes = shutil.disk_usage(folder).free
    if num_bytes > free_bytes:
        free = f"{human_bytes(free_bytes)} are free on the disk of {folder}"
        what = f"{url} has {human_bytes(num_bytes)} to download, and {free}"
        raise ConfigError([Problem(where, what, _other_disk())])
    console = Console()
    of = f"{human_bytes(num_bytes)} in {counted(len(missing), 'shard')}"
    console.wrapped(f"downloading {of} from {url} into {folder}")
    with TextProgress(console, "downloading", total=num_bytes) as progress:
        download = _Download(url, folder, where, progress)
        with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            try:
                for _ in threads.map(lambda shard: download.fetch(shard, shard.sizes(index.dtype)), missing):
                    pass
            except BaseException:  # Ctrl-C, too
                download.is_ended.set()
                raise


class _Download:
    """The state that the threads of a download share. is_ended: set to end them before their next block."""

    def __init__(self, url: str, folder: Path, where: str, progress: TextProgress):
        self._url, self._folder, self._where, self._progress = url, folder, where, progress
        self._one_at_a_time = Lock()
        self.is_ended = Event()

    def fetch(self, shard: ShardFiles, sizes: dict[str, int]) -> None:
        """Downloads the files of a shard, which get their names if its hash is right."""
        digest, unfinished = hashlib.sha256(), {name: self._folder / f".{name}.unfinished" for name in sizes}
        try:
            for name, path in unfinished.items():
                self._fetch_file(name, path, sizes[name], digest.update)
            if self.is_ended.is_set():
                return
            if digest.hexdigest() != shard.sha256:
                named = " and ".join(sizes)
                what = f"the content of {named} in {self._url} is not what {INDEX} says"
                raise ConfigError([Problem(self._where, what, COPY_AGAIN)])
            for name, path in unfinished.items():
                path.replace(self._folder / name)
        finally:
            for path in unfinished.values():
                path.unlink(missing_ok=True)

    def _fetch_file(self, name: str, path: Path, size: int, add: Callable[[bytes], None]) -> None:
        num_bytes = 0
        with path.open("wb") as file:
            try:
                for block in blocks_of(self._url, name, self._where):
                    num_bytes += len(block)
                    if self.is_ended.is_set() or num_bytes > size:
                        break
                    file.write(block)
                    add(block)
                    with self._one_at_a_time:
                        self._progress.advance(len(block))
            except FileNotFoundError as error:
                raise ConfigError([Problem(self._where, f"{self._url}/{name} is missing", COPY_AGAIN)]) from error
            file.flush()
            os.fsync(file.fileno())
        if num_bytes != size and not self.is_ended.is_set():
            there = f"more than {size:,}" if num_bytes > size else f"{num_bytes:,}"
            what = f"{self._url}/{name} has {there} bytes; {INDEX} says {size:,}"
            raise ConfigError([Problem(self._where, what, COPY_AGAIN)])


def _other_disk() -> str:
    earlier = f"earlier downloads are in {cache_of_shards()}"
    return f"free disk space ({earlier}), or set XDG_CACHE_HOME to a folder of another disk"
