"""Sources and tokenizers, each held to an independent reading of the same files."""

import contextlib
import gzip
import importlib
import json
import sys
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece
import tokenizers
from array_record.python.array_record_module import ArrayRecordWriter

from conftest import spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.user_code import code_allowed_from
from meshloom.models import IGNORED_TARGET, PADDING_TARGET
from meshloom.runtime.cli.data import prepare_corpus, show_example
from meshloom.runtime.data import open_data
from meshloom.runtime.data.corpus import open_store
from meshloom.runtime.data.documents import corpus_parts, find_files
from meshloom.runtime.data.store import Split, name_hash
from meshloom.runtime.data.tokenizers import open_tokenizer, train_bpe
from support.chats import CHATML, turns, write_folder, write_lines
from support.wrong_data import write_wrong_data

TEXTS = [f"{'wörd ' * (n % 7)}document {n}\n{'x' * n}" for n in range(300)] + ["", "<|endoftext|> </s> is text"]
NUM_PAIRS = 60


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The same texts in every format, in two files each."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "text" / f"{number:04}.txt").write_text(text)
    for name, texts in (("a", TEXTS[:100]), ("b", TEXTS[100:])):
        lines = "".join(json.dumps({"body": text, "id": 3}) + "\n\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines)
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        table = pyarrow.table({"body": texts, "id": list(range(len(texts)))})
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=30)
        writer = ArrayRecordWriter(str(folder / f"{name}.array_record"), "group_size:1")
        for text in texts:
            writer.write(text.encode())
        writer.close()
    with contextlib.chdir(folder):
        yield folder


@pytest.fixture(scope="module")
def bpe(corpus):
    """A BPE file, trained on the texts."""
    path = corpus / "bpe.json"
    train_bpe([text.encode() for text in TEXTS], 400, path)
    return path


@pytest.fixture(scope="module")
def sentencepiece_model(corpus):
    prefix = str(corpus / "model")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=prefix, vocab_size=60, minloglevel=2
    )
    return corpus / "model.model"


KINDS = {
    "text_files": ("data=text_files", "data.source.paths=[text/*.txt]"),
    "jsonl": ("data=jsonl", "data.source.paths=[*.jsonl]", "data.source.text_key=body"),
    "gzip": ("data=jsonl", "data.source.paths=[a.jsonl.gz,b.jsonl.gz]", "data.source.text_key=body"),
    "parquet": ("data=parquet", "data.source.paths=[*.parquet]", "data.source.text_column=body"),
    "array_record": ("data=array_record", "data.source.paths=[*.array_record]"),
}


def _store(*overrides):
    data: Any = spec_of(*overrides).data
    return open_store(data, data.source, "data.source", open_tokenizer(data.tokenizer) if data.tokenizer else None)


def _documents(store):
    """Each document's tokens, from the tables of the shards."""
    documents = []
    for shard in store.shards:
        ends = shard.documents[:, 0].astype(int).tolist()
        documents += [shard.tokens[a:b].tolist() for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    return documents


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_texts_that_were_written(corpus, kind):  # noqa: ARG001
    assert _documents(_store(*KINDS[kind])) == [[*text.encode(), 256] for text in TEXTS if text]


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_read_from_any_document_on(corpus, kind):  # noqa: ARG001
    source: Any = spec_of(*KINDS[kind]).data.source
    part = corpus_parts(source, "data.source")[-1]
    every = list(part.read(0))
    for first in {0, 1, 29, 30, 31, 150, len(every)}:
        assert list(part.read(first)) == every[first:]


def test_a_document_is_held_out_by_its_name_wherever_the_corpus_lies(corpus, tmp_path):
    (tmp_path / "elsewhere").symlink_to(corpus / "text")
    here = _store(*KINDS["text_files"])
    there = _store("data=text_files", f"data.source.paths=[{tmp_path}/elsewhere/*.txt]")
    assert here.content == there.content
    hashes = here.shards[0].documents[:, 1].tolist()
    assert hashes == [name_hash(f"{number:04}.txt") for number, text in enumerate(TEXTS) if text]


def test_a_change_of_one_byte_is_another_corpus(corpus):
    path = corpus / "text" / "0007.txt"
    before, text = _store(*KINDS["text_files"]).content, path.read_text()
    path.write_text(text[:-1] + "y")
    after = _store(*KINDS["text_files"]).content
    path.write_text(text)
    assert before != after
    assert before == _store(*KINDS["text_files"]).content


def test_a_file_that_two_patterns_match_is_taken_once(corpus):
    patterns = f"text/*.txt,text/**/*.txt,text/0001.txt,{corpus}/text/*.txt"
    twice = _store("data=text_files", f"data.source.paths=[{patterns}]")
    assert (twice.num_documents, twice.num_empty) == (len(TEXTS) - 1, 1)


def test_the_stdlib_is_real_text_and_only_the_stdlib():
    source: Any = spec_of("data=python_stdlib").data.source
    names = [part.name for part in corpus_parts(source, "data.source")]
    assert len(names) > 500
    assert "argparse.py" in names
    assert not [name for name in names if "site-packages" in name]


# Tokenizers, against their own libraries.


def test_huggingface_tokens_are_those_of_the_library(bpe):
    library = tokenizers.Tokenizer.from_file(str(bpe))
    library.encode_special_tokens = True  # what looks like one in a text is text
    store = _store(*KINDS["jsonl"], "data/tokenizer=huggingface", f"data.tokenizer.path={bpe}")
    end = library.token_to_id("<|endoftext|>")
    documents = _documents(store)
    assert documents == [[*library.encode(text, add_special_tokens=False).ids, end] for text in TEXTS if text]
    assert [library.decode(tokens[:-1]) for tokens in documents] == list(filter(None, TEXTS))
    assert end not in [token for tokens in documents for token in tokens[:-1]]
    assert store.tokenizer.vocab_size == library.get_vocab_size() == 400


def test_sentencepiece_tokens_are_those_of_the_library(sentencepiece_model):
    library = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    override = f"data.tokenizer.path={sentencepiece_model}"
    store = _store(*KINDS["jsonl"], "data/tokenizer=sentencepiece", override)
    assert _documents(store) == [[*library.encode(text), library.eos_id()] for text in TEXTS if text]
    assert store.tokenizer.vocab_size == library.vocab_size() == 60
    named = _store(*KINDS["jsonl"], "data/tokenizer=sentencepiece", override, "data.tokenizer.end_of_document='<s>'")
    assert named.tokenizer.end_of_document == library.bos_id()


def test_the_loss_is_per_byte_for_bytes_alone(bpe):
    short = ("sequence_length=4", "global_batch_size=8", "evaluation.num_batches=1", "model.vocab_size=400")
    assert open_data(spec_of(*KINDS["jsonl"], *short)).token_unit == "byte"
    other = ("data/tokenizer=huggingface", f"data.tokenizer.path={bpe}")
    assert open_data(spec_of(*KINDS["jsonl"], *other, *short)).token_unit == "token"


def _problem(*overrides):
    with pytest.raises(ConfigError) as error:
        open_data(spec_of(*overrides))
    (problem,) = error.value.problems
    return problem


def test_a_tokenizer_larger_than_the_vocabulary_is_an_error(bpe):
    short = ("sequence_length=4", "global_batch_size=8", "evaluation.num_batches=1")
    problem = _problem(*KINDS["jsonl"], *short, "data/tokenizer=huggingface", f"data.tokenizer.path={bpe}")
    assert problem.where == "model.vocab_size"
    assert problem.fix.startswith("use 400 or more, or the tokenizer that the weights")


def test_the_end_of_a_document_must_be_a_token_and_clear(bpe, corpus):
    chosen = ("data/tokenizer=huggingface", f"data.tokenizer.path={bpe}")
    problem = _problem(*KINDS["jsonl"], *chosen, "data.tokenizer.end_of_document='<|endoftex|>'")
    assert "did you mean '<|endoftext|>'?" in problem.fix
    several = json.loads(bpe.read_text())
    several["added_tokens"].append({**several["added_tokens"][0], "id": 400, "content": "<pad>"})
    (corpus / "several.json").write_text(json.dumps(several))
    problem = _problem(*KINDS["jsonl"], "data/tokenizer=huggingface", "data.tokenizer.path=several.json")
    assert problem.where == "data.tokenizer.end_of_document"
    assert "<|endoftext|>, <pad>" in problem.fix


# What is wrong with files (config_errors.txt has the others).


@pytest.fixture
def wrong(tmp_path):
    write_wrong_data(tmp_path)
    with contextlib.chdir(tmp_path):
        yield tmp_path


def test_text_that_is_no_utf8_is_an_error_that_names_the_file_and_byte(wrong, bpe):  # noqa: ARG001
    chosen = ("data=text_files", "data.source.paths=[corpus/latin1.text]")
    problem = _problem(*chosen, "data/tokenizer=huggingface", f"data.tokenizer.path={bpe}")
    assert problem.what == "document 'latin1.text' is not UTF-8 at byte 1"
    assert _store(*chosen).num_tokens == 31  # bytes are bytes


def test_a_file_that_cannot_be_read_is_an_error():
    problem = _problem("data=text_files", "data.source.paths=[/proc/self/mem]")  # it is there, and reading it fails
    assert (problem.where, problem.what) == ("/proc/self/mem", "cannot be read: Input/output error")


@pytest.mark.parametrize("key", ["doc.text", "doc.meta.title"])
def test_a_name_with_dots_goes_into_objects_as_it_does_in_a_table(tmp_path, key):
    rows = [{"doc": {"text": f"text {n}\u2028", "meta": {"title": f"title {n}"}}} for n in range(3)] + [{"doc": None}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    jsonl = ("data=jsonl", f"data.source.paths=[{tmp_path}/a.jsonl]", f"data.source.text_key={key}")
    table = ("data=parquet", f"data.source.paths=[{tmp_path}/a.parquet]", f"data.source.text_column={key}")
    expected = [f"text {n}\u2028" if key == "doc.text" else f"title {n}" for n in range(3)]
    assert _documents(_store(*jsonl)) == [[*text.encode(), 256] for text in expected]
    assert _documents(_store(*table)) == _documents(_store(*jsonl))


def test_a_key_that_is_not_there_is_named_with_those_that_are(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"a.b": "whole", "doc": {"body": "text"}}) + "\n")
    words = ("data=jsonl", f"data.source.paths=[{tmp_path}/a.jsonl]")
    assert _documents(_store(*words, "data.source.text_key=a.b")) == [[*b"whole", 256]]
    for key, fix in (("doc.text", "doc.body"), ("doc", "doc.body"), ("doc.body.text", "doc.body")):
        assert fix in _problem(*words, f"data.source.text_key={key}").fix


def test_damaged_files_are_errors(wrong, corpus):
    for name in ("a.jsonl.gz", "a.array_record", "a.parquet"):
        data = bytearray((corpus / name).read_bytes())
        data[len(data) // 2 :] = b"x" * (len(data) - len(data) // 2)
        (wrong / name).write_bytes(data)
        kind = next(kind for kind in ("jsonl", "array_record", "parquet") if kind in name)
        extra = {"jsonl": ("data.source.text_key=body",), "parquet": ("data.source.text_column=body",)}.get(kind, ())
        with pytest.raises(ConfigError) as error:
            open_data(spec_of(f"data={kind}", f"data.source.paths=[{wrong}/{name}]", *extra))
        assert name in error.value.problems[0].where, error.value


@pytest.mark.parametrize(
    ("package", "overrides"),
    [
        ("pyarrow", KINDS["parquet"]),
        ("tokenizers", ("data/tokenizer=huggingface", "data.tokenizer.path=bpe.json")),
        ("sentencepiece", ("data/tokenizer=sentencepiece", "data.tokenizer.path=model.model")),
    ],
)
def test_a_missing_package_is_an_error_that_says_how_to_install_it(
    bpe, sentencepiece_model, monkeypatch, package, overrides  # noqa: ARG001
):  # fmt: skip
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails as if it were not there
    problem = _problem(*overrides)
    assert package in problem.what
    assert problem.fix == "pip install 'meshloom[data]'"


# A class of the user's.


@pytest.fixture
def my_code(wrong, monkeypatch):
    monkeypatch.syspath_prepend(str(wrong))
    sys.modules.pop("my_code", None)
    with code_allowed_from(["my_code"]):
        yield importlib.import_module("my_code")
    sys.modules.pop("my_code", None)


def _user(name, *overrides):
    return ("data=python", f"data.source.object=my_code:{name}", *overrides)


def test_a_users_documents_are_read(my_code):  # noqa: ARG001
    store = _store(*_user("Documents", "data.source.arguments={count:30,text:'ö'}"))
    assert _documents(store) == [[*f"ö{number}".encode(), 256] for number in range(30)]


SHORT = ("sequence_length=8", "global_batch_size=8", "evaluation.num_batches=1", "data.held_out_fraction=0.2",
         "data.source.items=sequences", "data.num_prefetch_threads=1")  # fmt: skip


def test_a_users_sequences_are_drawn_as_they_are_and_a_failing_one_names_its_index(my_code, monkeypatch):
    spec = spec_of(*_user("Sequences", "data.source.arguments.count=100"), *SHORT)
    monkeypatch.setattr(my_code.Sequences, "__getitem__", lambda self, index: [index] * 6)
    data = open_data(spec)
    drawn = [row for batch in (next(iter(data["train"])), next(iter(data["held_out"]))) for row in batch["inputs"]]
    assert all(row.tolist() == [row[0]] * 5 + [0] * 3 for row in drawn)
    assert len({int(row[0]) for row in drawn}) == 16


def test_a_users_exception_in_a_run_names_index_and_place(my_code):  # noqa: ARG001
    batches = iter(open_data(spec_of(*_user("Sequences", "data.source.arguments.count=100"), *SHORT))["train"])
    with pytest.raises(ConfigError) as error:
        list(zip(range(30), batches, strict=False))
    (problem,) = error.value.problems
    assert problem.what.startswith("my_code:Sequences[3] failed: KeyError: 'a key'\n    my_code.py:")
    assert "_look_up" in problem.what


@pytest.mark.parametrize(
    ("item", "told"),
    [
        ("[1]", "has 1 token"),
        ("[1] * 10", "has 10 tokens"),
        ("'text'", "is a str"),
        ("{'inputs': [1] * 8}", "has the keys inputs"),
        ("{'inputs': [1] * 8, 'targets': [1] * 7}", "has 'targets' of shape (7,) and type int64"),
        ("{'inputs': [-1] * 8, 'targets': [1] * 8}", "has -1 in 'inputs'"),
        ("[700] * 9", "holds token 700; the model has tokens 0 to 263"),
    ],
)
def test_a_users_wrong_sequence_is_an_error(my_code, monkeypatch, item, told):
    monkeypatch.setattr(my_code.Sequences, "__getitem__", lambda self, index: eval(item))
    with pytest.raises(ConfigError, match=r"my_code|global batch") as error:
        next(iter(open_data(spec_of(*_user("Sequences", "data.source.arguments.count=100"), *SHORT))["train"]))
    assert told in str(error.value)


def test_a_users_arrays_are_passed_on(my_code, monkeypatch):
    arrays = {"inputs": np.arange(8), "targets": np.full(8, -1), "positions": np.arange(8), "segment_ids": np.array([1] * 6 + [0] * 2)}  # fmt: skip  # noqa: E501
    monkeypatch.setattr(my_code.Sequences, "__getitem__", lambda self, index: arrays)
    spec = spec_of(*_user("Sequences", "data.source.arguments.count=100"), *SHORT, "data.isolate_documents=true")
    batch = next(iter(open_data(spec)["train"]))
    arrays["targets"] = np.array([IGNORED_TARGET] * 6 + [PADDING_TARGET] * 2)  # where they are in no document
    assert {name: array[3].tolist() for name, array in batch.items()} == {k: v.tolist() for k, v in arrays.items()}


def test_a_directory_is_not_taken_for_a_file(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"corpus/' is a directory\n  fix: name the files in it: .*corpus/\*\*/\*$"):
        find_files([f"{tmp_path}/corpus/"], "data.source.paths")
    assert [file.name for file in find_files([f"{tmp_path}/corpus/**/*"], "data.source.paths")] == ["a.txt"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("pairs") / "chatml", "chatml", CHATML)


@pytest.fixture(scope="module")
def path(folder):
    """Answers that are a letter and the number of their pair, in both forms of a line."""
    lines = []
    for number in range(NUM_PAIRS):
        answers = {side: [{"role": "assistant", "content": f"{side[0]}{number}."}] for side in ("chosen", "rejected")}
        prompt = [{"role": "user", "content": f"Which? {number}"}]
        whole = {side: [*prompt, *answer] for side, answer in answers.items()}
        lines.append({"prompt": prompt, **answers} if number % 2 else whole)
    return write_lines(folder.parent / "pairs.jsonl", *lines)


def declared(folder, path, *more):
    return spec_of(
        "data=preferences", f"data.source.paths=[{path}]", f"data.tokenizer.path={folder}", "model.vocab_size=1100",
        "objective=simpo", "global_batch_size=4", "target=cpu-1", "sequence_length=64", "evaluation.num_batches=1",
        "data.held_out_fraction=0.2", "num_steps=10", *more,
    )  # fmt: skip


def test_rows_of_a_pair_are_side_by_side_and_in_one_split(folder, path):
    spec = declared(folder, path)
    data = open_data(spec)
    seen: dict[Split, set[str]] = {"train": set(), "held_out": set()}
    assert spec.data.tokenizer is not None
    tokenizer = open_tokenizer(spec.data.tokenizer)
    for split in seen:
        for batch, _ in zip(data[split], range(10), strict=False):
            said = [tokenizer.decode([t for t in row.tolist() if t >= 0]) for row in batch["targets"]]
            for chosen, rejected in zip(said[0::2], said[1::2], strict=True):
                assert chosen[0] == "c"
                assert rejected == chosen.replace("c", "r")
                seen[split].add(chosen)
            assert (batch["targets"] == PADDING_TARGET).any()
    assert not seen["train"] & seen["held_out"]
    assert len(seen["train"]) >= 15  # shuffled, so of all of the file
    assert data.token_unit == "pair"


def test_a_reference_goes_with_its_row(folder, path):
    data = open_data(declared(folder, path))
    for sequences in data.pairs:
        sequences.reference = np.array(
            [row["inputs"].sum() for row in map(sequences.__getitem__, range(len(sequences)))]
        )
    batch = next(iter(data["train"]))
    np.testing.assert_array_equal(batch["reference"], batch["inputs"].sum(axis=1))


def test_a_pair_in_which_one_answer_has_nothing_to_learn_is_left_out_whole(path, tmp_path):
    """Left alone, the other answer would make a pair with the next one's."""
    template = CHATML.replace("if m.role == 'assistant'", "if m.role == 'assistant' and m.content")
    folder = write_folder(tmp_path / "tokenizer", "chatml", template)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[3]["rejected"][0]["content"] = ""
    data = open_data(declared(folder, write_lines(tmp_path / "one.jsonl", *lines), "data.held_out_fraction=0"))
    assert "1 pair without two answers that differ left out" in data.summary
    assert sum(map(len, data.pairs)) == 2 * (NUM_PAIRS - 1)


WRONG = {
    "no pairs": (("data=synthetic", "objective=dpo"), "dpo compares pairs, and data.source.kind=synthetic holds none"),
    "pairs as documents": (("objective=next_token",), "next_token learns from documents"),
    "another packing": (("data.packing=first_fit",), "is first_fit, and objective=simpo compares pairs"),
    "z-loss": (("loss.z_loss_weight=1e-4",), "not implemented for objective=simpo"),
    "split by position": (("data.held_out_by=position",), "could hold out one document of a pair"),
}


@pytest.mark.parametrize("name", WRONG)
def test_data_and_objective_fit_together(folder, path, name):
    overrides, said = WRONG[name]
    spec = spec_of("global_batch_size=4", "target=cpu-1", *overrides) if name == "no pairs" else declared(folder, path, *overrides)  # fmt: skip  # noqa: E501
    with pytest.raises(ConfigError, match=said):
        open_data(spec)


def test_a_line_that_is_no_pair_is_named(folder, tmp_path):
    lines = [{"prompt": "a", "chosen": "b"}, {"chosen": turns("a", "b"), "rejected": "c"}]
    with pytest.raises(ConfigError) as error:
        open_data(declared(folder, write_lines(tmp_path / "wrong.jsonl", *lines)))
    first, second = error.value.problems
    assert first.where.endswith("wrong.jsonl:1")
    assert "has no key 'rejected'" in first.what
    assert second.where.endswith("wrong.jsonl:2")
    assert "'rejected' is str, not a list of messages" in second.what


def test_pairs_are_shown_both_and_not_written_as_documents(folder, path, tmp_path, capsys):
    spec = declared(folder, path, f"shards.directory={tmp_path / 'tokens'}")
    with pytest.raises(ConfigError, match="a run would learn the rejected answers"):
        prepare_corpus(spec)
    assert not (tmp_path / "tokens").exists()
    show_example(spec)
    shown = capsys.readouterr().out
    assert [line.split(":")[1] for line in shown.splitlines() if line.startswith("pairs")] == [
        "0, chosen",
        "0, rejected",
    ]
    assert "[[c0." in shown
    assert "[[r0." in shown
