"""Puts batches on the devices: the rows of a global batch that this process reads, and the time of waiting for them.

The global batch does not depend on the number of processes. A process holds the rows of its devices. They need not be
adjacent, and other processes hold them too if a mesh axis that does not split the batch runs across processes.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from meshloom.compiler.sharding.batch import RowOrder
from meshloom.compiler.xla.programs import Programs

from ..data import BatchIterator, HostBatch
from .time_spent import Stopwatch


def rows_held(sharding: Sharding, num_rows: int, devices: Iterable[Any] | None = None) -> tuple[int, ...]:
    """Returns the rows of an array of `num_rows` that these devices hold, in order. Default: this process's devices."""
    held = sharding.addressable_devices if devices is None else set(devices)
    slices = [index[0] for device, index in sharding.devices_indices_map((num_rows,)).items() if device in held]
    return tuple(sorted({row for part in slices for row in range(*part.indices(num_rows))}))


def local_rows(batch: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[int, ...]:
    """Returns the rows of the batch that are on this process's devices."""
    first: Any = next(iter(batch.values()))
    of_rows = jax.sharding.PartitionSpec(*first.sharding.spec[:1])
    return rows_held(jax.sharding.NamedSharding(first.sharding.mesh, of_rows), first.shape[0])


def sequences_of(order: RowOrder, rows: Sequence[int]) -> tuple[int, ...]:
    """Returns the numbers of the sequences that are in these rows of a batch on the devices (sharding/batch.py)."""
    return tuple(map(int, order.rows_at(np.asarray(rows, int))))


def in_token_order(local: Mapping[str, np.ndarray], order: np.ndarray | None) -> Mapping[str, np.ndarray]:
    """Returns rows with their tokens in the order of devices that split sequences (sharding/batch.py)."""
    return local if order is None else {name: x[:, order] if x.ndim > 1 else x for name, x in local.items()}


def to_devices(
    batch: Mapping[str, jax.ShapeDtypeStruct], rows: Sequence[int], local: Mapping[str, np.ndarray]
) -> dict[str, jax.Array]:
    """Returns the global batch on the devices. local: its `rows`, in that order, which are those of `local_rows`."""
    shardings = {name: x.sharding for name, x in batch.items()}
    if jax.process_count() == 1:  # one call instead of one per device
        return jax.device_put({name: local[name] for name in batch}, shardings)

    def place(name: str, x: jax.ShapeDtypeStruct) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(x.shape[0])
            first = bisect_left(rows, start)
            return local[name][first : first + stop - start][:, *index[1:]]

        return jax.make_array_from_callback(x.shape, x.sharding, part)  # type: ignore[arg-type]

    return {name: place(name, x) for name, x in batch.items()}


class Feed:
    """Puts batches on the devices of a run's programs. order: of the tokens (`in_token_order`). watch: counts the time
    for which devices stood still."""

    def __init__(self, programs: Programs, batches: BatchIterator, order: np.ndarray | None, watch: Stopwatch):
        self._batch, self._batches, self._order, self._watch = programs.batch, batches, order, watch
        self._rows = local_rows(programs.batch)

    def next(self, behind: dict[str, jax.Array] | None) -> tuple[dict[str, jax.Array], float, float]:
        """Returns the next batch on the devices, the seconds that this took, and the seconds for which devices stood
        still: 0 if the previous step still runs, else at most the former. behind: the metrics of that step."""
        start = time.perf_counter()
        batch = self.place(next(self._batches))
        seconds = time.perf_counter() - start
        loss: Any = behind["loss"] if behind is not None else None
        if loss is not None and not loss.is_ready():
            return batch, seconds, 0.0
        self._watch.move(seconds, to="input")
        return batch, seconds, seconds

    def place(self, batch: HostBatch) -> dict[str, jax.Array]:
        """Returns this process's rows of a batch as part of the global one, on the devices."""
        return to_devices(self._batch, self._rows, in_token_order(batch, self._order))
