"""Reads finished sequences from a class of the user, when a batch needs them."""

from typing import Any

import numpy as np

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.format import counted
from meshloom.compiler.declare.data_spec import DataSpec, PythonSource
from meshloom.models import PADDING_TARGET

from .packing import PADDING, PackedSequence
from .store import SPLITS, Split, in_split
from .user_code import UserItems, as_tokens, load_items


class UserSequences:
    """The user's items in a split. An item is an array of up to length + 1 tokens, or a dict of the batch's arrays."""

    fill = 1.0

    def __init__(self, items: UserItems, indices: np.ndarray, length: int, names: tuple[str, ...]):
        self._items, self._indices, self._length, self._names = items, indices, length, names

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> PackedSequence:
        index = int(self._indices[number])
        item = self._items[index]
        return self._arrays(index, item) if isinstance(item, dict) else self._tokens(index, item)

    def documents(self, number: int) -> tuple[int, ...]:
        """Returns the number of the user's item."""
        return (int(self._indices[number]),)

    def _tokens(self, index: int, item: Any) -> PackedSequence:
        tokens = as_tokens(item)
        if tokens is None or not 2 <= len(tokens) <= self._length + 1:
            has = f"is a {type(item).__name__}" if tokens is None else f"has {counted(len(tokens), 'token')}"
            fix = f"return 2 to {self._length + 1} token numbers (sequence_length and the one that follows), or a dict of {', '.join(self._names)}"  # fmt: skip  # noqa: E501
            raise ConfigError([self._items.problem(index, has, fix)])
        count = len(tokens) - 1
        row = {
            "inputs": _padded(tokens[:-1], self._length, PADDING),
            "targets": _padded(tokens[1:], self._length, PADDING_TARGET),
        }
        if "positions" in self._names:
            row["positions"] = _padded(np.arange(count), self._length, 0)
            row["segment_ids"] = _padded(np.ones(count), self._length, 0)
        return row

    def _arrays(self, index: int, item: dict[str, Any]) -> PackedSequence:
        fix = f"return int arrays of {self._length} numbers for {', '.join(self._names)}"
        if set(item) != set(self._names):
            raise ConfigError([self._items.problem(index, f"has the keys {', '.join(map(str, item))}", fix)])
        row = {}
        for name in self._names:
            array = np.asarray(item[name])
            if array.shape != (self._length,) or array.dtype.kind not in "iu":
                what = f"has '{name}' of shape {array.shape} and type {array.dtype}"
                raise ConfigError([self._items.problem(index, what, fix)])
            if array.min() < (PADDING_TARGET if name == "targets" else 0):
                raise ConfigError([self._items.problem(index, f"has {array.min()} in '{name}'", fix)])
            row[name] = array.astype(np.int32)
        if "segment_ids" in row:
            row["targets"] = np.where(row["segment_ids"] == 0, PADDING_TARGET, row["targets"])
        return row


def open_user_sequences(
    source: PythonSource, where: str, length: int, names: tuple[str, ...], data: DataSpec
) -> dict[Split, UserSequences]:
    """Returns both splits of the user's items, by the hashes of their numbers or by their numbers. Raises ConfigError
    for wrong user code."""
    items = load_items(source, where)
    if data.held_out_by == "document":
        is_held_out = in_split(_hashes_of_numbers(len(items)), "held_out", data.held_out_fraction)
    else:
        is_held_out = np.arange(len(items)) >= len(items) - int(data.held_out_fraction * len(items))
    return {
        split: UserSequences(items, np.flatnonzero(is_held_out == (split == "held_out")), length, names)
        for split in SPLITS
    }


def _hashes_of_numbers(count: int) -> np.ndarray:
    """Returns the uint64 hashes of 0, 1, 2, ... by the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _padded(values: np.ndarray, length: int, padding: int) -> np.ndarray:
    row = np.full(length, padding, np.int32)
    row[: len(values)] = values
    return row
