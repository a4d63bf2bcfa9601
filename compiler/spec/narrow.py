"""Parts of a declaration: a value with fewer fields, of what has them all."""

from typing import Any, Self

from meshloom.models.config import Config


class Narrow(Config):
    """A node with the keys that reach a program. A subclass of it may add keys that do not, under the same name in the
    declaration."""

    @classmethod
    def of(cls, wider: Any) -> Self:
        """Returns this class's part of a value of a subclass: its own keys, and of nodes that are Narrow theirs."""
        values: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            value, kind = getattr(wider, name), field.annotation
            values[name] = kind.of(value) if isinstance(kind, type) and issubclass(kind, Narrow) else value
        return cls.model_construct(**values)
