"""Exports weights: finds all that can be wrong first, then writes a folder file by file (write.py).

A checkpoint is read in pieces, with bounded memory and without devices. TensorStore reads whole chunks, and a chunk
holds all layers of what one device had. So a stack is read for as many layers at once as fit into `BLOCK_BYTES`, and a
larger one several times.
"""

import hashlib
import json
import math
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
import tensorstore
from orbax.checkpoint import v1 as ocp

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import counted, human_bytes
from meshloom.compiler.core.places import PUBLISHED, is_published, is_url
from meshloom.compiler.core.trees import leaves_by_path, nested_dict
from meshloom.compiler.declare.data_spec import TokenizerSpec
from meshloom.compiler.declare.published_folder import CONFIG, TOKENIZER_FILES, PublishedFolder, understood
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.declare.sections import EXPORT
from meshloom.models.contract import Params
from meshloom.models.family_configs import ModelConfig
from meshloom.models.published import PublishedTensor, tensors, tensors_in, write_config

from ..checkpoint.adapters import find_saved
from ..checkpoint.find import parse_place, saved_tree
from ..checkpoint.meaning import meaning_of, newest_meaning
from ..checkpoint.s3 import SCHEME, s3_kvstore
from ..core.failures import STORAGE, RunFailed, storage_reason
from ..core.files import FILE as MANIFEST
from ..core.files import LOCK, Folder, file_sha256, is_remote, locked, parse_json, replace_json
from ..data.progress import TextProgress
from .find import not_read
from .folder import FROM, INDEX, SINGLE, SKIP, WeightsFolder, match_folder, match_saved, open_folder
from .peft_folder import merged_folder
from .write import OutTensor, WriteFailed, shards_of, sync_folder, write_tensors

RECORD = "export.json"  # in the folder: where its weights are from, and the hashes of its files
UNFINISHED = ".unfinished"  # ends the name of a folder that is being written
LARGEST_FLOAT16 = float(np.finfo(np.float16).max)
MOST_RUNS = 100  # one after the other
BLOCK_BYTES = 2**30
NUM_BLOCKS = 4  # at once: a published tensor may be made of several parameters


class TensorSource(Protocol):
    """Parameters by their paths: their shapes in `arrays`, and their values in pieces."""

    arrays: dict[str, Any]

    def read(self, path: str, index: tuple[int, ...]) -> np.ndarray:
        """Returns a parameter without the leading dimensions that the index picks."""
        ...


class LoadedParams:
    """Parameters on devices, by their paths."""

    def __init__(self, params: Params):
        self.arrays = leaves_by_path(params)

    def read(self, path: str, index: tuple[int, ...]) -> np.ndarray:
        """Returns a parameter without the leading dimensions that the index picks."""
        return np.asarray(self.arrays[path][index])


@dataclass(frozen=True)
class ExportJob:
    """An export that passed all checks. content: what tells its weights apart from others. step: None for published
    files. tensors: in the order in which they are written. config: of the folder; {} for formats without one. beside:
    the files that are copied. said: by
    what else than its own declaration a checkpoint was opened."""

    spec: RunSpec
    place: str
    content: str
    step: int | None
    directory: Path
    dtype: np.dtype[Any]
    tensors: tuple[OutTensor, ...]
    config: dict[str, Any]
    beside: tuple[Path, ...]
    said: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def identity(self) -> dict[str, Any]:
        """Returns what two exports into one folder must have in common."""
        export = self.spec.export
        shapes = json.dumps([[tensor.name, tensor.shape] for tensor in self.tensors])
        return {
            "weights": self.place,
            "content": self.content,
            "step": self.step,
            "format": export.format,
            "dtype": str(self.dtype),
            "max_shard_bytes": export.max_shard_bytes,
            "tensors": hashlib.sha256(shapes.encode()).hexdigest(),
        }


def prepare_export(spec: RunSpec, open_merged: Callable[[RunSpec], Params]) -> ExportJob:
    """Finds the weights and plans the files; writes nothing. Raises ConfigError for all that is wrong with them.

    open_merged: loads the parameters of a run that trained an adapter, merged with its base.
    """
    place, export, said = spec.checkpoint.weights_from, spec.export, list[str]()
    if place is None:
        fix = "set it to RUN, RUN/checkpoints/STEP or hf:DIR"
        raise ConfigError([Problem(FROM, "names no weights to export", fix)])
    if export.directory is None:
        raise ConfigError([Problem(f"{EXPORT}.directory", "is missing", "name a new folder: directory=OUT")])
    directory = Path(export.directory).absolute()
    origin = _origin(place, spec.checkpoint.base_from)
    model_type = origin.model_type if origin else None
    known = origin and origin.dtype in ("bfloat16", "float16", "float32") and origin.dtype
    dtype = np.dtype(jnp.dtype(export.dtype or known or "bfloat16"))
    if is_published(place):
        folder = open_folder(place, spec.checkpoint.base_from)
        folder = merged_folder(folder, spec.model) if folder.adapter else folder
        made, left_out = _of_folder(folder, export.format, spec.model, dtype, spec.checkpoint.weights_skip)
        said, step = [*said, *left_out], None
        found = [
            [n, str(t), t.file.name, t.start, t.file.stat().st_mtime_ns] for n, t in sorted(folder.tensors.items())
        ]
        found += [[n, str(t), t.file.stat().st_mtime_ns] for n, t in sorted(folder.adapter_tensors.items())]
        content = hashlib.sha256(json.dumps(found).encode()).hexdigest()
        place = f"{PUBLISHED}{(folder.adapter or folder.path).absolute()}"
    else:
        merged = LoadedParams(open_merged(spec)) if spec.adapter is not None else None  # it starts devices first
        start = find_saved(place, FROM)
        said = meaning_of(start.path).differences(spec.as_written())
        step, place = start.step, str(start.path)
        made = _of_checkpoint(merged or SavedParams(start.path), place, export.format, spec.model, dtype, model_type)
        content = hashlib.sha256((start.path / MANIFEST).read_bytes()).hexdigest()
    base = dict(origin.known_config) if origin and origin.known_config else None
    config = {}
    if export.format == "huggingface":
        config = understood(
            lambda: write_config(spec.model, dtype=str(dtype), max_length=spec.sequence_length, base=base), "model"
        )
    beside = _beside(origin, spec.data.tokenizer)
    if config and origin and (left := origin.folders_left):
        said = [*said, f"not copied: the folders {', '.join(left)}"]
    return ExportJob(spec, place, content, step, directory, dtype, tuple(made), config, beside, tuple(said))


def _beside(origin: PublishedFolder | None, tokenizer: TokenizerSpec | None) -> tuple[Path, ...]:
    """Returns the files beside the weights: those where the weights began, and if there is no tokenizer among them
    those of the tokenizer that the data name."""
    kept = origin.others if origin else ()
    if (origin and origin.tokenizer) or tokenizer is None or tokenizer.kind == "bytes":
        return kept
    place = Path(tokenizer.path)
    beside = PublishedFolder(place if place.is_dir() else place.parent).tokenizer
    found = beside if place.is_dir() or place in beside else (place,) if place.is_file() else ()
    named = {file.name for file in found}
    return (*(file for file in kept if file.name not in named), *found)


def _of_folder(
    folder: WeightsFolder, form: str, model: ModelConfig, dtype: np.dtype[Any], skip: Sequence[str]
) -> tuple[list[OutTensor], tuple[str, ...]]:
    """Returns the tensors of a published folder, under the names that it should have, in another type or files; and
    lines about what is left out."""
    if form != "huggingface":
        what = f"{form} writes the parameters of a run, and {folder.path} is a published folder"
        raise ConfigError([Problem(f"{EXPORT}.format", what, "choose format=huggingface, or name a run")])
    named = understood(lambda: tensors_in(model, folder.tensors, folder.model_type), "model")
    if len(match_folder(folder, named, (), skip).taken) < len(named.tensors):
        what = "leaves out weights that the folder to write has to hold"
        raise ConfigError([Problem(SKIP, what, "name only what the model does not read")])
    made = [
        OutTensor(plain.name, plain.shape, dtype, _values(plain.name, folder.tensors[there.name].values, dtype))
        for plain, there in zip(tensors(model, folder.model_type), named.tensors, strict=True)
    ]
    return made, not_read(named.left_out)


def _of_checkpoint(
    saved: TensorSource, place: str, form: str, model: ModelConfig, dtype: np.dtype[Any], model_type: str | None
) -> list[OutTensor]:
    """Returns the tensors to make of a checkpoint's parameters. model_type: of the family to prefer."""
    match_saved(place, saved.arrays, leaves_by_path(model.build().abstract()), ())
    if form != "huggingface":
        return [_whole(path, saved, dtype) for path in saved.arrays]
    found: tuple[PublishedTensor, ...] = understood(lambda: tensors(model, model_type), "model")
    ordered = sorted(found, key=lambda tensor: (tensor.slots[0].path, tensor.slots[0].index))  # a stack is read once
    return [
        OutTensor(t.name, t.shape, dtype, _values(t.name, lambda t=t: published_values(t, saved), dtype))
        for t in ordered
    ]


def published_values(tensor: PublishedTensor, source: TensorSource) -> np.ndarray:
    """Returns the values of a published tensor, made of our parameters, in float32."""
    ours = tuple(source.read(slot.path, slot.index).astype(np.float32) for slot in tensor.slots)
    return np.asarray(tensor.to_published(ours))  # type: ignore[arg-type]  # as the contract says


def _whole(path: str, saved: TensorSource, dtype: np.dtype[Any]) -> OutTensor:
    """Returns a parameter as a tensor, which is read by its first dimension."""
    shape, name = tuple(saved.arrays[path].shape), path.replace("/", ".")

    def parts() -> Iterator[np.ndarray]:
        for index in [(n,) for n in range(shape[0])] if len(shape) > 1 else [()]:
            yield in_type(name, saved.read(path, index), dtype)

    return OutTensor(name, shape, dtype, parts)


def _values(name: str, read: Callable[[], np.ndarray], dtype: np.dtype[Any]) -> Callable[[], Iterator[np.ndarray]]:
    return lambda: iter([in_type(name, read(), dtype)])


def in_type(name: str, values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Returns values in another type. Raises ConfigError if they become infinite in it."""
    if dtype == np.float16 and values.size and float(np.max(np.abs(values.astype(np.float32)))) > LARGEST_FLOAT16:
        what = f"{name} has numbers above {LARGEST_FLOAT16:,.0f}, which are infinite in float16"
        raise ConfigError([Problem(f"{EXPORT}.dtype", what, "choose dtype=bfloat16 or dtype=float32")])
    return values.astype(dtype)


def run_export(job: ExportJob, console: Console) -> None:
    """Writes the folder, or goes on with one that a killed export left. Raises ConfigError if something else is there,
    RunFailed if the disk refuses."""
    for line in job.said:
        console.wrapped(line)
    if _is_done(job):
        console.line(f"nothing to do: {job.directory} holds these weights already")
        return
    unfinished = job.directory.with_name(job.directory.name + UNFINISHED)
    with _storage_failures(unfinished):
        unfinished.mkdir(parents=True, exist_ok=True)
        busy = Problem(str(unfinished), "another export is writing it", "wait for it, or choose another directory")
        with locked(unfinished, busy):
            _write(job, unfinished, console)
            (unfinished / LOCK).unlink(missing_ok=True)
            sync_folder(unfinished)
            unfinished.rename(job.directory)
            sync_folder(job.directory.parent)
    of = "" if job.step is None else f" of step {job.step:,}"
    size = f"{counted(len(job.tensors), 'tensor')}{of}, {human_bytes(job.num_bytes)} in {job.dtype}"
    console.line(f"exported {size}, read back as they were written: {job.directory}")
    if job.spec.export.format == "huggingface":
        named = [file.name for file in job.beside]
        has_tokenizer = any(name in TOKENIZER_FILES for name in named)
        console.wrapped(f"beside it: {', '.join(named) or 'nothing'}")
        if not has_tokenizer:
            console.wrapped("tokenizer: none: there are no such files where the weights began")
        console.command("serve it", ["vllm", "serve", str(job.directory)])


def _is_done(job: ExportJob) -> bool:
    """Returns True if the folder holds this export. Raises ConfigError if it holds anything else."""
    folder = job.directory
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    record = _record(folder)
    if record.get("of") == job.identity and all((folder / name).is_file() for name in record["files"]):
        return True
    what = "holds an export of other weights, or in another form" if record else "holds something else already"
    what = what if folder.is_dir() else "is a file"
    raise ConfigError([Problem(f"{EXPORT}.directory", f"{folder} {what}", "name a new folder: directory=OUT")])


def _record(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        record = parse_json((folder / RECORD).read_bytes())
        if isinstance(record, dict) and isinstance(record.get("files"), dict):
            return record
    return {}


def _write(job: ExportJob, folder: Path, console: Console) -> None:
    record = _record(folder)
    if record and record.get("of") != job.identity:
        what = "holds the unfinished export of other weights, or in another form"
        raise ConfigError([Problem(str(folder), what, "remove it, or name another folder: directory=OUT")])
    files: dict[str, str] = {
        name: sha for name, sha in record.get("files", {}).items() if _is_whole(folder / name, sha)
    }
    parts = shards_of(job.tensors, job.spec.export.max_shard_bytes)
    shards = {f"model-{n:05}-of-{len(parts):05}.safetensors": shard for n, shard in enumerate(parts, 1)}
    shards = {SINGLE: parts[0]} if len(parts) == 1 else shards
    sizes = {name: sum(tensor.num_bytes for tensor in shard) for name, shard in shards.items()}
    done = sum(size for name, size in sizes.items() if name in files)
    to_write, free = job.num_bytes - done, shutil.disk_usage(folder).free
    if to_write > free:
        what = f"{human_bytes(to_write)} are to be written, and {human_bytes(free)} are free on the disk of {folder}"
        raise ConfigError([Problem(f"{EXPORT}.directory", what, "free disk space, or choose another directory")])
    replace_json(folder / RECORD, {"of": job.identity, "files": files})
    if job.spec.export.format == "orbax":
        tree = nested_dict(
            {t.name.replace(".", "/"): np.concatenate(list(t.parts())).reshape(t.shape) for t in job.tensors}
        )
        shutil.rmtree(folder / "params", ignore_errors=True)
        ocp.save_pytree(str(folder / "params"), tree)
        return
    with TextProgress(console, "exporting", total=job.num_bytes, completed=done) as progress:
        for name, shard in shards.items():
            if name not in files:
                files[name] = write_tensors(folder / name, shard, progress.advance)
                replace_json(folder / RECORD, {"of": job.identity, "files": files})
    if len(shards) > 1:
        listed = {tensor.name: name for name, shard in shards.items() for tensor in shard}
        replace_json(folder / INDEX, {"metadata": {"total_size": job.num_bytes}, "weight_map": listed})
    if job.spec.export.format == "huggingface":
        for file in job.beside:
            if file.is_dir():
                shutil.copytree(file, folder / file.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(file, folder / file.name)
        replace_json(folder / CONFIG, job.config)
        open_folder(folder)


def _is_whole(file: Path, sha256: str) -> bool:
    try:
        return file_sha256(file) == sha256
    except OSError:
        return False


@contextmanager
def _storage_failures(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, WriteFailed) as error:
        what = f"the export could not be written: {storage_reason(error) or error}"
        fix = "free disk space, and type the same command again: it goes on with the files that are whole"
        raise RunFailed(Problem(str(folder), what, fix), STORAGE) from error


def _origin(place: str, base: str | None) -> PublishedFolder | None:
    """Returns the folder that the weights began from. base: the declared place of an adapter's base."""
    if base and is_published(place):
        return PublishedFolder(Path(place.removeprefix(PUBLISHED)), Path(base.removeprefix(PUBLISHED)))
    return published_origin(base or place)


def published_origin(place: str) -> PublishedFolder | None:
    """Returns the folder that the weights at a place began from; None if they were drawn, or nothing says so."""
    for _ in range(MOST_RUNS):
        if is_published(place):
            return PublishedFolder(Path(place.removeprefix(PUBLISHED)))
        directory, step = ("", None) if is_url(place) else parse_place(place)
        meaning = newest_meaning(str(directory), str(step) if step is not None else None) if directory else None
        before = meaning and meaning.origin
        if before is None or before == place:
            return None
        place = before
    return None


class SavedParams:
    """The parameters of a checkpoint, in float32 where it has master weights for them."""

    def __init__(self, path: Folder):
        tree = saved_tree(path)
        masters = leaves_by_path(tree.get("master", {}))
        self.arrays: dict[str, Any] = leaves_by_path(tree["params"]) | masters
        self._names = {
            path: f"{'master' if path in masters else 'params'}.{path.replace('/', '.')}" for path in self.arrays
        }
        self._base = _kvstore(path / "state")
        self._context = tensorstore.Context({"data_copy_concurrency": {"limit": 2}})
        self._blocks: OrderedDict[str, tuple[int, np.ndarray]] = OrderedDict()

    def read(self, path: str, index: tuple[int, ...]) -> np.ndarray:
        """Returns a parameter without the leading dimensions that the index picks."""
        if not index:
            return self._open(path).read().result()
        first, block = self._blocks.get(path, (0, np.empty(0)))
        if not first <= index[0] < first + len(block):
            self._blocks.pop(path, None)
            while len(self._blocks) >= NUM_BLOCKS:
                self._blocks.popitem(last=False)
            first, block = index[0], self._open(path)[index[0] : self._end(path, index[0])].read().result()
            self._blocks[path] = (first, block)
        self._blocks.move_to_end(path)
        return block[(index[0] - first, *index[1:])]

    def _end(self, path: str, first: int) -> int:
        """Returns the end of a block that begins at an index of the first dimension."""
        shape, dtype = self.arrays[path].shape, self.arrays[path].dtype
        num_bytes = math.prod(shape[1:]) * np.dtype(dtype).itemsize
        return min(shape[0], first + max(1, BLOCK_BYTES // max(num_bytes, 1)))

    def _open(self, path: str) -> Any:
        kvstore = {"driver": "ocdbt", "base": self._base, "path": f"{self._names[path]}/"}
        store = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True, open=True, context=self._context)
        return store.result()


def _kvstore(folder: Folder) -> Any:
    """Returns TensorStore's spec of a folder."""
    if str(folder).startswith(SCHEME):
        return s3_kvstore(f"{folder}/")
    return f"{folder}/" if is_remote(folder) else {"driver": "file", "path": f"{folder}/"}
