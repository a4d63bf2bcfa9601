"""`meshloom data`: a corpus in shards is the corpus, whatever happened while it was written."""

import json
import resource
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from conftest import spec_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.runtime.cli import data as command
from meshloom.runtime.cli.data import prepare_corpus, tokenize_corpus
from meshloom.runtime.core.failures import STORAGE, RunFailed
from meshloom.runtime.core.files import locked
from meshloom.runtime.data import open_data, write
from meshloom.runtime.data import tokenize as tokenize_module
from meshloom.runtime.data.corpus import open_store
from meshloom.runtime.data.store import INDEX, open_shards
from support.commands import meshloom, run_in_process
from support.forked import start

NUM_DOCUMENTS = 3000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Four files of JSON lines, about 3 MB."""
    folder = tmp_path_factory.mktemp("corpus")
    chance = np.random.default_rng(0)
    words = ["".join(map(chr, chance.integers(97, 107, n))) for n in chance.integers(2, 9, 500)]
    for number in range(4):
        texts = (" ".join(chance.choice(words, n)) for n in chance.geometric(0.006, NUM_DOCUMENTS // 4))
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def _texts(corpus):
    return [
        json.loads(line)["text"] for path in sorted(corpus.glob("*.jsonl")) for line in path.read_text().splitlines()
    ]


def _declared(corpus, directory, *overrides):
    paths = ("data=jsonl", f"data.source.paths=[{corpus}/*.jsonl]", f"shards.directory={directory}")
    return (*paths, "shards.num_tokens_per_shard=700000", *overrides)


def _write(corpus, directory, *overrides):
    job = prepare_corpus(spec_of(*_declared(corpus, directory, *overrides)))
    assert tokenize_corpus(job, Console(is_quiet=True)) == 0
    return directory


def _bytes(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def written(corpus, tmp_path_factory):
    return _write(corpus, tmp_path_factory.mktemp("written") / "tokens")


def test_shards_hold_the_tokens_of_the_texts(corpus, written):
    names = sorted(written.glob("*.tokens"))
    assert len(names) > 3
    tokens = np.concatenate([np.fromfile(path, "<u2") for path in names])
    texts = _texts(corpus)
    np.testing.assert_array_equal(tokens, [token for text in texts for token in [*text.encode(), 256]])
    ends = [np.fromfile(path, "<u8").reshape(-1, 2)[:, 0] for path in sorted(written.glob("*.documents"))]
    lengths = np.concatenate([np.diff(e.astype(int), prepend=0) for e in ends])
    np.testing.assert_array_equal(lengths, [len(text) + 1 for text in texts])
    assert all(e[-2] < 700_000 <= e[-1] for e in ends[:-1])  # a shard ends with the document that fills it
    index = json.loads((written / "index.json").read_text())
    assert (index["num_tokens"], index["num_documents"]) == (len(tokens), NUM_DOCUMENTS)
    assert index["largest_token"] == tokens.max() == 256
    assert sorted(path.name for path in written.iterdir() if path.name[0] != ".") == sorted(
        ["index.json", *(s[name] for s in index["shards"] for name in ("tokens", "documents"))]
    )


@pytest.mark.parametrize("packing", ["concatenate", "first_fit"])
def test_a_run_draws_the_same_from_shards_as_from_the_texts(corpus, written, packing):
    chosen = (f"data.packing={packing}", "data.isolate_documents=true", "sequence_length=256")
    from_texts = open_data(spec_of("data=jsonl", f"data.source.paths=[{corpus}/*.jsonl]", *chosen))
    from_shards = open_data(spec_of("data=tokens", f"data.source.directory={written}", *chosen))
    for split in ("train", "held_out"):
        for one, other, _ in zip(from_texts[split], from_shards[split], range(30), strict=False):
            for name in one:
                np.testing.assert_array_equal(one[name], other[name])
    assert from_texts.token_unit == from_shards.token_unit == "byte"
    assert from_texts.identity["data.tokenizer.vocab_size"] == from_shards.identity["data.tokenizer.vocab_size"]


def test_shards_are_read_from_the_disk_as_they_are_needed(written):
    store = open_shards(str(written), "")
    assert all(isinstance(array, np.memmap) for shard in store.shards for array in (shard.tokens, shard.documents))


def test_what_is_written_does_not_rest_on_the_size_of_batches(corpus, written, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_module, "BATCH_BYTES", 10_000)
    assert _bytes(_write(corpus, tmp_path / "tokens")) == _bytes(written)


class _Stopped(Exception): ...


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.ci) for seed in (1, 2, 3))])
def test_going_on_from_any_batch_gives_the_same_bytes(corpus, written, tmp_path, monkeypatch, seed):
    """Stopped at random batches, with commits at others, and rubbish behind what was committed."""
    monkeypatch.setattr(tokenize_module, "BATCH_BYTES", 50_000)
    monkeypatch.setattr(write, "COMMIT_SECONDS", 1e9)
    chance, add = np.random.default_rng(seed), write.ShardWriter.add

    def add_or_stop(self, encoded):
        add(self, encoded)
        if chance.random() < 0.2:
            self.commit()
        if chance.random() < 0.1:
            raise _Stopped

    monkeypatch.setattr(write.ShardWriter, "add", add_or_stop)
    directory, num_stops, is_done = tmp_path / "tokens", 0, False
    while not is_done:
        try:
            _write(corpus, directory)
            is_done = True
        except _Stopped:
            num_stops += 1
            for path in directory.glob("0*"):
                with path.open("ab") as file:
                    file.write(b"rubbish")
            _cut_finished(directory)
    assert num_stops > 1
    assert _bytes(directory) == _bytes(written)


def _cut_finished(directory):
    """Shards that were committed whole were brought to disk: only what lies behind a commit can be rubbish."""
    for shard in json.loads((directory / "progress.json").read_text())["shards"]:
        for name, size in (
            (shard["tokens"], shard["num_tokens"] * 2),
            (shard["documents"], shard["num_documents"] * 16),
        ):
            with (directory / name).open("r+b") as file:
                file.truncate(size)


QUICK_TO_COMMIT = """
import sys, time
from meshloom.runtime.data import tokenize, write
tokenize.BATCH_BYTES, write.COMMIT_SECONDS = 20_000, 0
add = write.ShardWriter.add
write.ShardWriter.add = lambda self, encoded: (time.sleep(0.02), add(self, encoded))
from meshloom.runtime.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.ci
def test_a_killed_command_goes_on_and_gives_the_same_bytes(corpus, written, tmp_path):
    line = ["data", *_declared(corpus, "tokens")]
    for at_tokens in (300_000, 1_500_000):
        process = start(["-c", QUICK_TO_COMMIT, *line], cwd=tmp_path, stdout=None, stderr=None)
        deadline = time.monotonic() + 100
        while _tokens_done(tmp_path / "tokens") < at_tokens:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not (tmp_path / "tokens" / "index.json").exists()
        with pytest.raises(ConfigError, match="has not finished there"):
            open_shards(str(tmp_path / "tokens"), "")
    done = meshloom(*line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "going on after" in done.stdout
    assert "meshloom train data=tokens data.source.directory=tokens model.vocab_size=257" in done.stdout
    assert _bytes(tmp_path / "tokens") == _bytes(written)
    assert "nothing to do" in run_in_process(*line, cwd=tmp_path).stdout
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]  # no run directory


def _tokens_done(directory: Path) -> int:
    path = directory / "progress.json"
    if not path.exists():
        return 0
    progress = json.loads(path.read_text())
    return progress["num_tokens"] + sum(shard["num_tokens"] for shard in progress["shards"])


def test_a_bpe_is_trained_once_and_used(corpus, tmp_path):
    directory = _write(corpus, tmp_path / "tokens", "shards.bpe_vocab_size=500", "shards.bpe_text_bytes=300000")
    library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert library.get_vocab_size() == 500
    store = open_shards(str(directory), "")
    tokens = np.concatenate([shard.tokens for shard in store.shards])
    documents = np.split(tokens, np.flatnonzero(tokens == library.token_to_id("<|endoftext|>")) + 1)[:-1]
    assert [library.decode(document[:-1].tolist()) for document in documents] == _texts(corpus)
    assert len(tokens) < 0.6 * sum(map(len, _texts(corpus)))
    # Killed after the training: the same tokenizer is used again, and again the bytes are the same.
    again = tmp_path / "again"
    again.mkdir()
    started = json.loads((directory / "index.json").read_text())
    progress = {"corpus": started["corpus"], "tokenizer": None, "shards": [], "num_tokens": 0, "num_documents": 0,
                "largest_token": -1, "num_text_bytes": 0, "part": 0, "document": 0}  # fmt: skip
    (again / "progress.json").write_text(json.dumps(progress))
    shutil.copy(directory / "tokenizer.json", again)
    assert _bytes(_write(corpus, again, "shards.bpe_vocab_size=500", "shards.bpe_text_bytes=300000")) == _bytes(
        directory
    )


@pytest.mark.ci
def test_a_bpe_comes_out_the_same_each_time(corpus, tmp_path):
    files = [_write(corpus, tmp_path / name, "shards.bpe_vocab_size=500") / "tokenizer.json" for name in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_tokens_of_more_than_16_bits(corpus, tmp_path):
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<|endoftext|>": 0, "[UNK]": 70_000}, "[UNK]"))
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(tmp_path / "large.json"))
    chosen = ("data/tokenizer=huggingface", f"data.tokenizer.path={tmp_path}/large.json")
    store = open_shards(str(_write(corpus, tmp_path / "tokens", *chosen)), "")
    assert store.shards[0].tokens.dtype == np.dtype("<u4")
    assert store.shards[0].tokens[:4].tolist() == [70_000, 0, 70_000, 0]
    assert store.largest_token == 70_000
    data: Any = spec_of("data=tokens", f"data.source.directory={tmp_path}/tokens", *chosen).data
    assert open_store(data, data.source, "", None).tokenizer.vocab_size == 70_001


def test_shards_of_another_tokenizer_are_an_error(written, tmp_path):
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<|endoftext|>": 0, "[UNK]": 1}, "[UNK]"))
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(tmp_path / "other.json"))
    chosen = ("data/tokenizer=huggingface", f"data.tokenizer.path={tmp_path}/other.json")
    with pytest.raises(ConfigError, match=r"holds tokens of another tokenizer \(bytes.*\) than data.tokenizer"):
        open_data(spec_of("data=tokens", f"data.source.directory={written}", *chosen))
    parts = f"a:{{weight:1,source:{{kind:tokens,directory:{written}}}}},b:{{weight:1,source:{{kind:synthetic}}}}"
    assert open_data(spec_of("data=mixture", f"data.source.parts={{{parts}}}")).token_unit == "byte"


def _told(*overrides):
    with pytest.raises(ConfigError) as error:
        prepare_corpus(spec_of(*overrides))
    return [str(problem) for problem in error.value.problems]


def test_another_corpus_does_not_go_into_the_same_directory(corpus, written, tmp_path):
    (told,) = _told(*_declared(corpus, written, "data.source.text_key=id", "shards.num_tokens_per_shard=5"))
    assert "not the same data.source.text_key, shards.num_tokens_per_shard" in told
    (tmp_path / "a file").write_text("")
    (told,) = _told(*_declared(corpus, f"'{tmp_path}'"))
    assert "holds other files" in told


def test_all_mistakes_are_told_before_anything_is_written(tmp_path):
    chosen = ("data/tokenizer=huggingface", "data.tokenizer.path=none.json", f"shards.directory={tmp_path}/tokens")
    told = _told("data=text_files", f"data.source.paths=[{tmp_path}/*.txt]", *chosen)
    assert len(told) == 2
    assert len(_told("data=mixture", "data.source.parts={a:{weight:1,source:{kind:synthetic}}}")) == 1
    assert "holds tokens already" in _told("data=tokens", "data.source.directory=x", "data/tokenizer=bytes")[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci
def test_a_document_that_cannot_be_read_stops_it_and_can_be_mended(corpus, tmp_path):
    mine = tmp_path / "corpus"
    shutil.copytree(corpus, mine)
    good = (mine / "2.jsonl").read_text()
    (mine / "2.jsonl").write_text(good[:1000] + "\n" + good[1000:])
    done = run_in_process("data", *_declared("corpus", "tokens"), cwd=tmp_path)
    assert done.returncode == 2
    assert "error: corpus/2.jsonl:" in done.stderr
    assert "Traceback" not in done.stderr


def test_one_process_at_a_time_writes_into_a_directory(corpus, tmp_path):
    job = prepare_corpus(spec_of(*_declared(corpus, tmp_path / "tokens")))
    job.folder.mkdir()
    with locked(job.folder, Problem("", "", "")), pytest.raises(ConfigError, match="another process"):
        tokenize_corpus(job, Console(is_quiet=True))


def test_a_start_that_failed_on_a_text_is_in_no_ones_way(tmp_path):
    """The text is corrected, so its file has another size; what was written before it is of no use."""
    path, lines = tmp_path / "a.jsonl", [json.dumps({"text": f"text {n}"}) for n in range(300)]
    declared = ("data=jsonl", f"data.source.paths=[{path}]", f"shards.directory={tmp_path}/tokens")
    path.write_text("\n".join([*lines[:290], "{", *lines[290:]]))
    with pytest.raises(ConfigError, match=r"a\.jsonl:291: is not JSON"):
        tokenize_corpus(prepare_corpus(spec_of(*declared)), Console(is_quiet=True))
    (tmp_path / "tokens" / "notes").write_text("the user's")
    path.write_text("\n".join(lines))
    for folder in ("tokens", "fresh"):
        spec = spec_of(*declared, f"shards.directory={tmp_path}/{folder}")
        assert tokenize_corpus(prepare_corpus(spec), Console(is_quiet=True)) == 0
    assert (tmp_path / "tokens" / "notes").exists()
    (tmp_path / "tokens" / "notes").unlink()
    assert _bytes(tmp_path / "tokens") == _bytes(tmp_path / "fresh")


def test_a_full_disk_is_told_with_its_key_and_the_same_line_goes_on(corpus, written, tmp_path):
    """As a disk that is full, no file of this process may grow beyond 500 kB for a while."""
    spec = spec_of(*_declared(corpus, tmp_path / "tokens"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        with pytest.raises(
            RunFailed, match=r"shards\.directory: .*tokens.* cannot be written: File too large"
        ) as error:
            tokenize_corpus(prepare_corpus(spec), Console(is_quiet=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.exit_code == STORAGE
    assert tokenize_corpus(prepare_corpus(spec), Console(is_quiet=True)) == 0
    assert _bytes(tmp_path / "tokens") == _bytes(written)


def test_a_folder_that_cannot_be_made_is_told_with_its_key(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"shards\.directory: .*file/tokens cannot be made: Not a directory"):
        tokenize_corpus(prepare_corpus(spec_of(*_declared(corpus, tmp_path / "file/tokens"))), Console(is_quiet=True))


@pytest.mark.parametrize(
    ("with_signal", "bpe"),
    [(signal.SIGINT, False), (signal.SIGTERM, True), *(pytest.param(*each, marks=pytest.mark.ci)
                                                      for each in ((signal.SIGTERM, False), (signal.SIGINT, True)))],
)  # fmt: skip
def test_a_signal_stops_it_in_order_and_it_goes_on(corpus, written, tmp_path, monkeypatch, capsys, with_signal, bpe):
    """In the middle of the corpus; with a BPE, in its training."""
    monkeypatch.setattr(tokenize_module, "BATCH_BYTES", 50_000)
    chosen = ("shards.bpe_vocab_size=300",) if bpe else ()
    spec = spec_of(*_declared(corpus, tmp_path / "tokens", *chosen))
    job = prepare_corpus(spec)
    slow = [replace(part, read=_signalling(part.read, with_signal)) for part in job.parts]
    monkeypatch.setattr(command, "corpus_parts", lambda source, where: slow)
    assert tokenize_corpus(job, Console(is_quiet=True)) == 128 + with_signal
    assert f"stopped by {with_signal.name}" in capsys.readouterr().err
    monkeypatch.undo()
    assert 0 < _tokens_done(tmp_path / "tokens") < 1_500_000 or bpe
    assert tokenize_corpus(prepare_corpus(spec), Console(is_quiet=True)) == 0
    assert bpe or _bytes(tmp_path / "tokens") == _bytes(written)


def _signalling(read, with_signal):
    """A reader that is hit by a signal at its 200th document."""

    def documents(first):
        for number, document in enumerate(read(first)):
            if number == 200:
                signal.raise_signal(with_signal)
            yield document

    return documents


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
