"""Shards behind a URL: the same batches as from the folder, downloaded once. fsspec's store in memory takes the same
way as gs:// and s3://."""

import json
import shutil
import sys
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pytest

from conftest import spec_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError
from meshloom.runtime.cli.data import prepare_corpus, tokenize_corpus
from meshloom.runtime.core.files import PACKAGES, in_turn
from meshloom.runtime.data import corpus, open_data

URL = "memory://corpora/tokens"
CHOSEN = ("data=tokens", "sequence_length=32", "global_batch_size=8", "evaluation.num_batches=1")


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


def _told():
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
    assert _told().what == f"{URL}/00002.documents is missing"
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
    assert "00001.tokens" in _told().what
    assert [path for folder in corpus.cache_of_shards().iterdir() for path in folder.glob("*1.tokens*")] == []


@pytest.mark.parametrize("name", ["../theirs", "..", ".lock"])
def test_an_index_behind_a_url_names_no_file_outside_of_the_copy(written, store, name):
    index = (written / "index.json").read_text().replace("00000.tokens", name)
    store.pipe("/corpora/tokens/index.json", index.encode())
    assert "index.json is damaged" in _told().what


@pytest.mark.usefixtures("store", "downloads")
def test_a_url_without_shards_is_one_error(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "URL", "memory://corpora/none")
    assert _told().what == "'memory://corpora/none' has no index.json"
    monkeypatch.setattr(sys.modules[__name__], "URL", "nosuch://bucket/tokens")
    assert "nosuch" in _told().what
    fsspec.register_implementation("uninstalled", "no_such_package:Store", errtxt="install no_such_package")
    monkeypatch.setitem(PACKAGES, "uninstalled", "gcs")
    monkeypatch.setattr(sys.modules[__name__], "URL", "uninstalled://bucket/tokens")
    assert _told().fix == "pip install 'meshloom[gcs]'"


@pytest.mark.usefixtures("store")
def test_a_disk_without_room_is_one_error_before_anything_is_downloaded(monkeypatch, downloads):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(9000, 8000, 1000))
    assert "1000 B are free on the disk" in _told().what
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
