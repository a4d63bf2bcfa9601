"""Finds the weights of each parameter at a place, and lists what is missing, extra or of another shape, before anything
is allocated."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from meshloom.compiler.core.errors import Problem, raise_if_any
from meshloom.compiler.core.format import counted
from meshloom.models.adapter import is_adapter
from meshloom.models.published import PublishedTensor

from ..checkpoint.differences import MOST_SHOWN, listed
from .folder import FLOATS, FileTensor, WeightsFolder

SKIP, FROM = "checkpoint.weights_skip", "checkpoint.weights_from"


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
    folder: WeightsFolder, expected: Sequence[PublishedTensor], params: Iterable[str], skip: Sequence[str],
    unused: Collection[str] = (),
) -> Matched:  # fmt: skip
    """Returns what is read of a folder. Raises ConfigError with all differences from what is expected.

    expected: the tensors that hold the model's parameters. params: the paths of all parameters. skip: the patterns of
    `checkpoint.weights_skip`. unused: the tensors of the folder that no parameter needs.
    """
    patterns = Patterns(skip)
    taken, lines = list[MatchedTensor](), list[str]()
    names = {tensor.name for tensor in expected}
    extra = [name for name in folder.tensors if name not in names]
    extra = [name for name in extra if name not in unused and not patterns.take(name)]
    fresh = {path for path in params if is_adapter(path)}
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
        else:
            slots = tuple(n for n, is_skipped in enumerate(skipped) if not is_skipped)
            taken.append(MatchedTensor(tensor, there, slots))
    missing = sorted(names - folder.tensors.keys())
    lines += [
        f"{name} {folder.tensors[name]} is there, not here{_nearest(name, missing, len(lines) + n)}"
        for n, name in enumerate(extra)
    ]
    _raise_differences(str(folder.path), lines, patterns, is_some=bool(taken))
    taken.sort(key=lambda each: (each.file.file, each.file.start))
    return Matched(tuple(taken), tuple(sorted(fresh)))


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
    extra = [path for path in saved if path not in params and not patterns.take(path)]
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


def _raise_differences(place: str, lines: list[str], patterns: Patterns, *, is_some: bool) -> None:
    """Raises ConfigError for what differs, for patterns that match nothing, and if nothing is left to read."""
    problems = patterns.problems(place)
    if lines:
        number = counted(len(lines), "place")
        what = f"{place} holds other weights than the model takes, in {number}:{listed(lines)}"
        fix = f"choose the model of these weights, or leave some out by patterns: {SKIP}=[head/*]"
        problems.append(Problem(FROM, what, fix))
    if not problems and not is_some:
        what = f"leaves out all weights of {place}"
        problems.append(Problem(SKIP, what, f"leave something to read, or set {FROM}=null"))
    raise_if_any(problems)
