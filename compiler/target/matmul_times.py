"""Prices matmuls from measured times: by type, contracted size and elements of the result.

Between the measured sizes the logarithm of the time is linear in the logarithms of both; beyond them it grows at the
last rate, and a smaller matmul takes as long as the smallest. Where matmuls of three equal sizes alone were measured,
the FLOPs count.
"""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from ..core.float_types import PeakType, peak_name
from ..spec.measured_tables import MatmulTable

FAR = 2**24  # how much larger than the largest measured size the last point of a grid is


@dataclass(frozen=True)
class MatmulTimes:
    """The times of matmuls on a chip. load: by how much their arithmetic takes longer in a run than alone; to start
    takes as long as alone. slower: by how much both take longer, by a calibration."""

    table: MatmulTable = field(repr=False)
    load: float = 1.0
    slower: float = 1.0

    def knows(self, dtype: str) -> bool:
        """Returns True if matmuls of these operands were measured."""
        return _measured_type(dtype, self.table) in self.table.microseconds

    def seconds(self, dtype: str, flops: ArrayLike, num_results: ArrayLike) -> np.ndarray:
        """Returns the seconds of matmuls of a type. flops: of each; num_results: elements of each result."""
        measured = _measured_type(dtype, self.table)
        alone, start = self._alone(measured, flops, num_results), _start(self.table, measured)
        return self.slower * (alone + (self.load - 1) * np.maximum(alone - start, 0.0))

    def _alone(self, dtype: PeakType, flops: ArrayLike, num_results: ArrayLike) -> np.ndarray:
        if self.table.results is None:
            sizes, times = _cubes(self.table, dtype)
            return np.exp(np.interp(np.log(np.maximum(flops, 1.0)), sizes, times))
        logs = _grid(self.table, dtype)
        results = np.maximum(num_results, 1.0)
        depth = np.maximum(np.asarray(flops) / (2 * results), 1.0)
        (row, down), (column, right) = _between(logs.depths, np.log(depth)), _between(logs.results, np.log(results))
        low = (1 - right) * logs.seconds[row, column] + right * logs.seconds[row, column + 1]
        high = (1 - right) * logs.seconds[row + 1, column] + right * logs.seconds[row + 1, column + 1]
        return np.exp((1 - down) * low + down * high)


def _measured_type(dtype: str, table: MatmulTable) -> PeakType:
    """Returns the type that takes as long as this one: both halves of float32 do."""
    peak = peak_name(dtype)
    return "bfloat16" if peak == "float16" and peak not in table.microseconds else peak


@cache
def _start(table: MatmulTable, dtype: PeakType) -> float:
    """Returns the seconds of the smallest matmul besides what its FLOPs take at the best rate of all."""
    best = max(map(max, table.rates(dtype).values()))
    depth, row = next(iter(table.seconds(dtype).items()))
    return row[0] - 2 * depth * (table.results or (depth**2,))[0] / best


@dataclass(frozen=True)
class _Grid:
    """The logarithms of contracted sizes, of elements of results, and of the seconds of each of both."""

    depths: np.ndarray
    results: np.ndarray
    seconds: np.ndarray


@cache
def _cubes(table: MatmulTable, dtype: PeakType) -> tuple[np.ndarray, np.ndarray]:
    """Returns the logarithms of FLOPs and of their seconds."""
    rows = table.seconds(dtype)
    flops, seconds = _extended(2 * np.array(list(rows), float) ** 3, np.array(list(rows.values())))
    return np.log(flops), np.log(seconds[:, 0])


@cache
def _grid(table: MatmulTable, dtype: PeakType) -> _Grid:
    rows = table.seconds(dtype)
    depths, results, seconds = np.array(list(rows), float), np.array(table.results), np.array(list(rows.values()))
    depths, seconds = _extended(depths, seconds)
    results, seconds = _extended(results, seconds.T)
    return _Grid(np.log(depths), np.log(results), np.log(seconds.T))


def _extended(sizes: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns sizes and rows with one more, far away, at the rate between the last two."""
    slope = np.maximum(seconds[-1] - seconds[-2], 0.0) / (sizes[-1] - sizes[-2])
    last = seconds[-1] + slope * sizes[-1] * (FAR - 1)
    return np.append(sizes, sizes[-1] * FAR), np.vstack([seconds, last])


def _between(grid: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the place of the last point of a grid before each value, and how far it is to the next."""
    place = np.clip(np.searchsorted(grid, at, side="right") - 1, 0, len(grid) - 2)
    return place, np.clip((at - grid[place]) / (grid[place + 1] - grid[place]), 0.0, 1.0)
