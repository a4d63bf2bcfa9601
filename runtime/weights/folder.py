"""Opens the safetensors files of a folder of published weights, and finds the tensors of each parameter.

All damage is found here, from headers and sizes, and all that is missing, extra or of another shape: no tensor is read,
and nothing is allocated. A safetensors file is 8 bytes with the length of its header, the header in JSON, and the
tensors one after the other (https://github.com/huggingface/safetensors).
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshloom.compiler.core.errors import ConfigError, Problem, all_of, raise_if_any, use_one_of
from meshloom.compiler.core.format import counted
from meshloom.compiler.core.places import PUBLISHED
from meshloom.compiler.declare.gguf_file import AGAIN, GgufHeader, GgufTensor, gguf_values
from meshloom.compiler.declare.gguf_file import SUFFIX as GGUF
from meshloom.compiler.declare.published_folder import ADAPTER_TENSORS, CONFIG, PublishedFolder, understood
from meshloom.models import is_counted
from meshloom.models.adapter import is_adapter
from meshloom.models.published import NamedTensors, PublishedTensor
from meshloom.models.published.gguf import Turn, published_names

from ..checkpoint.restore_plan import MOST_SHOWN, listed
from ..core.files import parse_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# The types of floating-point weights, by their names in safetensors, and the bits of every type that it knows.
FLOATS = MappingProxyType({"BF16": np.dtype(jnp.bfloat16), "F16": np.dtype("float16"), "F32": np.dtype("float32")})
BITS = MappingProxyType(
    {
        "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
        "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64,
        "U64": 64,
    }
)  # fmt: skip
COMPARED_AT_ONCE = 2**24  # numbers
MOST_HEADER_BYTES = 100_000_000  # a limit of the safetensors library
SKIP, FROM = "checkpoint.weights_skip", "checkpoint.weights_from"


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a safetensors file. dtype: by its name there, such as BF16. start: its offset in the file, in
    bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}".replace(" ", "")

    def values(self) -> np.ndarray:
        """Returns the tensor as a view of the file: the system reads what is touched, and may drop it again."""
        if not self.num_bytes:
            return np.zeros(self.shape, FLOATS[self.dtype])
        mapped = np.memmap(self.file, np.uint8, "r", self.start, (self.num_bytes,))
        return np.asarray(mapped).view(FLOATS[self.dtype]).reshape(self.shape)


@dataclass(frozen=True)
class WeightsFolder(PublishedFolder):
    """A published folder with its tensors. Raises ConfigError with all damage that headers and sizes show. adapter: the
    folder of PEFT whose base this is; None without one."""

    adapter: Path | None = None

    @cached_property
    def tensors(self) -> Mapping[str, FileTensor]:
        """Returns the tensors of all files by name."""
        if self.gguf is not None:
            return MappingProxyType(_of_gguf(self.gguf, self.gguf_header))
        listed, problems = _listed(self.path), list[Problem]()
        tensors = dict[str, FileTensor]()
        for file in sorted({*listed.values()} or {SINGLE}):
            for name, tensor in _read_header(self.path / file, problems).items():
                if name in tensors:
                    what = f"holds {name}, which {tensors[name].file.name} holds too"
                    problems.append(Problem(str(self.path / file), what, f"{AGAIN}, the whole folder"))
                tensors[name] = tensor
        problems += _not_as_listed(self.path, listed, tensors, problems)
        raise_if_any(problems)
        return MappingProxyType(tensors)

    @cached_property
    def adapter_tensors(self) -> Mapping[str, FileTensor]:
        """Returns the tensors of the adapter by name."""
        if self.adapter is None:
            return {}
        problems = list[Problem]()
        found = _read_header(self.adapter / ADAPTER_TENSORS, problems)
        raise_if_any(problems)
        return MappingProxyType(found)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def open_folder(place: str | Path, base: str | None = None) -> WeightsFolder:
    """Returns the published folder at hf:DIR or a path; of an adapter of PEFT, that of its base. base: the place of the
    base; None: as the adapter says. Raises ConfigError with all that is wrong with it."""
    declared = Path(base.removeprefix(PUBLISHED)) if base else None
    there = PublishedFolder(Path(str(place).removeprefix(PUBLISHED)), declared)
    folder = WeightsFolder(there.path)
    if there.is_adapter:
        folder = WeightsFolder(there.base.path, adapter=there.path)
        all_of(lambda: folder.adapter_tensors, lambda: there.adapter_config)
    if not folder.path.is_dir() and folder.gguf is None:
        what = "this is a file" if folder.path.exists() else "there is no such folder"
        fix = f"name a folder that holds {CONFIG} and {SINGLE}; weights of a hub have to be downloaded first"
        raise ConfigError([Problem(str(folder.path), what, fix)])
    all_of(lambda: folder.config, lambda: folder.tensors)
    return folder


@dataclass(frozen=True)
class TurnedTensor(FileTensor):
    """A tensor of a GGUF file as the published one. turn: what brings its values into that layout."""

    of_file: GgufTensor
    turn: Turn = field(compare=False)

    def values(self) -> np.ndarray:
        """Returns the published values, in float32 where the file has another type than NumPy."""
        return self.turn(gguf_values(self.file, self.of_file))


def _of_gguf(file: Path, header: GgufHeader) -> dict[str, FileTensor]:
    """Returns the tensors of a GGUF file by their published names."""
    found = dict[str, FileTensor]()
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    for one in understood(lambda: list(published_names(header.said, shapes)), str(file)):
        there = header.tensors[one.name]
        if one.expert is not None:
            there = there.one_of_first(one.expert)
        dtype = there.dtype if there.dtype == "F16" else "F32"  # of what is read
        shape = there.shape[::-1] if one.turn is np.transpose else there.shape
        found[one.published] = TurnedTensor(file, dtype, shape, there.start, there.num_bytes, there, one.turn)
    return found


def _listed(path: Path) -> dict[str, str]:
    """Returns the file of each tensor by the index; empty where there is a single file without an index."""
    if not (path / INDEX).exists():
        if (path / SINGLE).exists():
            return {}
        raise ConfigError([Problem(str(path), *_no_weights(path))])
    try:
        found = parse_json((path / INDEX).read_bytes())["weight_map"]
        listed = {str(name): Path(str(file)).name for name, file in found.items()}
    except OSError as error:
        raise ConfigError([Problem(str(path / INDEX), f"cannot be read: {error.strerror}", AGAIN)]) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        what = "is not an index of safetensors files: it has no weight_map"
        raise ConfigError([Problem(str(path / INDEX), what, AGAIN)]) from None
    if not listed:
        raise ConfigError([Problem(str(path / INDEX), "lists no tensors", AGAIN)])
    if (path / SINGLE).exists() and SINGLE not in listed.values():
        what = f"holds {SINGLE}, and an index of other files: nothing says which are the weights"
        raise ConfigError([Problem(str(path), what, f"remove {SINGLE}, or {INDEX}")])
    missing = sorted(file for file in set(listed.values()) if not (path / file).is_file())
    raise_if_any(
        Problem(str(path / INDEX), f"names {file}, which is not in the folder", f"{AGAIN}: {file}") for file in missing
    )
    return listed


def _no_weights(path: Path) -> tuple[str, str]:
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if pickles:
        what = f"holds {pickles[0]}, a pickle, which may run any code when it is read; and no safetensors"
        return what, "write it as safetensors with the library that made it: model.save_pretrained(DIR)"
    if files := sorted(path.glob(f"*{GGUF}")):
        return f"has no {SINGLE} and no {INDEX}, but {files[0].name}", f"name the file: {PUBLISHED}{files[0]}"
    others = sorted(file.name for file in path.glob("*.safetensors"))
    there = f", but {others[0]}" if others else ""
    return f"has no {SINGLE} and no {INDEX}{there}", "name a folder as transformers writes it"


def _not_as_listed(
    path: Path, listed: Mapping[str, str], tensors: Mapping[str, FileTensor], before: list[Problem]
) -> Iterator[Problem]:
    """Yields what the index and the headers say differently, unless a header could not be read."""
    if not listed or before:
        return
    for name, file in listed.items():
        if name not in tensors or tensors[name].file.name != file:
            there = f"it is in {tensors[name].file.name}" if name in tensors else f"{file} does not hold it"
            yield Problem(str(path / INDEX), f"names {name} in {file}, and {there}", f"{AGAIN}, the whole folder")
    for name in tensors.keys() - listed.keys():
        what = f"does not list {name} of {tensors[name].file.name}"
        yield Problem(str(path / INDEX), what, f"{AGAIN}, the whole folder")


def _read_header(file: Path, problems: list[Problem]) -> dict[str, FileTensor]:
    """Returns the tensors of a file; none, and a problem, where its header is not right."""
    try:
        return _parsed(file)
    except OSError as error:
        problems.append(Problem(str(file), f"cannot be read: {error.strerror}", "check the file and your rights"))
    except _Broken as error:
        problems.append(Problem(str(file), str(error), error.fix))
    return {}


class _Broken(ValueError):
    def __init__(self, what: str, fix: str = AGAIN):
        super().__init__(what)
        self.fix = fix


def _parsed(file: Path) -> dict[str, FileTensor]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        if start == b"version ":
            raise _Broken("is a pointer of Git LFS, not the file itself", "run `git lfs pull` in its repository")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= MOST_HEADER_BYTES:
            raise _Broken("is not a safetensors file")
        if length > size - 8:
            raise _Broken(f"is truncated: its header has {length:,} bytes, and the file {size:,}")
        header = opened.read(length)
    try:
        entries = json.loads(header.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, _Broken):
            raise
        raise _Broken("is not a safetensors file: its header is not JSON") from None
    if not isinstance(entries, dict):
        raise _Broken("is not a safetensors file: its header is not a JSON object")
    entries.pop("__metadata__", None)
    tensors = {name: _tensor(file, name, entry, 8 + length) for name, entry in entries.items()}
    _check_places(tensors, 8 + length, size)
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Broken(f"names {twice} twice in its header")
    return seen


def _tensor(file: Path, name: str, entry: Any, first: int) -> FileTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(each) is int and each >= 0 for each in (*shape, begin, end)) or begin > end:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise _Broken(f"describes {name} in a form that safetensors does not have") from None
    if dtype not in BITS:
        raise _Broken(f"holds {name} of the unknown type '{dtype}'", use_one_of(dtype, FLOATS))
    if math.prod(shape) * BITS[dtype] != 8 * (end - begin):
        raise _Broken(f"gives {name}, {dtype} {list(shape)}, {end - begin:,} bytes")
    return FileTensor(file, dtype, shape, first + begin, end - begin)


def _check_places(tensors: Mapping[str, FileTensor], first: int, size: int) -> None:
    """Raises _Broken unless the tensors fill the file, one after the other."""
    at = first
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if tensor.start < at:
            raise _Broken(f"places {name} over another tensor")
        if tensor.start > at:
            raise _Broken(f"leaves {tensor.start - at:,} bytes before {name}, which no tensor has")
        at = tensor.start + tensor.num_bytes
    if size < at:
        raise _Broken(f"is truncated: its tensors take {at:,} bytes, and the file has {size:,}")
    if size > at:
        raise _Broken(f"has {size - at:,} bytes after its last tensor")


@dataclass(frozen=True)
class MatchedTensor:
    """A tensor of a file, and the slots that it fills, by their places among `tensor.slots`."""

    tensor: PublishedTensor
    file: FileTensor
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Matched:
    """taken: the tensors to read, in the order in which they lie in the files. fresh: the parameters that stay as they
    were drawn."""

    taken: tuple[MatchedTensor, ...]
    fresh: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(taken.file.num_bytes for taken in self.taken)


def match_folder(
    folder: WeightsFolder, named: NamedTensors, params: Iterable[str], skip: Sequence[str]
) -> Matched:  # fmt: skip
    """Returns what is read of a folder. Raises ConfigError with all differences from what is expected.

    named: the tensors that hold the model's parameters, and which others may be there. params: the paths of all
    parameters. skip: the patterns of `checkpoint.weights_skip`.
    """
    patterns, expected = Patterns(skip), named.tensors
    copies = [
        Problem(str(folder.path / folder.tensors[name].file.name), *_no_copy(name, of, may_differ=named.may_differ))
        for name, of in named.copies.items()
        if not patterns.take(name) and of in folder.tensors and not are_same(folder.tensors[name], folder.tensors[of])
    ]
    taken, lines, fixes = list[MatchedTensor](), list[str](), dict[str, None]()
    names = {tensor.name for tensor in expected}
    extra = [name for name in folder.tensors if name not in names]
    extra = [name for name in extra if not (patterns.take(name) or name in named.unread or name in named.copies)]
    fresh = {path for path in params if is_adapter(path) or is_counted(path)}
    for tensor in expected:
        left_out = patterns.take(tensor.name)
        skipped = [left_out | patterns.take(slot.path) for slot in tensor.slots]
        fresh |= {slot.path for slot, is_skipped in zip(tensor.slots, skipped, strict=True) if is_skipped}
        if all(skipped):
            continue
        there = folder.tensors.get(tensor.name)
        if there is None:
            lines.append(f"{tensor.name} {list(tensor.shape)} is missing{_nearest(tensor.name, extra, len(lines))}")
        elif there.shape != tensor.shape or there.dtype not in FLOATS:
            lines.append(f"{tensor.name} is {there} there, {list(tensor.shape)} of {', '.join(FLOATS)} here")
            fixes[_fix_of(tensor, there)] = None
        else:
            slots = tuple(n for n, is_skipped in enumerate(skipped) if not is_skipped)
            taken.append(MatchedTensor(tensor, there, slots))
    missing = sorted(names - folder.tensors.keys())
    fix = next(iter(fixes)) if len(fixes) == 1 and not missing and not extra else ""
    lines += [
        f"{name} {folder.tensors[name]} is there, not here{_nearest(name, missing, len(lines) + n)}"
        for n, name in enumerate(extra)
    ]
    all_of(
        lambda: raise_if_any(copies),
        lambda: _raise_differences(str(folder.path), lines, patterns, is_some=bool(taken), fix=fix),
    )
    taken.sort(key=lambda each: (each.file.file, each.file.start))
    return Matched(tuple(taken), tuple(sorted(fresh)))


def _fix_of(tensor: PublishedTensor, there: FileTensor) -> str:
    """Returns what to do about a tensor of another type, or a table of other rows; "" where it is another model's."""
    if there.shape == tensor.shape:
        return f"convert the file to float32: {there.dtype} is not read"
    is_table = {slot.path for slot in tensor.slots} <= {"embed/table_VE", "head/kernel_EV"}
    has_rows = is_table and there.shape[1:] == tensor.shape[1:] and there.dtype in FLOATS
    return f"take the rows that are there: model.vocab_size={there.shape[0]}" if has_rows else ""


def are_same(a: FileTensor, b: FileTensor) -> bool:
    """Returns whether two tensors have the same values. Reads them in blocks, up to the first difference."""
    if a.shape != b.shape or not {a.dtype, b.dtype} <= FLOATS.keys():
        return False
    x, y = (each.values().reshape(-1) for each in (a, b))
    blocks = (slice(first, first + COMPARED_AT_ONCE) for first in range(0, len(x), COMPARED_AT_ONCE))
    return all(np.array_equal(x[block].astype(np.float32), y[block].astype(np.float32)) for block in blocks)


def _no_copy(name: str, of: str, *, may_differ: bool) -> tuple[str, str]:
    """Returns what is wrong with a head that is not the table, and what to do."""
    what = f"{name} differs from {of}, and tie_word_embeddings says that they are one tensor"
    apart = "keep it apart: model.embeddings=separate; or " if may_differ else ""
    return what, f"{apart}leave it out: {SKIP}=[{name}]"


def match_saved(
    place: str, saved: Mapping[str, Any], params: Mapping[str, Any], skip: Sequence[str]
) -> tuple[str, ...]:
    """Returns the parameters that are read from a checkpoint. Raises ConfigError with all differences.

    saved, params: shapes by path, there and here. The parameters of an adapter are read if any are there.
    """
    patterns, lines = Patterns(skip), list[str]()
    wanted = [path for path in params if not patterns.take(path)]
    if not any(map(is_adapter, saved)):
        wanted = [path for path in wanted if not is_adapter(path)]
    wanted = [path for path in wanted if path in saved or not is_counted(path)]
    extra = [path for path in saved if path not in params and not patterns.take(path) and not is_counted(path)]
    missing = [path for path in wanted if path not in saved]
    for path in missing:
        lines.append(f"{path} {list(params[path].shape)} is missing{_nearest(path, extra, len(lines))}")
    for path in wanted:
        if path in saved and tuple(saved[path].shape) != tuple(params[path].shape):
            lines.append(f"{path} is {list(saved[path].shape)} there, {list(params[path].shape)} here")
    for path in extra:
        lines.append(f"{path} {list(saved[path].shape)} is there, not here{_nearest(path, missing, len(lines))}")
    _raise_differences(place, lines, patterns, is_some=bool(wanted))
    return tuple(wanted)


class Patterns:
    """The patterns of `checkpoint.weights_skip`, with a note of those that matched."""

    def __init__(self, patterns: Sequence[str]):
        self._patterns, self._used = patterns, set[str]()

    def take(self, name: str) -> bool:
        """Returns True for the name of a parameter or tensor that is left out."""
        found = [pattern for pattern in self._patterns if fnmatchcase(name, pattern)]
        self._used.update(found)
        return bool(found)

    def problems(self, place: str) -> list[Problem]:
        """Returns a problem for each pattern that matched nothing."""
        return [
            Problem(SKIP, f"'{pattern}' matches no parameter and no tensor of {place}", "correct it, or leave it out")
            for pattern in self._patterns
            if pattern not in self._used
        ]


def _nearest(name: str, among: Sequence[str], num_lines: int) -> str:
    """Returns the name that is most like another; only for lines that are shown, as a search takes long."""
    near = get_close_matches(name, among, n=1, cutoff=0.6) if num_lines < MOST_SHOWN else []
    return f"; the nearest is {near[0]}" if near else ""


def _raise_differences(
    place: str, lines: list[str], patterns: Patterns, *, is_some: bool, fix: str = ""
) -> None:  # fmt: skip
    """Raises ConfigError for what differs, for patterns that match nothing, and if nothing is left to read. fix: what
    to do about all that differs, where it is known."""
    problems = patterns.problems(place)
    if lines:
        number = counted(len(lines), "place")
        what = f"{place} holds other weights than the model takes, in {number}:{listed(lines)}"
        fix = fix or f"choose the model of these weights, or leave some out by patterns: {SKIP}=[head/*]"
        problems.append(Problem(FROM, what, fix))
    if not problems and not is_some:
        what = f"leaves out all weights of {place}"
        problems.append(Problem(SKIP, what, f"leave something to read, or set {FROM}=null"))
    raise_if_any(problems)
