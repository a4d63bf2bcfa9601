"""Makes global batches: batch b of B sequences holds sequences b*B to b*B + B - 1 of an order that the seed fixes.

So the state of an iterator is the number of the next batch, the same for any number of processes and threads. A run
that resumes with batches of another size continues at the same sequence (`converted_state`). Grain shuffles, repeats,
mixes, and reads ahead in threads.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import grain
import numpy as np

from meshloom.compiler.core.errors import ConfigError, Problem

HostBatch = dict[str, np.ndarray]  # rows of a global batch, int32 (rows, length), by the names of batch_arrays
NEXT_BATCH = "next_batch"


def converted_state(state: Mapping[str, int], before: int, now: int) -> tuple[dict[str, int], int]:
    """Converts a state of batches of `before` sequences to batches of `now`. Returns it with the number of skipped
    sequences, those up to the next whole batch.

    {"next_batch": 5} of 12 in batches of 8 -> {"next_batch": 8}, 4
    """
    drawn = state[NEXT_BATCH] * before
    next_batch = -(-drawn // now)
    return {NEXT_BATCH: next_batch}, next_batch * now - drawn


class BatchIterator(Iterator[HostBatch]):
    """Batches in order. identity: the identity of the data, to be saved with the state. count: the number of all
    batches."""

    def __init__(self, batches: Any, identity: dict[str, Any], count: int):
        self._batches, self.identity, self._count = batches, identity, count

    def __next__(self) -> HostBatch:
        return next(self._batches)

    @property
    def num_left(self) -> int:
        """Returns the number of batches that are left."""
        return self._count - self.get_state()[NEXT_BATCH]

    def get_state(self) -> dict[str, int]:
        """Returns the place in the data, as JSON."""
        return {NEXT_BATCH: self._batches.get_state()["next_index"]}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Continues from a state of `get_state`."""
        self._batches.set_state({"next_index": state[NEXT_BATCH]})


class Batches:
    """The global batches of a split, or some rows of each. Each iterator starts at the first."""

    def __init__(self, source: "BatchSource", options: grain.ReadOptions, identity: dict[str, Any]):
        self._source, self._options, self._identity = source, options, identity

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> BatchIterator:
        batches = grain.MapDataset.source(self._source).to_iter_dataset(self._options)
        return BatchIterator(iter(batches), self._identity, len(self))

    def of_rows(self, rows: Sequence[int]) -> Self:
        """Returns the same batches with only these rows, in this order, as one process needs them."""
        return type(self)(self._source.of_rows(rows), self._options, self._identity)


class BatchSource:
    """Batches by number. sequences: sequences in their order, which may have no end."""

    def __init__(self, sequences: Any, batch_size: int, num_batches: int, *, rows: Sequence[int], vocab_size: int):
        self._sequences, self._batch_size, self._num_batches = sequences, batch_size, num_batches
        self._rows, self._vocab_size = tuple(rows), vocab_size

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, index: Any) -> HostBatch:
        first = int(index) * self._batch_size
        rows = [self._sequences[first + row] for row in self._rows]
        batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        largest = max(int(batch["inputs"].max()), int(batch["targets"].max()))
        if largest >= self._vocab_size:
            what = f"global batch {index} holds token {largest}; the model has tokens 0 to {self._vocab_size - 1}"
            fix = f"use model.vocab_size={largest + 1} or more, or other data"
            raise ConfigError([Problem("data.source", what, fix)])
        return batch

    def __repr__(self) -> str:  # Grain puts it in its errors
        return f"BatchSource({len(self)} x {len(self._rows)})"

    def of_rows(self, rows: Sequence[int]) -> "BatchSource":
        """Returns the same batches with some of their rows."""
        parts = self._sequences, self._batch_size, self._num_batches
        return BatchSource(*parts, rows=rows, vocab_size=self._vocab_size)


def shuffled(parts: Sequence[Any], weights: Sequence[float], *, seed: int, num_epochs: int | None) -> Any:
    """Returns an order of sequences as a `grain.MapDataset`.

    Each part is shuffled again in each epoch. Parts alternate so that each has its share of any stretch of the order,
    which ends when the first part is exhausted.
    """
    orders = [grain.MapDataset.source(part).seed(seed).shuffle().repeat(num_epochs) for part in parts]
    return orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, weights)
