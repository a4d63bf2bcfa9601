"""Reads measured times of collectives of GPUs: conf/calibration/_collectives.yaml, or a table in a target of one's own.

all-gather:
  8: 28.2 31.1 47.1      microseconds for each of `bytes`: 8 GPUs behind one switch
  8/72: 29.4 32.8 48     8 of 72 GPUs behind it, all of which send at the same time, in groups of 8
  4x8: 62.1 84.3 99.6    4 nodes, 8 GPUs of each
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, Self, TypeVar

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from meshloom.models.config import Config, mistake

from ..core.config_types import Text
from ..core.errors import use_one_of
from ..core.float_types import PeakType
from ..core.format import counted
from ..core.traffic import PAIRS, CollectiveKind
from .figure_source import FigureSource
from .own_config import own_config

UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
MOST_FALL = 0.4  # measurements are noisy: a larger array may take less, but not so much less
MOST_OVER = 1.05  # the same of a rate above the physical one
LEAST_SHARE = 1e-3  # of the physical rate that large arrays and matmuls have at least: nanoseconds have less
LARGE = 64 * 2**20  # bytes of an array whose start hardly counts
NEEDED: tuple[CollectiveKind, ...] = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|)")
_GROUP = re.compile(r"(?:([1-9]\d*)x)?([1-9]\d*)(?:/([1-9]\d*))?")

NodeGroup = tuple[int, int]  # nodes, GPUs of each
KeyPath = tuple[str, ...]  # the keys that lead to a value


class MeasuredGroup(NamedTuple):
    """A group that was measured. at_once: the GPUs of its switch that sent at the same time; None: any number."""

    nodes: int
    near: int  # GPUs of each node
    at_once: int | None


def _sizes(value: Any) -> Any:
    """Returns the sizes of a line such as '64Ki 1Mi'."""
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list) else value
    found = [(_SIZE.fullmatch(word), word) for word in value.split()]
    if wrong := [word for match, word in found if match is None]:
        raise mistake(f"{wrong[0]} is not a size", "give sizes such as 64Ki, 1Mi and 2Gi, in bytes")
    return tuple(float(match[1]) * UNITS[match[2]] for match, _ in found if match)


def _numbers(value: Any) -> Any:
    """Returns the numbers of a line such as '28.2 31.1', or of one number."""
    if isinstance(value, int | float):
        return (value,)
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list) else value
    try:
        return tuple(float(word) for word in value.split())
    except ValueError as error:
        raise mistake(f"{value!r} is not a line of numbers", "give microseconds, separated by spaces") from error


def _in_seconds(row: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(each * 1e-6 for each in row)


Times = Annotated[tuple[PositiveFloat, ...], BeforeValidator(_numbers), Field(min_length=1)]
AscendingSizes = Annotated[tuple[PositiveFloat, ...], BeforeValidator(_sizes), Field(min_length=2)]


class CollectiveTable(Config):
    """Times of collectives alone, by kind, group and size.

    source: where they were measured. chip_bytes_per_second: the bandwidth of the links of one GPU there, one way; on a
    chip with other links rates follow theirs. bytes: of the array that is gathered or summed; of a device's own array
    for exchanges and permutes.
    """

    source: FigureSource
    chip_bytes_per_second: PositiveFloat
    bytes: AscendingSizes
    microseconds: dict[CollectiveKind, dict[Text, Times]]

    def __hash__(self) -> int:
        return hash((self.source, self.chip_bytes_per_second, self.bytes))

    def seconds(self, kind: CollectiveKind, at_once: int = 1) -> dict[NodeGroup, tuple[float, ...]]:
        """Returns the seconds of a kind for each size, by group; empty if it was not measured. A larger array takes no
        less: times that fall are noise, and are averaged. at_once: of groups that were measured with several numbers of
        GPUs at once behind a switch, those with the number nearest to this one."""
        rows, nearest = self.microseconds.get(kind, {}), self.nearest_at_once(kind, at_once)
        own = {group: row for name, row in rows.items() if (group := _group(name)).at_once == nearest}
        return {(group.nodes, group.near): _in_seconds(rising(row)) for group, row in own.items()}

    def nearest_at_once(self, kind: CollectiveKind, at_once: int) -> int | None:
        """Returns the measured number of GPUs at once that is nearest to this one; None where rows name none."""
        counts = sorted({group.at_once for group in map(_group, self.microseconds.get(kind, {})) if group.at_once})
        return min(counts, key=lambda count: abs(math.log(count / at_once)), default=None)

    def groups(self) -> Iterator[tuple[KeyPath, MeasuredGroup]]:
        """Yields the keys of each row, and its group."""
        for kind, rows in self.microseconds.items():
            for name in rows:
                yield ("microseconds", kind, name), _group(name)

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(self, self._problems())
        return self

    def _problems(self) -> Iterator[tuple[KeyPath, str, str]]:
        """Yields the first problem of each row, and of the rest."""
        if any(low >= high for low, high in pairwise(self.bytes)):
            yield ("bytes",), "the sizes do not ascend", "give each size once, the smallest first"
            return
        for kind, rows in self.microseconds.items():
            for name, row in rows.items():
                if problem := next(self._problems_of_row(kind, name, row), None):
                    yield ("microseconds", kind, name), *problem
            groups = [_group(name) for name in rows if _GROUP.fullmatch(name)]
            if len({group.at_once is None for group in groups}) > 1:
                what = "some groups name the GPUs that send at once, and some do not"
                yield ("microseconds", kind), what, "name them in each row of a kind, as 8/72, or in none"
        if missing := [kind for kind in NEEDED if not self.microseconds.get(kind)]:
            yield ("microseconds",), f"there are no times of {' and '.join(missing)}", "measure them too"

    def _problems_of_row(self, kind: CollectiveKind, name: str, row: Sequence[float]) -> Iterator[tuple[str, str]]:
        group = _group(name) if _GROUP.fullmatch(name) else None
        if group is None or (group.at_once and (group.nodes > 1 or group.at_once % group.near)):
            yield f"{name} is not a group", "name it by its GPUs, 8 or 8/72, or by nodes and GPUs of each, 4x8"
            return
        if len(row) != len(self.bytes):
            yield f"{len(row)} times for {len(self.bytes)} sizes", "give a time for each of `bytes`, in microseconds"
            return
        for (size, time), (larger, after) in pairwise(zip(self.bytes, row, strict=True)):
            if after < MOST_FALL * time:
                yield (
                    f"{larger:.4g} bytes take {after:g} us where {size:.4g} take {time:g}",
                    "check these two times: a larger array cannot take so much less",
                )
        risen = rising(row)
        if risen[-1] <= risen[-2]:
            what = "the largest size takes no longer than the one before"
            yield what, "measure both again: a larger array takes as long as their rate says"
        for size, time in zip(self.bytes, row, strict=True):
            rate = _least_bytes(kind, (group.nodes, group.near), size) / time * 1e6
            has = (
                f"{time:g} us for {size:.4g} bytes are {rate / 1e9:.4g} GB/s for each GPU, of which a link has "
                f"{self.chip_bytes_per_second / 1e9:.4g}"
            )
            if rate > MOST_OVER * self.chip_bytes_per_second:
                yield has, "give times in microseconds, and sizes of the whole array"
            if size >= LARGE and rate < LEAST_SHARE * self.chip_bytes_per_second:
                yield has, "give times in microseconds, and the bandwidth of one GPU"


def rising(row: Sequence[float]) -> tuple[float, ...]:
    """Returns the times that never fall and are nearest to these: those that fall have their geometric mean."""
    pools: list[tuple[float, int]] = []  # the mean logarithm, of how many
    for time in row:
        pools.append((math.log(time), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (high, first), (low, second) = pools[-2:]
            pools[-2:] = [((high * first + low * second) / (first + second), first + second)]
    return tuple(math.exp(mean) for mean, count in pools for _ in range(count))


def refuse(node: Config, problems: Iterable[tuple[KeyPath, str, str]]) -> None:
    """Raises an error for each problem of a node, all at once: its keys, what is wrong, and the fix."""
    if found := [InitErrorDetails(type=mistake(what, fix), loc=at, input=None) for at, what, fix in problems]:
        raise ValidationError.from_exception_data(type(node).__name__, found)


def _least_bytes(kind: CollectiveKind, group: NodeGroup, size: float) -> float:
    """Returns what a GPU has to receive over the slowest links of its group, by any algorithm."""
    nodes, near = group
    if kind in ("all-to-all", *PAIRS):
        others = (nodes - 1) / nodes if nodes > 1 else (near - 1) / near
        return size * (others if kind == "all-to-all" else 1.0)
    return size * ((nodes - 1) / nodes / near if nodes > 1 else (near - 1) / near)


def _group(name: str) -> MeasuredGroup:
    found = _GROUP.fullmatch(name)
    assert found is not None
    return MeasuredGroup(int(found[1] or 1), int(found[2]), int(found[3]) if found[3] else None)


class MatmulTable(Config):
    """Times of matmuls alone, by the type of their operands, the contracted size, and the elements of the result, of
    all matmuls of a batch together.

    source: where they were measured. results: None for matmuls of three equal sizes, of which each contracted size has
    one time.
    """

    source: FigureSource
    results: AscendingSizes | None
    microseconds: dict[PeakType, dict[PositiveInt, Times]]

    def __hash__(self) -> int:
        return hash((self.source, self.results))

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(self, self._problems())
        return self

    def _problems(self) -> Iterator[tuple[KeyPath, str, str]]:
        """Yields the first problem of each row, and of the rest."""
        if self.results and any(low >= high for low, high in pairwise(self.results)):
            yield ("results",), "the sizes do not ascend", "give each size once, the smallest first"
        for dtype, rows in self.microseconds.items():
            before: tuple[int, tuple[float, ...]] | None = None
            if len(rows) < 2:
                what = "there are fewer than two contracted sizes"
                yield ("microseconds", dtype), what, "give two rows or more"
            for depth, row in sorted(rows.items()):
                if problem := next(self._problems_of_row(depth, row, before), None):
                    yield ("microseconds", dtype, str(depth)), *problem
                before = depth, row

    def _problems_of_row(
        self, depth: int, row: tuple[float, ...], before: tuple[int, tuple[float, ...]] | None
    ) -> Iterator[tuple[str, str]]:
        """Yields the problems of the times of a contracted size. before: the smaller one and its times."""
        if len(row) != (wanted := len(self.results or (depth,))):
            of = "`results`" if self.results else "them"
            what = f"{len(row)} times for {counted(wanted, 'size')}"
            yield what, f"give a time for each of {of}, in microseconds"
            return
        of_results = [("the result before", *pair) for pair in pairwise(row)]
        depth_before, row_before = before or (0, ())
        of_depths = [(f"a contracted size of {depth_before}", *each) for each in zip(row_before, row, strict=False)]
        for smaller, time, after in (*of_results, *of_depths):
            if after < MOST_FALL * time:
                what = f"{after:g} us where {smaller} takes {time:g}"
                yield what, "check these two times: more FLOPs cannot take so much less"
        for smaller, time, after in (*of_results[-1:], *of_depths[-1:]):
            if after <= time:
                what = f"the largest result takes {after:g} us, no longer than {smaller} ({time:g})"
                yield what, "measure both again: more FLOPs take as long as their rate says"

    def rates(self, dtype: PeakType) -> dict[int, tuple[float, ...]]:
        """Returns the FLOP/s of a type for each size of the result, by contracted size."""
        return {
            depth: tuple(2 * depth * size / time for size, time in zip(self.results or (depth**2,), row, strict=True))
            for depth, row in self.seconds(dtype).items()
        }

    def seconds(self, dtype: PeakType) -> dict[int, tuple[float, ...]]:
        """Returns the seconds of a type for each size of the result, by contracted size."""
        return {depth: _in_seconds(row) for depth, row in sorted(self.microseconds[dtype].items())}


MeasuredTable = TypeVar("MeasuredTable", CollectiveTable, MatmulTable)


def _shipped(file: str, kind: type[MeasuredTable]) -> dict[str, MeasuredTable]:
    found = own_config(f"calibration/{file}")
    return {name: kind.model_validate(_with_text(table, kind)) for name, table in found.items()}


@cache
def shipped_collectives() -> Mapping[str, CollectiveTable]:
    """Returns the tables of conf/calibration/_collectives.yaml by name."""
    return _shipped("_collectives.yaml", CollectiveTable)


@cache
def shipped_matmuls() -> Mapping[str, MatmulTable]:
    """Returns the tables of conf/calibration/_matmuls.yaml by name."""
    return _shipped("_matmuls.yaml", MatmulTable)


def with_whole_keys(table: Any) -> Any:
    """Returns a table whose keys are whole numbers, as far as they are: JSON has them as text."""
    if not isinstance(table, Mapping):
        return table
    whole = (int(key) if isinstance(key, str) and key.isdigit() else key for key in table)
    return dict(zip(whole, map(with_whole_keys, table.values()), strict=True))


def _with_text(table: Any, kind: type[Config]) -> Any:
    """Returns a table of collectives whose groups are text, or one of matmuls whose sizes are numbers: YAML reads 8 as
    a number, and JSON has 512 as text."""
    rows = table.get("microseconds") if isinstance(table, dict) else None
    if not isinstance(rows, dict):
        return table
    if kind is not CollectiveTable:
        return {**table, "microseconds": with_whole_keys(rows)}
    named = {
        name: {str(group): row for group, row in groups.items()} if isinstance(groups, dict) else groups
        for name, groups in rows.items()
    }
    return {**table, "microseconds": named}


def _by_name(kind: type[MeasuredTable], shipped: Callable[[], Mapping[str, MeasuredTable]]) -> BeforeValidator:
    """Returns the validator of a table that a chip names or has itself."""

    def find(value: Any) -> Any:
        if not isinstance(value, str):
            return _with_text(value, kind)
        if (found := shipped().get(value)) is None:
            raise mistake(f"there is no table '{value}'", f"{use_one_of(value, list(shipped()))}, or give a table")
        return found

    return BeforeValidator(find)


NamedCollectives = Annotated[CollectiveTable, _by_name(CollectiveTable, shipped_collectives)]
NamedMatmuls = Annotated[MatmulTable | None, _by_name(MatmulTable, shipped_matmuls)]  # None: none were measured
