"""Reads fields of protocol buffers by their numbers: of files whose messages no installed library declares.

message_fields(b"\\x0a\\x03abc\\x10\\x07")  ->  (1, b"abc"), (2, 7)
"""

from collections.abc import Iterator

# A number; or the bytes of a text, of a message, of a packed list, or of a number of fixed width.
WireValue = int | memoryview
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIDTH = {_FIXED64: 8, _FIXED32: 4}


class WireError(ValueError):
    """The bytes are not a message, or are cut off."""


def message_fields(data: bytes | memoryview) -> Iterator[tuple[int, WireValue]]:
    """Yields the fields of a message in order, each with its number. Raises WireError for bytes that are none."""
    view = memoryview(data)
    place, end = 0, len(view)
    while place < end:
        key, place = _varint(view, place)
        kind = key & 7
        if kind == _VARINT:
            value, place = _varint(view, place)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, place = _varint(view, place)
        elif kind in _WIDTH:
            size = _WIDTH[kind]
        else:
            raise WireError("a field has an unknown type")
        if place + size > end:
            raise WireError("the data ends within a field")
        yield key >> 3, view[place : place + size]
        place += size


def submessages(data: bytes | memoryview, number: int) -> Iterator[memoryview]:
    """Yields the values of a repeated field of messages or texts."""
    for found, value in message_fields(data):
        if found == number:
            if isinstance(value, int):
                raise WireError(f"field {number} is a number")
            yield value


def first_text(data: bytes | memoryview, number: int) -> str:
    """Returns the text of a field; empty if there is none."""
    return next((str(value, "utf-8", "replace") for value in submessages(data, number)), "")


def integers(data: bytes | memoryview, number: int) -> Iterator[int]:
    """Yields the values of a repeated field of integers, packed or not."""
    for found, value in message_fields(data):
        if found != number:
            continue
        if isinstance(value, int):
            yield value
            continue
        place = 0
        while place < len(value):
            item, place = _varint(value, place)
            yield item


def _varint(view: memoryview, place: int) -> tuple[int, int]:
    """Returns the number at a place, and the place after it."""
    value = shift = 0
    while True:
        if place >= len(view) or shift > 63:
            raise WireError("the data ends within a number")
        byte = view[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
