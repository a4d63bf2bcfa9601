"""The base of a user's data source."""

from abc import ABC, abstractmethod
from typing import Any


class DataSource(ABC):
    """Items that are read by number. docs/data.md says what an item is, docs/extend.md shows a source.

    A declaration may name classes that derive from this one, and nothing else: a name in a config file is not enough
    to call a function or to make an object of another kind.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of items."""

    @abstractmethod
    def __getitem__(self, index: int) -> Any:
        """Returns item number `index`, from 0 to len - 1; it may be called by several threads at once."""
