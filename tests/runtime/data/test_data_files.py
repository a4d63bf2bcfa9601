"""Files of strangers: compressed, in other encodings, without text in them, oddly named, or behind a URL."""

import bz2
import gzip
import json
import lzma
import os
import shutil
import sys
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from conftest import spec_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError
from meshloom.runtime.cli.data import prepare_corpus, tokenize_corpus
from meshloom.runtime.core.files import PACKAGES, in_turn
from meshloom.runtime.core.inputs import find_files
from meshloom.runtime.data import corpus, open_data
from meshloom.runtime.data.corpus import open_store
from meshloom.runtime.data.splits import names_of
from meshloom.runtime.data.tokenizers import Bytes

TEXT = "Grüße aus Köln, 你好\r\nA second line.\n" * 30
URL = "memory://corpora/tokens"
CHOSEN = ("data=tokens", "sequence_length=32", "global_batch_size=8", "evaluation.num_batches=1")


def _by_pyarrow(kind):
    def compress(data):
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, kind) as stream:
            stream.write(data)
        return sink.getvalue().to_pybytes()

    return compress


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
COMPRESS |= {".zst": _by_pyarrow("zstd"), ".lz4": _by_pyarrow("lz4")}


def _store(kind, paths, *overrides):
    data: Any = spec_of(f"data={kind}", f"data.source.paths=['{paths}']", *overrides).data
    return open_store(data, data.source, "data.source", Bytes())


def _texts(store):
    (shard,) = store.shards
    ends = shard.documents[:, 0].astype(int).tolist()
    return [bytes(shard.tokens[a : b - 1].tolist()).decode() for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def _told(kind, paths, *overrides):
    with pytest.raises(ConfigError) as error:
        _store(kind, paths, *overrides)
    (problem,) = error.value.problems
    return problem


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_are_read_by_what_they_are(tmp_path, suffix):
    (tmp_path / f"a.txt{suffix}").write_bytes(COMPRESS[suffix](TEXT.encode()))
    (tmp_path / "b.txt").write_bytes(COMPRESS[suffix](b"b") + COMPRESS[suffix](b"c"))  # by its first bytes alone
    assert _texts(_store("text_files", tmp_path / "*")) == [TEXT, "bc"]
    lines = "".join(json.dumps({"text": f"{n}{TEXT}"}) + "\n" for n in range(50))
    (tmp_path / f"c.jsonl{suffix}").write_bytes(COMPRESS[suffix](lines.encode()))
    assert _texts(_store("jsonl", tmp_path / "c*")) == [f"{n}{TEXT}" for n in range(50)]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_damaged_compressed_file_is_an_error(tmp_path, suffix):
    whole = COMPRESS[suffix](bytes(range(9, 14)) + TEXT.encode() * 9)
    (tmp_path / f"cut.txt{suffix}").write_bytes(whole[: len(whole) * 2 // 3])
    assert "is not a complete" in _told("text_files", tmp_path / "cut*").what
    (tmp_path / f"other.txt{suffix}").write_bytes(TEXT.encode())
    assert "file, as its name says" in _told("text_files", tmp_path / "other*").what


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_text_of_other_encodings_is_read_by_its_byte_order_mark(tmp_path, encoding):
    mark = "\ufeff" if encoding.startswith("utf-16-") else ""
    (tmp_path / "a.txt").write_bytes(f"{mark}{TEXT}".encode(encoding))
    (tmp_path / "a.jsonl").write_bytes(f"{mark}{json.dumps({'text': TEXT})}\n".encode(encoding))
    assert _texts(_store("text_files", tmp_path / "a.txt")) == [TEXT]
    assert _texts(_store("jsonl", tmp_path / "a.jsonl")) == [TEXT]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is not text but a PNG image"),
        (b"%PDF-1.7\n%\xe2\xe3", "is not text but a PDF"),
        (TEXT.encode("utf-16-le"), "byte 1 is NUL; UTF-16 needs a byte order mark"),
        (b"text" * 5000 + b"\0", "byte 20,000 is NUL"),
        (bytes(range(1, 9)) * 20, "it is full of control characters"),
        (gzip.compress(b"\x7fELF\2\1\1\0", mtime=0), "is not text but a program"),
    ],
)
def test_bytes_that_are_no_text_are_an_error(tmp_path, content, told):
    (tmp_path / "a.txt").write_bytes(content)
    problem = _told("text_files", tmp_path / "*")
    assert problem.where == str(tmp_path / "a.txt")
    assert told in problem.what


def test_records_that_are_no_text_are_an_error(tmp_path):
    writer = ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    for record in (b"text", b"\n\x9c\x02\n\x99\x02\n\x04text" + b"a" * 300):  # as a protocol buffer is
        writer.write(record)
    writer.close()
    problem = _told("array_record", tmp_path / "*")
    assert (problem.where, problem.what) == (f"{tmp_path}/a.array_record:1", "is not UTF-8 at byte 1")


def test_documents_without_text_are_left_out_and_counted_in_every_format(tmp_path):
    texts = ["a", "", "\ufeffb", None, "\ufeff", "c"]
    (tmp_path / "text").mkdir()
    for n, text in enumerate(texts):
        (tmp_path / "text" / f"{n}").write_text(text or "")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=2)
    writer = ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    for text in texts:
        writer.write((text or "").encode())
    writer.close()
    for kind, paths in (("text_files", "text/*"), ("jsonl", "*.jsonl"), ("parquet", "*.parquet"),
                        ("array_record", "*.array_record")):  # fmt: skip
        store = _store(kind, tmp_path / paths)
        assert (kind, _texts(store), store.num_empty) == (kind, ["a", "b", "c"], 3)
        source: Any = spec_of(f"data={kind}", f"data.source.paths=['{tmp_path / paths}']").data.source
        named = names_of(source, "data.source", [0, 1, 2])
        assert [name.rpartition(":")[2] for name in named.values()] == ["0", "2", "5"]


def test_columns_of_structs_and_categories_are_read(tmp_path):
    rows = [{"meta": {"text": f"t{n}", "id": n}} if n % 3 else {"meta": None} for n in range(600)]
    table = pyarrow.Table.from_pylist(rows)
    table = table.append_column("kind", pyarrow.array(["x", "y"] * 300).dictionary_encode())
    table = table.append_column("dotted.name", pyarrow.array(["z"] * 600))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    path = tmp_path / "a.parquet"
    of_struct = _texts(_store("parquet", path, "data.source.text_column=meta.text"))
    assert of_struct == [f"t{n}" for n in range(600) if n % 3]
    assert _texts(_store("parquet", path, "data.source.text_column=kind")) == ["x", "y"] * 300
    assert _texts(_store("parquet", path, "data.source.text_column=dotted.name")) == ["z"] * 600
    assert "use one of meta.text, meta.id" in _told("parquet", path, "data.source.text_column=meta").fix
    assert "did you mean 'meta.text'" in _told("parquet", path, "data.source.text_column=meta.txt").fix
    assert "int64, not text" in _told("parquet", path, "data.source.text_column=meta.id").what


def test_a_column_of_strings_that_is_no_utf8_is_an_error(tmp_path):
    ends, latin1 = (pyarrow.py_buffer(data) for data in (b"\0\0\0\0\3\0\0\0", "für".encode("latin1")))
    texts = pyarrow.StringArray.from_buffers(1, ends, latin1)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    assert "is not UTF-8" in _told("parquet", tmp_path / "*").what


def test_what_exists_by_the_very_name_of_a_pattern_is_that_path(tmp_path):
    for name in ("[a].txt", "a.txt", "set[1]/b.txt", "set1/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for pattern, names in {"[a].txt": ["[a].txt"], "[ab].txt": ["a.txt"], "set[1]/*.txt": ["b.txt"],
                           "set[12]/*": ["set1/c.txt"]}.items():  # fmt: skip
        assert [file.name for file in find_files([str(tmp_path / pattern)], "paths")] == names, pattern


def test_a_file_whose_name_is_no_utf8_is_a_document(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("text")
    assert _texts(_store("text_files", tmp_path / "*.txt")) == ["text"]


def test_what_is_no_file_on_a_disk_is_called_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("missing")
    for name, what in {"pipe": "a pipe or a device", "loop": "a link that leads", "nowhere": "a link that"}.items():
        with pytest.raises(ConfigError, match=f"'{tmp_path}/{name}' is {what}"):
            find_files([str(tmp_path / name)], "paths")


def test_a_file_in_which_all_texts_are_null_has_no_documents(tmp_path):
    """Parquet says nothing of the type of a column of nulls."""
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.nulls(3)}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "b.parquet")
    store = _store("parquet", tmp_path / "*.parquet")
    assert (_texts(store), store.num_empty) == (["a"], 4)


def test_files_behind_urls_are_those_of_the_disk(tmp_path):
    """fsspec's store in memory takes the same way as gs:// and s3://."""
    store, texts = fsspec.filesystem("memory"), [f"{n} {TEXT}" for n in range(9)]
    for n, text in enumerate(texts):
        (tmp_path / f"{n}.txt.gz").write_bytes(gzip.compress(text.encode()))
        store.pipe(f"/corpus/{n}.txt.gz", gzip.compress(text.encode()))
    table = pyarrow.table({"text": texts})
    with store.open("/table/a.parquet", "wb") as file:
        pyarrow.parquet.write_table(table, file)
    try:
        there, here = _store("text_files", "memory://corpus/*.gz"), _store("text_files", tmp_path / "*.gz")
        assert _texts(there) == texts
        assert there.content == here.content  # names and splits, too
        assert _texts(_store("text_files", "memory://corpus/3.txt.gz")) == texts[3:4]
        assert _texts(_store("parquet", "memory://table/*.parquet")) == texts
        assert _texts(_store("text_files", f"file://{tmp_path}/*.gz")) == texts
        assert "no file matches 'memory://corpus/*.txt'" in _told("text_files", "memory://corpus/*.txt").what
    finally:
        store.rm("/corpus", recursive=True)
        store.rm("/table", recursive=True)


def test_a_url_that_nothing_reads_is_one_error():
    fsspec.register_implementation("uninstalled", "no_such_package:Store", errtxt="install no_such_package")
    assert "no_such_package" in _told("text_files", "uninstalled://bucket/*.txt").fix
    assert "nosuch" in _told("text_files", "nosuch://bucket/*.txt").what


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Several shards on the disk."""
    folder = tmp_path_factory.mktemp("shards")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": f"{n} is a number " * 9}) + "\n" for n in range(400)))
    declared = ("data=jsonl", f"data.source.paths=[{folder}/a.jsonl]", f"shards.directory={folder}/tokens")
    job = prepare_corpus(spec_of(*declared, "shards.num_tokens_per_shard=15000"))
    assert tokenize_corpus(job, Console(is_quiet=True)) == 0
    return folder / "tokens"


@pytest.fixture
def store(written, tmp_path, monkeypatch):
    """The store, with the shards in it, and an empty cache of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = fsspec.filesystem("memory")
    for path in written.iterdir():
        store.pipe(f"/corpora/tokens/{path.name}", path.read_bytes())
    yield store
    store.rm("/corpora", recursive=True)


@pytest.fixture
def downloads(monkeypatch):
    """How often each file was opened in the store."""
    found, blocks_of = Counter(), corpus.blocks_of

    def counted(url, name, where):
        found[name] += 1
        return blocks_of(url, name, where)

    monkeypatch.setattr(corpus, "blocks_of", counted)
    return found


def _copy():
    return corpus.local_copy(URL, "data.source.directory")


def _refused():
    with pytest.raises(ConfigError) as error:
        _copy()
    (problem,) = error.value.problems
    assert problem.where == "data.source.directory"
    return problem


def _content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


@pytest.mark.usefixtures("store")
def test_a_run_draws_the_same_from_a_url_as_from_the_folder(written, capsys):
    there = open_data(spec_of(*CHOSEN, f"data.source.directory={URL}/"))
    here = open_data(spec_of(*CHOSEN, f"data.source.directory={written}"))
    assert there.identity == here.identity
    for split in ("train", "held_out"):
        for one, other, _ in zip(there[split], here[split], range(20), strict=False):
            assert one.keys() == other.keys()
            for name in one:
                np.testing.assert_array_equal(one[name], other[name])
    num_bytes = sum(path.stat().st_size for path in written.glob("0*"))
    shown = capsys.readouterr().out
    assert f"downloading {num_bytes / 1024:.1f} KiB in 4 shards from {URL} into" in " ".join(shown.split())


def test_shards_are_downloaded_once_and_anew_where_the_index_changes(written, store, downloads, capsys):
    first = _copy()
    assert _content(first) == _content(written)
    assert set(downloads.values()) == {1}
    downloads.clear()
    capsys.readouterr()
    assert _copy() == first
    assert downloads == {"index.json": 1}
    assert capsys.readouterr().out == ""
    index = json.loads((written / "index.json").read_text())
    store.pipe("/corpora/tokens/index.json", json.dumps(index | {"corpus": {"made": "again"}}).encode())
    second = _copy()
    assert second != first
    assert downloads["00000.tokens"] == 1


def test_a_download_that_was_cut_off_goes_on_with_the_shards_that_it_lacks(written, store, downloads):
    content = store.cat("/corpora/tokens/00002.documents")
    store.rm("/corpora/tokens/00002.documents")
    assert _refused().what == f"{URL}/00002.documents is missing"
    (folder,) = corpus.cache_of_shards().iterdir()
    assert "00002.tokens" not in _content(folder)
    assert "index.json" not in _content(folder)
    assert not list(folder.glob(".*.unfinished"))
    kept = _content(folder).keys()
    store.pipe("/corpora/tokens/00002.documents", content)
    downloads.clear()
    assert _content(_copy()) == _content(written)
    assert not kept & downloads.keys()
    (folder / "00001.tokens").write_bytes(b"cut")  # by whoever cleans caches
    assert _content(_copy()) == _content(written)


@pytest.mark.parametrize("change", ["a byte", "shorter", "longer"])
def test_a_file_that_is_not_what_the_index_says_is_one_error(store, change):
    name = "/corpora/tokens/00001.tokens"
    content = store.cat(name)
    store.pipe(name, {"a byte": b"\xff" + content[1:], "shorter": content[:-1], "longer": content + b"1"}[change])
    assert "00001.tokens" in _refused().what
    assert [path for folder in corpus.cache_of_shards().iterdir() for path in folder.glob("*1.tokens*")] == []


@pytest.mark.parametrize("name", ["../theirs", "..", ".lock"])
def test_an_index_behind_a_url_names_no_file_outside_of_the_copy(written, store, name):
    index = (written / "index.json").read_text().replace("00000.tokens", name)
    store.pipe("/corpora/tokens/index.json", index.encode())
    assert "index.json is damaged" in _refused().what


@pytest.mark.usefixtures("store", "downloads")
def test_a_url_without_shards_is_one_error(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "URL", "memory://corpora/none")
    assert _refused().what == "'memory://corpora/none' has no index.json"
    monkeypatch.setattr(sys.modules[__name__], "URL", "nosuch://bucket/tokens")
    assert "nosuch" in _refused().what
    fsspec.register_implementation("uninstalled", "no_such_package:Store", errtxt="install no_such_package")
    monkeypatch.setitem(PACKAGES, "uninstalled", "gcs")
    monkeypatch.setattr(sys.modules[__name__], "URL", "uninstalled://bucket/tokens")
    assert _refused().fix == "pip install 'meshloom[gcs]'"


@pytest.mark.usefixtures("store")
def test_a_disk_without_room_is_one_error_before_anything_is_downloaded(monkeypatch, downloads):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(9000, 8000, 1000))
    assert "1000 B are free on the disk" in _refused().what
    assert downloads == {"index.json": 1}


@pytest.mark.usefixtures("store")
def test_processes_of_a_host_download_once(downloads, capsys):
    with ThreadPoolExecutor(4) as threads:
        folders = list(threads.map(lambda _: _copy(), range(4)))
    assert len(set(folders)) == 1
    assert downloads.pop("index.json") == 4
    assert set(downloads.values()) == {1}
    (folders[0] / "index.json").unlink()
    with ThreadPoolExecutor(1) as threads:
        with in_turn(folders[0], lambda: None):
            late = threads.submit(_copy)
            with pytest.raises(TimeoutError):
                late.result(timeout=0.3)
        assert late.result(timeout=5) == folders[0]
    assert "waiting for another process" in capsys.readouterr().out
