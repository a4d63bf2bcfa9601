"""Takes the part of a declaration that reaches a program: a value with fewer fields, from one that has them all."""

from typing import Any, Self

from meshloom.models.config import Config


class Narrow(Config):
    """A node with the keys that reach a program. A subclass of it may add keys that do not, under the same name in the
    declaration."""

    @classmethod
    def of(cls, wider: Any) -> Self:
        """Returns the part of a subclass's value that this class declares, and that of each node that is Narrow."""
        values: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            value, kind = getattr(wider, name), field.annotation
            values[name] = kind.of(value) if isinstance(kind, type) and issubclass(kind, Narrow) else value
        return cls.model_construct(**values)
