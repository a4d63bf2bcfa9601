"""Shards whose index or table of documents is not as it was written are one error, and no token is read from them."""

import json
from pathlib import Path

import numpy as np
import pytest

from meshloom.compiler.core.errors import ConfigError
from meshloom.runtime.data.store import INDEX, open_shards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One shard of two documents, of four tokens and of six."""
    np.arange(10, dtype="<u2").tofile(tmp_path / "00000.tokens")
    np.array([[4, 1], [10, 2]], "<u8").tofile(tmp_path / "00000.documents")
    shard = {"tokens": "00000.tokens", "documents": "00000.documents", "num_tokens": 10, "num_documents": 2,
             "sha256": "0" * 64}  # fmt: skip
    tokenizer = {"kind": "bytes", "sha256": "0" * 64, "vocab_size": 257, "end_of_document": 256}
    index = {"format": "meshloom-tokens", "version": 1, "dtype": "uint16", "tokenizer": tokenizer, "num_tokens": 10,
             "num_documents": 2, "largest_token": 9, "shards": [shard], "corpus": {}}  # fmt: skip
    (tmp_path / INDEX).write_text(json.dumps(index))
    return tmp_path


def test_whole_shards_are_opened(folder):
    assert open_shards(str(folder), "data").num_tokens == 10


@pytest.mark.parametrize("ends", [(5, 3), (4, 9), (4, 11), (11, 10), (4, 2**63), (2**64 - 1, 10), (0, 0)])
def test_a_table_whose_documents_do_not_lie_end_to_end_is_refused(folder, ends):
    np.array([[ends[0], 1], [ends[1], 2]], "<u8").tofile(folder / "00000.documents")
    with pytest.raises(ConfigError, match=r"00000\.documents is damaged"):
        open_shards(str(folder), "data")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"7",
        bytes(90),
        b"\xff\xfe{",
        b"[" * 100_000,
        b'{"num_tokens": ' + b"9" * 6000 + b"}",
    ],
)
def test_an_index_that_is_something_else_is_refused(folder, content):
    (folder / INDEX).write_bytes(content)
    with pytest.raises(ConfigError, match=r"index\.json is damaged"):
        open_shards(str(folder), "data")


@pytest.mark.parametrize("key", ["num_tokens", "num_documents", "dtype", "shards", "tokenizer", "largest_token"])
@pytest.mark.parametrize("value", [None, "x", -5, 3, [], {}, [{}]])
def test_an_index_with_another_value_is_refused(folder, key, value):
    index = json.loads((folder / INDEX).read_text()) | {key: value}
    (folder / INDEX).write_text(json.dumps(index))
    if key == "largest_token" and value in (-5, 3):
        pytest.skip("a number of the right type, which nothing in the index contradicts")
    with pytest.raises(ConfigError, match=r"index\.json"):
        open_shards(str(folder), "data")
