"""A folder of data files and code with something wrong in each, for tests of what is said about them."""

import json
from pathlib import Path

import numpy as np

CODE = """
from meshloom.runtime.data import DataSource

class Documents(DataSource):
    def __init__(self, count, text="abc"):
        self.count, self.text = count, text
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return self.text + str(index)

class NoLength(DataSource):
    def __getitem__(self, index):
        return "abc"

class Fails(Documents):
    def __getitem__(self, index):
        if index == 3:
            return _look_up({})
        return "abc"

class FailsAtOnce(Documents):
    def __init__(self):
        _look_up({})

class Numbers(Documents):
    def __getitem__(self, index):
        return 1.5

class Sequences(Documents):
    def __getitem__(self, index):
        return [index % 7] * 9 if index != 3 else _look_up({})

class Short(Documents):
    def __getitem__(self, index):
        return [1]

class Unrelated:
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return "abc"

def make_documents():
    return Documents(3)

def _look_up(table):
    return table["a key"]
"""


def write_wrong_data(folder: Path) -> None:
    """Write all of them."""
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.txt").write_text("some text\n" * 400)
    (folder / "corpus" / "latin1.text").write_bytes("für".encode("latin1") * 10)
    (folder / "corpus" / "no_json.jsonl").write_text('{"text": "a"}\n\n{"text": \n{"text": 3}\n["a"]\n')
    (folder / "corpus" / "no_key.jsonl").write_text('{"body": "a", "id": 1}\n')
    (folder / "corpus" / "no.parquet").write_text("this is no parquet file")
    (folder / "corpus" / "no.array_record").write_text("this is no array record")
    (folder / "corpus" / "empty.jsonl").write_text("\n")
    (folder / "pipeline_two.csv").write_text("0F0,0F1,0B0,0B1\n,1F0+1B0,1F1+1B1,\n")
    (folder / "pipeline_late.csv").write_text("0F0,0B0,0F1,0B1\n,1F0+1B0,1F1+1B1,\n")
    (folder / "my_code.py").write_text(CODE)
    (folder / "my_broken_code.py").write_text("import my_code\n\nmy_code._look_up({})\n")
    (folder / "my_wrong_import.py").write_text("import a_package_that_is_not_there\n")
    (folder / "my_syntax.py").write_text("def f(:\n")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer.model").write_text("no model")
    for name in ("good", "short", "no_index", "cut_index", "other_type", "large_token", "miscounted"):
        _write_shards(folder / name)
    (folder / "short" / "00000.tokens").write_bytes(b"\0" * 10)
    (folder / "no_index" / "index.json").unlink()
    index = folder / "cut_index" / "index.json"
    index.write_text(index.read_text()[:100])
    _change(folder / "other_type", dtype="uint32")
    _change(folder / "large_token", largest_token=300)
    _change(folder / "miscounted", num_tokens=7, num_documents=3)


def _write_shards(folder: Path) -> None:
    folder.mkdir()
    tokens = np.tile(np.array([*b"abc" * 66, 256], "<u2"), 2000)
    ends = np.arange(199, 398001, 199, dtype="<u8")
    hashes = np.arange(2000, dtype="<u8") * np.uint64(2**64 // 2000)
    (folder / "00000.tokens").write_bytes(tokens.tobytes())
    (folder / "00000.documents").write_bytes(np.stack([ends, hashes], axis=1).tobytes())
    shard = {"tokens": "00000.tokens", "documents": "00000.documents", "num_tokens": 398000, "num_documents": 2000, "sha256": ""}  # fmt: skip  # noqa: E501
    tokenizer = {"kind": "bytes", "sha256": "", "vocab_size": 257, "end_of_document": 256}
    index = {"format": "meshloom-tokens", "version": 1, "dtype": "uint16", "tokenizer": tokenizer, "num_tokens": 398000,
             "num_documents": 2000, "largest_token": 256, "shards": [shard], "corpus": {}}  # fmt: skip
    (folder / "index.json").write_text(json.dumps(index))


def _change(folder: Path, **values: object) -> None:
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | values))
