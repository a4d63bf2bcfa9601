"""Takes the part of a declaration that reaches a program: a value with fewer fields, from one that has them all."""

from typing import Any, Self

from meshloom.models.config import Config


class ProgramKeys(Config):
    """A node with the keys that reach a program. A subclass may add keys that do not, under the same name in the
    declaration."""

    @classmethod
    def of(cls, whole: Any) -> Self:
        """Returns the fields of a subclass's value that this class declares; of nodes that are ProgramKeys, too."""
        values: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            value, kind = getattr(whole, name), field.annotation
            values[name] = kind.of(value) if isinstance(kind, type) and issubclass(kind, ProgramKeys) else value
        return cls.model_construct(**values)
