"""A family of published models: two tables, one of the tensors in its files, and one of its config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..config import ModelConfig
from .config_table import Table, fits_of
from .contract import SOME, Mistake, Row


@dataclass(frozen=True)
class Family:
    """A family of published models.

    architecture, model_type: as config.json names it. rows: the table of tensors for one of our configs. table: of
    config.json. check: what else keeps a config from being written as this family. prefix: the beginning of names that
    some files leave out; before: what some files have before it. unused: patterns of names, after that, of tensors that
    some files hold and that no parameter needs; {num_layers} is ours.
    """

    architecture: str
    model_type: str
    rows: Callable[[Any], tuple[Row, ...]]
    table: Table
    check: Callable[[Any], tuple[Mistake, ...]] = lambda config: ()
    prefix: str = "model."
    before: str = ""
    unused: tuple[str, ...] = ()

    def differs(self, config: ModelConfig) -> tuple[Mistake, ...]:
        """Returns the keys by which a config cannot be written as this family."""
        mistakes = []
        for key, allowed in fits_of(self.table).items():
            value = getattr(config, key, None)
            if value not in allowed and not (SOME in allowed and value is not None):
                expected = " or ".join("a value" if one is SOME else str(one) for one in allowed)
                mistakes.append(Mistake(f"model.{key}", f"is {value}", f"{self.architecture} has {expected}"))
        return tuple(mistakes) or self.check(config)
