"""A value that may not be known: the value, or the reason why it is missing.

    step.mfu       0.41, or Unknown("the chip's peak in the compute type is not known")
    report.json    "mfu": null, and once for the file "unknown": {"step.mfu": "the chip's peak ..."}

An `Unknown` is false, so `if step.mfu:` is the question whether there is a figure other than zero.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler, model_serializer
from pydantic_core import CoreSchema, core_schema

from meshloom.models.record import Record

T = TypeVar("T")
R = TypeVar("R")
KNOWN = "known"  # a part of the place that pydantic names for a wrong value


@dataclass(frozen=True)
class Unknown:
    """The reason why a value is not known, instead of the value."""

    why: str

    def __bool__(self) -> Literal[False]:
        return False


class _NullOrValue:
    """Writes an Unknown as null, and reads it from {"why": reason}, which `Reasoned` puts in place of the null."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        value = handler.generate_schema(get_args(source)[0])

        def which(given: Any) -> str:
            is_reason = isinstance(given, dict) and given.keys() == {"why"}
            return "unknown" if is_reason or isinstance(given, Unknown) else KNOWN

        def read(given: Any) -> Unknown:
            return given if isinstance(given, Unknown) else Unknown(given["why"])

        def write(given: Any, inner: Callable[[Any], Any]) -> Any:
            return None if isinstance(given, Unknown) else inner(given)

        written = core_schema.wrap_serializer_function_ser_schema(write, schema=value)
        either = {KNOWN: value, "unknown": core_schema.no_info_plain_validator_function(read)}
        return core_schema.tagged_union_schema(either, which, serialization=written)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(schema["choices"][KNOWN]), {"type": "null"}]}  # pyright: ignore


OrUnknown = Annotated[T | Unknown, _NullOrValue()]


class Reasoned(Record):
    """A record of a file whose nulls may be unknown values: `unknown` has the reason of each, by its path."""

    @property
    def unknown(self) -> dict[str, str]:
        """Returns the reasons by the paths of their values. Where all elements of a list share their reasons, they are
        there once: "collectives[*].alone_seconds"."""
        return dict(_reasons({name: getattr(self, name) for name in type(self).model_fields}))

    @model_serializer(mode="wrap")
    def _with_reasons(self, inner: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        repeated = as_json(self.repeated())
        reasons = self.unknown | repeated.pop("unknown")
        return _merged(inner(self), repeated) | {"unknown": reasons}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Returns the JSON schema of the file: its fields, and the reasons."""
        found = handler({key: value for key, value in schema.items() if key != "serialization"})  # pyright: ignore
        whole = handler.resolve_ref_schema(found)
        whole["properties"]["unknown"] = {"type": "object", "additionalProperties": {"type": "string"}}
        whole["required"] = [*whole.get("required", ()), "unknown"]
        return found

    def repeated(self) -> Mapping[str, Any]:
        """Returns values of the fields that the file has under other keys as well, with their reasons."""
        return {}

    @classmethod
    def as_read(cls, node: dict[str, Any]) -> dict[str, Any]:
        """Returns the JSON of a file without keys that only repeat others."""
        return node

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """Returns the record that a file holds, with its reasons in the place of nulls."""
        try:
            node = json.loads(json_data)
        except (ValueError, RecursionError):  # pydantic has the error
            return super().model_validate_json(json_data, **options)
        given = node.pop("unknown", {}) if isinstance(node, dict) else {}
        node = cls.as_read(node) if isinstance(node, dict) else node
        pairs = given.items() if isinstance(given, dict) else ()
        reasons = {path: why for path, why in pairs if isinstance(why, str)}
        return super().model_validate_json(json.dumps(_with_unknowns(node, "", _finder(reasons))), **options)


def as_json(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tree of values and records as JSON, with null for unknown values, and their reasons in `unknown`."""

    def plain(node: Any) -> Any:
        if isinstance(node, BaseModel):
            return node.model_dump(mode="json")
        if isinstance(node, Mapping):
            return {name: plain(value) for name, value in node.items()}
        return [plain(value) for value in node] if isinstance(node, list | tuple) else known(node)

    return plain(tree) | {"unknown": dict(_reasons(tree))}


def _merged(one: Any, other: Any) -> Any:
    """Returns a tree with the keys of another one, which are not in it."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return {**one, **{key: _merged(one[key], value) if key in one else value for key, value in other.items()}}
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return [_merged(*pair) for pair in zip(one, other, strict=True)]
    return one


def known(value: T | Unknown) -> T | None:
    """Returns the value; None if it is unknown."""
    return None if isinstance(value, Unknown) else value


def or_unknown(value: T | None, why: str | None) -> T | Unknown:
    """Returns the value; if it is None, the reason."""
    assert value is not None or why, "an unknown value has a reason"
    return Unknown(str(why)) if value is None else value


def each_known(value: T | Unknown, then: Callable[[T], R]) -> R | Unknown:
    """Returns `then` of a value; the reason if it is unknown."""
    return value if isinstance(value, Unknown) else then(value)


def why_unknown(value: Any) -> str:
    """Returns the reason of an unknown value. Raises TypeError for a value that is known."""
    if not isinstance(value, Unknown):
        raise TypeError(f"{value!r} is known")
    return value.why


def text_of(value: T | Unknown, human: Callable[[T], str], unknown: str = "unknown") -> str:
    """Returns a value as text."""
    return unknown if isinstance(value, Unknown) else human(value)


def all_known(values: Iterable[T | Unknown], then: Callable[[list[T]], R]) -> R | Unknown:
    """Returns `then` of all values; the reason of the first that is unknown, if one is."""
    values = list(values)
    unknown = first_unknown(values)
    return then([value for value in values if not isinstance(value, Unknown)]) if unknown is None else unknown


def first_unknown(values: Iterable[Any]) -> Unknown | None:
    """Returns the first of the values that is unknown."""
    return next((value for value in values if isinstance(value, Unknown)), None)


def _reasons(node: Any) -> Iterator[tuple[str, str]]:
    """Yields the path of each unknown value within a node, and why it is unknown."""
    if isinstance(node, Unknown):
        yield "", node.why
    elif isinstance(node, BaseModel | Mapping):
        for name, value in node.items() if isinstance(node, Mapping) else node:
            yield from ((_joined(name, path), why) for path, why in _reasons(value))
    elif is_dataclass(node):
        yield from _reasons(vars(node))
    elif isinstance(node, list | tuple):
        each = [tuple(_reasons(value)) for value in node]
        if len(each) > 1 and len(set(each)) == 1:
            yield from ((_joined("[*]", path), why) for path, why in each[0])
        else:
            yield from ((_joined(f"[{n}]", path), why) for n, found in enumerate(each) for path, why in found)


def _joined(name: str, path: str) -> str:
    return name + (f".{path}" if path and not path.startswith("[") else path)


def _finder(reasons: Mapping[str, str]) -> Callable[[str], str | None]:
    """Returns what finds the reason of a path, also by one for all elements of lists: `rows[*].cells[1]`."""
    of_all = [
        (re.compile(re.escape(path).replace(r"\[\*\]", r"\[\d+\]")), why)
        for path, why in reasons.items()
        if "[*]" in path
    ]

    def find(path: str) -> str | None:
        return reasons.get(path) or next((why for pattern, why in of_all if pattern.fullmatch(path)), None)

    return find


def _with_unknowns(node: Any, path: str, why_null: Callable[[str], str | None]) -> Any:
    """Returns JSON with the reason of each null that has one in its place. why_null: finds the reason of a path."""
    if node is None:
        why = why_null(path)
        return None if why is None else {"why": why}
    if isinstance(node, dict):
        paths = {name: f"{path}.{name}" if path else name for name in node}
        return {name: _with_unknowns(value, paths[name], why_null) for name, value in node.items()}
    if isinstance(node, list):
        return [_with_unknowns(value, f"{path}[{n}]", why_null) for n, value in enumerate(node)]
    return node
