"""A damaged header of a GGUF file is one error, whatever the damage."""

import struct

import pytest

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.gguf_file import read_gguf


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def value(kind: int, content: bytes, key: bytes = b"general.alignment") -> bytes:
    return text(key) + struct.pack("<I", kind) + content


def file_of(*values: bytes, tensors: tuple[bytes, ...] = ()) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join((*values, *tensors)) + bytes(64)


@pytest.mark.parametrize(
    "content",
    [
        file_of(value(4, struct.pack("<I", 0))),
        file_of(value(8, text(b"32"))),
        file_of(value(9, struct.pack("<IQ", 9, 1) * 2000)),
        file_of(value(99, b"")),
        file_of(tensors=(text(b"a") + struct.pack("<IQIQ", 1, 5, 8, 0),)),  # five numbers of Q8_0
        file_of()[:20],
    ],
    ids=["no alignment", "a text as alignment", "lists in lists", "an unknown type", "a part of a block", "cut off"],
)
def test_a_damaged_header_is_one_error(tmp_path, content):
    (path := tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match="is truncated, or its header is damaged"):
        read_gguf(path)


def test_a_token_that_is_no_text_does_not_damage_it(tmp_path):
    (path := tmp_path / "a.gguf").write_bytes(file_of(value(9, struct.pack("<IQ", 8, 1) + text(b"\xff"), b"tokens")))
    assert read_gguf(path).said == {"tokens": 1}
