"""From tokens to global batches: what is drawn, in which rows, what is held out, where it resumes."""

import json
from collections import Counter

import numpy as np
import pytest

from conftest import spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.sharding.batch import batch_arrays
from meshloom.models import IGNORED_TARGET, PADDING_TARGET
from meshloom.runtime.data import open_data
from meshloom.runtime.data.batches import BatchSource, converted_state
from meshloom.runtime.data.packing import ConcatenatedSequences, PackedSequences, cut_documents, plan_first_fit
from meshloom.runtime.data.splits import describe_documents
from meshloom.runtime.data.store import Shard, TokenStore, TokenStream, name_hash
from meshloom.runtime.data.tokenizers import Bytes, TokenizerIdentity

END = 999
IDENTITY = TokenizerIdentity("test", "", 1000, END)


def _store(lengths, num_shards=1, seed=0):
    """Documents of random tokens, each with END at its end; and the documents, as lists."""
    chance = np.random.default_rng(seed)
    documents = [[*chance.integers(0, END, n - 1).tolist(), END] for n in lengths]
    shards = []
    for some in np.array_split(np.arange(len(documents)), num_shards):
        mine = [documents[i] for i in some]
        ends = np.cumsum([len(d) for d in mine])
        table = np.array([(end, name_hash(str(i))) for end, i in zip(ends, some, strict=True)], "<u8").reshape(-1, 2)
        shards.append(Shard(np.array([t for d in mine for t in d], np.uint16), table))
    return TokenStore(tuple(shards), IDENTITY, "", END), documents


def _all(lengths, **kwargs):
    """The stream of a store of which nothing is held out, and its documents."""
    store, documents = _store(lengths, **kwargs)
    return TokenStream(store, "train", 0.0), documents


LENGTHS = [5, 9, 1, 2, 3, 40, 8, 16, 1, 1, 7, 30]


@pytest.mark.parametrize("num_shards", [1, 3, 12])
def test_a_stream_is_its_documents_end_to_end(num_shards):
    stream, documents = _all(LENGTHS, num_shards=num_shards)
    tokens = np.array([token for document in documents for token in document])
    assert len(stream) == len(tokens)
    chance = np.random.default_rng(1)
    for start, stop in [(0, len(tokens)), *np.sort(chance.integers(0, len(tokens) + 1, (200, 2)), axis=1)]:
        np.testing.assert_array_equal(stream.read(int(start), int(stop)), tokens[start:stop])


@pytest.mark.parametrize("num_shards", [7, 2000])
def test_splits_are_all_documents_and_each_once_by_the_hash_of_the_name(num_shards):
    store, documents = _store([3] * 4000, num_shards=num_shards)
    held_out, train = (TokenStream(store, split, 0.1) for split in ("held_out", "train"))
    drawn = [tuple(s.read(3 * i, 3 * i + 3)) for s in (held_out, train) for i in range(len(s) // 3)]
    assert Counter(drawn) == Counter(map(tuple, documents))
    chosen = [tuple(d) for i, d in enumerate(documents) if name_hash(str(i)) / 2**64 < 0.1]
    assert [tuple(held_out.read(3 * i, 3 * i + 3)) for i in range(len(held_out) // 3)] == chosen
    assert 0.08 < len(chosen) / 4000 < 0.12


@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.37, 0.99])
def test_splits_by_position_are_the_beginning_and_the_end(num_shards, fraction):
    store, documents = _store([5, 300, 7, 1, 90, 44, 600, 3], num_shards)
    every = [token for document in documents for token in document]
    train, held_out = (TokenStream(store, split, fraction, "position") for split in ("train", "held_out"))
    assert len(held_out) == int(fraction * len(every))
    assert [*train.read(0, len(train)), *held_out.read(0, len(held_out))] == every
    numbers = [i for i, document in enumerate(documents) for _ in document]
    for stream, offset in ((train, 0), (held_out, len(train))):
        for start in range(0, len(stream) - 10, 97):
            here = numbers[offset + start : offset + start + 10]
            assert stream.documents_at(start, start + 10) == tuple(dict.fromkeys(here))


def test_one_document_is_a_corpus(tmp_path):
    """Split by its position, or with nothing held out; the advice that is given is one that works."""
    (tmp_path / "book.txt").write_text("".join(f"Sentence {n}. " for n in range(2000)))
    words = ("data=text_files", f"data.source.paths=[{tmp_path}/book.txt]", "sequence_length=64", "num_steps=4",
             "global_batch_size=8", "evaluation.num_batches=1")  # fmt: skip
    for little in ("data.held_out_fraction=0.001", "data.held_out_by=position"):  # too little for a sequence
        with pytest.raises(ConfigError, match=r"data\.held_out_fraction=0, which holds out nothing"):
            open_data(spec_of(*words, little, "data.held_out_fraction=0.001"))
    with pytest.raises(ConfigError, match=r"data\.held_out_by=position"):
        open_data(spec_of(*words, "data.held_out_fraction=0.1"))
    data = open_data(spec_of(*words, "data.held_out_fraction=0.1", "data.held_out_by=position"))
    assert bytes(next(iter(data["held_out"]))["inputs"][0].tolist()).decode().split(". ")[1].startswith("Sentence 1")
    data = open_data(spec_of(*words, "data.held_out_fraction=0"))
    assert list(data["held_out"]) == []
    assert len(data["train"]) > 100


def test_concatenation_skips_nothing_and_targets_are_the_next_tokens():
    stream, documents = _all(LENGTHS)
    tokens = [token for document in documents for token in document]
    sequences = ConcatenatedSequences(stream, 10, isolate_documents=False)
    rows = [sequences[i] for i in range(len(sequences))]
    assert len(rows) == (len(tokens) - 1) // 10
    np.testing.assert_array_equal(np.concatenate([row["inputs"] for row in rows]), tokens[: 10 * len(rows)])
    np.testing.assert_array_equal(np.concatenate([row["targets"] for row in rows]), tokens[1 : 10 * len(rows) + 1])
    exactly, _ = _all([10])
    assert len(ConcatenatedSequences(exactly, 10, isolate_documents=False)) == 0  # the last target is missing


def _reference_row(pieces, length, isolate):
    """The arrays of a row by the words of docs/data.md, token by token. pieces: (document, start, stop)."""
    row = {name: [] for name in ("inputs", "targets", "positions", "segment_ids")}
    for number, (document, start, stop) in enumerate(pieces):
        for at in range(start, stop):
            row["inputs"].append(document[at])
            if at + 1 < len(document):
                target = document[at + 1]
            elif isolate or number + 1 == len(pieces):
                target = IGNORED_TARGET
            else:
                target = pieces[number + 1][0][pieces[number + 1][1]]
            row["targets"].append(target)
            row["positions"].append(at - start)
            row["segment_ids"].append(number + 1)
    padding = length - len(row["inputs"])
    for name, value in (("inputs", 0), ("targets", PADDING_TARGET), ("positions", 0), ("segment_ids", 0)):
        row[name] += [value] * padding
    return row if isolate else {name: row[name] for name in ("inputs", "targets")}


def _assert_row(row, reference):
    assert {name: array.tolist() for name, array in row.items()} == reference
    assert all(array.dtype == np.int32 for array in row.values())


def test_isolated_documents_have_their_own_positions_and_their_ends_predict_nothing():
    stream, documents = _all(LENGTHS, num_shards=2)
    sequences = ConcatenatedSequences(stream, 8, isolate_documents=True)
    places = [(document, at) for document in documents for at in range(len(document))]
    for i in range(len(sequences)):
        pieces = []
        for document, at in places[8 * i : 8 * i + 8]:
            if pieces and pieces[-1][0] is document:
                pieces[-1][2] = at + 1
            else:
                pieces.append([document, at, at + 1])
        _assert_row(sequences[i], _reference_row(pieces, 8, isolate=True))


def _brute_first_fit(documents, length):
    """Rows of (document, start, stop), each piece in the first row with room for it, by looking at every row."""
    rows = []
    for document in documents:
        for start in range(0, len(document), length):
            piece = (document, start, min(start + length, len(document)))
            size = piece[2] - start
            fitting = (row for row in rows if sum(stop - first for _, first, stop in row) + size <= length)
            row = next(fitting, None)
            if row is None:
                rows.append(row := [])
            row.append(piece)
    return rows


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_first_fit_is_that_of_a_brute_force_packer(isolate, seed):
    lengths = np.random.default_rng(seed).geometric(0.1, 300).tolist()
    stream, documents = _all(lengths, num_shards=3, seed=seed)
    sequences = PackedSequences(stream, 16, isolate_documents=isolate)
    rows = _brute_first_fit(documents, 16)
    assert len(sequences) == len(rows)
    for i, pieces in enumerate(rows):
        _assert_row(sequences[i], _reference_row(pieces, 16, isolate))
    assert sequences.fill == sum(lengths) / (16 * len(rows))
    assert sequences.fill > 0.9


def test_first_fit_of_more_rows_than_its_first_tree_holds():
    sizes = np.random.default_rng(0).integers(1, 9, 6000)
    plan = plan_first_fit(*cut_documents(np.cumsum(sizes), 8), 8)
    room, rows = [8] * 6000, []
    for size in sizes.tolist():
        row = next(i for i, left in enumerate(room) if left >= size)
        room[row] -= size
        rows.append(row)
    assert max(rows) > 2048
    found = np.repeat(np.arange(len(plan.firsts) - 1), np.diff(plan.firsts))
    by_document = found[np.argsort(plan.starts)]
    np.testing.assert_array_equal(by_document, rows)


def test_bytes_are_tokens_and_come_back():
    text = "def ü():\n\treturn '\x00'\n".encode()
    (tokens,) = Bytes().encode([text])
    assert tokens[-1] == Bytes.identity.end_of_document == 256
    assert bytes(tokens[:-1].astype(np.uint8)) == text


# Batches of a run.


def _take(spec, count, rows=None):
    batches = open_data(spec)["train"]
    iterator = iter(batches if rows is None else batches.of_rows(rows))
    return [next(iterator) for _ in range(count)]


def _assert_same(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def test_batches_are_the_same_each_time_and_differ_by_seed_and_number():
    first = _take(spec_of(), 3)
    _assert_same(first, _take(spec_of(), 3))
    assert not np.array_equal(first[0]["inputs"], _take(spec_of("data.shuffle_seed=1"), 1)[0]["inputs"])
    assert not np.array_equal(first[0]["inputs"], first[1]["inputs"])


@pytest.mark.parametrize("isolate", ["true", "false"])
@pytest.mark.parametrize("packing", ["concatenate", "first_fit"])
def test_a_batch_has_the_arrays_that_the_compiler_says(packing, isolate):
    spec = spec_of(f"data.packing={packing}", f"data.isolate_documents={isolate}")
    (batch,) = _take(spec, 1)
    assert tuple(batch) == batch_arrays(spec)
    assert all(array.shape == (16, 16) and array.dtype == np.int32 for array in batch.values())


def test_rows_are_those_of_the_global_batch():
    whole = _take(spec_of(), 4)
    rows = [3, 8, 9, 0]
    _assert_same(_take(spec_of(), 4, rows), [{name: x[rows] for name, x in batch.items()} for batch in whole])


@pytest.mark.parametrize("rows", [None, [5, 1]])
def test_a_state_is_one_number_for_any_rows_and_threads(rows):
    spec, threaded = spec_of(), spec_of("data.num_prefetch_threads=3", "data.num_prefetch_batches=7")
    batches = iter(open_data(spec)["train"])
    for _ in range(5):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    assert state == {"next_batch": 5}
    expected = [next(batches) for _ in range(20)]
    data = open_data(threaded)["train"]
    other = iter(data if rows is None else data.of_rows(rows))
    next(other)
    other.set_state(state)
    assert other.get_state() == state
    wanted = expected if rows is None else [{name: x[rows] for name, x in batch.items()} for batch in expected]
    _assert_same([next(other) for _ in range(20)], wanted)


@pytest.mark.parametrize(("before", "now", "skipped"), [(8, 16, 8), (16, 8, 0), (24, 16, 8), (8, 24, 0)])
def test_batches_of_another_size_go_on_at_the_same_sequence(before, now, skipped):
    rows = {}
    for size in (before, now):
        batches = open_data(spec_of("data=synthetic", f"global_batch_size={size}", "num_steps=1"))["train"]
        first = [batch["inputs"] for _, batch in zip(range(96 // size), batches, strict=False)]
        rows[size] = np.concatenate(first).tolist()
    assert rows[before] == rows[now]  # one order
    state, found = converted_state({"next_batch": 3}, before, now)
    assert found == skipped
    iterator = iter(batches)
    iterator.set_state(state)
    assert next(iterator)["inputs"].tolist() == rows[now][3 * before + skipped : 3 * before + skipped + now]


def test_a_token_that_the_model_does_not_have_is_an_error():
    rows = [{"inputs": np.array([0, token], np.int32), "targets": np.array([token, -1], np.int32)} for token in (4, 5)]
    batches = BatchSource(rows, batch_size=1, num_batches=2, rows=[0], vocab_size=5)
    assert batches[0]["inputs"].tolist() == [[0, 4]]
    with pytest.raises(ConfigError, match=r"global batch 1 holds token 5.*\n.*model\.vocab_size=6 or more"):
        batches[1]


def test_an_epoch_sees_every_sequence_once_and_the_next_in_another_order():
    spec = spec_of("sequence_length=512", "global_batch_size=8", "evaluation.num_batches=1", "data.num_epochs=2")
    data = open_data(spec)["train"]
    drawn = [row.tobytes() for batch in data for row in batch["inputs"]]
    num_sequences = len(set(drawn))
    assert len(data) * 8 == len(drawn)
    assert len(set(drawn[:num_sequences])) == num_sequences  # the first epoch
    assert max(Counter(drawn).values()) == 2
    assert drawn[:num_sequences] != drawn[num_sequences : 2 * num_sequences]


def test_held_out_batches_are_the_same_each_time_and_for_every_seed():
    one, other, another_seed = (
        list(open_data(spec_of("evaluation.num_batches=2", f"data.shuffle_seed={seed}"))["held_out"])
        for seed in (0, 0, 1)
    )
    assert len(one) == 2
    _assert_same(one, other)
    _assert_same(one, another_seed)


def test_held_out_batches_are_as_many_as_the_data_have():
    spec = spec_of("evaluation.num_batches=100000", "sequence_length=512")
    data = open_data(spec)
    (corpus,) = data.opened.corpora
    trained_on = [any(row >= 0) for batch in data["held_out"] for row in batch["targets"]]
    assert sum(trained_on) == len(corpus.sequences["held_out"])
    assert len(trained_on) == -(-sum(trained_on) // 16) * 16


@pytest.mark.parametrize("target", ["cpu-1", "cpu-8"])
def test_the_fix_for_too_little_data_works(tmp_path, target):
    """Ten documents of some sequences: the batch, or the length, that the error names is one that the data fill."""
    for n in range(10):
        (tmp_path / f"{n}.txt").write_text(f"{n} " * 500)
    words = ("data=text_files", f"data.source.paths=[{tmp_path}/*.txt]", f"target={target}", "num_steps=2",
             "global_batch_size=64", "data.held_out_fraction=0.3", "sequence_length=256")  # fmt: skip
    with pytest.raises(ConfigError, match="its train split has") as error:
        open_data(spec_of(*words))
    (problem,) = error.value.problems
    for fix in problem.fix.removeprefix("use ").split(", or ")[:2]:
        assert open_data(spec_of(*words, fix))


def test_steps_are_counted_from_epochs():
    words = "sequence_length=512", "data.num_epochs=2", "num_steps=null"
    data = open_data(spec_of(*words))
    assert data.opened.spec.num_steps == len(data["train"])
    (corpus,) = data.opened.corpora
    assert len(data["train"]) == 2 * len(corpus.sequences["train"]) // 16
    assert f" passes in {len(data['train'])} steps" in data.summary
    assert open_data(spec_of(*words, "num_steps=7")).opened.spec.num_steps == 7


def test_data_that_end_before_the_run_are_an_error_with_the_numbers_that_work():
    with pytest.raises(ConfigError) as error:
        open_data(spec_of("data.num_epochs=1", "num_steps=6000"))
    (problem,) = error.value.problems
    assert problem.where == "data.num_epochs"
    epochs, steps = (int(problem.fix.split(f"{key}=")[1].split()[0]) for key in ("num_epochs", "num_steps"))
    assert open_data(spec_of(f"data.num_epochs={epochs}", "num_steps=6000"))
    assert len(open_data(spec_of("data.num_epochs=1", f"num_steps={steps}"))["train"]) == steps


PARTS = "data.source.parts={{a:{{weight:{},source:{{kind:synthetic}}}},b:{{weight:{},source:{{kind:python_stdlib}}}}}}"


def _mixture(a, b, *overrides):
    return spec_of("data=mixture", PARTS.format(a, b), *overrides)


def test_a_mixture_draws_by_weight_in_any_stretch():
    batches = _take(_mixture(3, 1), 40)
    is_synthetic = np.concatenate([(np.isin(b["inputs"], list(b"0123456789+= \n\0"))).all(axis=1) for b in batches])
    assert abs(is_synthetic.mean() - 0.75) < 0.01
    for stretch in np.split(is_synthetic, 40):
        assert abs(stretch.sum() - 12) <= 1


def test_a_mixture_resumes_and_its_parts_are_drawn_in_their_own_order():
    whole = iter(open_data(_mixture(3, 1))["train"])
    drawn = [next(whole) for _ in range(6)]
    other = iter(open_data(_mixture(3, 1))["train"])
    other.set_state({"next_batch": 4})
    _assert_same([next(other), next(other)], drawn[4:])
    alone = np.concatenate([batch["inputs"] for batch in _take(spec_of(), 6)])
    rows = np.concatenate([batch["inputs"] for batch in drawn])
    of_a = [row for row in rows if (alone == row).all(axis=1).any()]
    np.testing.assert_array_equal(of_a, alone[: len(of_a)])


def test_a_mixture_never_draws_a_part_more_often_than_num_epochs():
    spec = _mixture(1, 1, "data.num_epochs=1", "sequence_length=512", "global_batch_size=8", "evaluation.num_batches=1")
    data = open_data(spec)["train"]
    num_synthetic = len(open_data(spec_of("sequence_length=512", "data.num_epochs=1", "global_batch_size=1"))["train"])
    assert len(data) == 2 * num_synthetic // 8


# What a place in the data rests on.


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ((), ()),
        (("data.num_prefetch_threads=2", "data.num_prefetch_batches=9", "data.num_epochs=3"), ()),
        (("data.shuffle_seed=5",), ("data.shuffle_seed",)),
        (("data.packing=first_fit",), ("data.packing",)),
        (("data.isolate_documents=true",), ("data.isolate_documents",)),
        (("data.held_out_fraction=0.06",), ("data.held_out_fraction",)),
        (("sequence_length=8",), ("sequence_length",)),
        (("global_batch_size=8",), ("global_batch_size",)),
        (("data=python_stdlib",), ("data.source.kind", "data.source.num_tokens", "data.source.content")),
    ],
)
def test_identity_differs_by_what_the_order_rests_on(overrides, keys):
    here, there = open_data(spec_of()).identity, open_data(spec_of(*overrides)).identity
    assert tuple(key for key in here if here[key] != there.get(key)) == keys
    assert json.loads(json.dumps(here)) == here


def test_identity_of_a_mixture_has_every_part_and_weight():
    here, there = open_data(_mixture(3, 1)).identity, open_data(_mixture(2, 1)).identity
    assert [key for key in here if here[key] != there[key]] == ["data.source.parts.a.weight"]
    assert here["data.source.parts.b.source.kind"] == "python_stdlib"


@pytest.fixture
def texts(tmp_path) -> dict[str, str]:
    """Documents of letters that no other has, by name."""
    found = {f"{letter}.txt": letter * length for letter, length in zip("abcdefghij", range(40, 240, 20), strict=True)}
    for name, text in found.items():
        (tmp_path / name).write_text(text)
    return found


@pytest.mark.parametrize("packing", ["concatenate", "first_fit"])
def test_the_named_documents_are_those_of_the_row(packing, texts, tmp_path):
    data = open_data(
        spec_of("data=text_files", f"data.source.paths=[{tmp_path}/*.txt]", f"data.packing={packing}", "num_steps=3",
                "data.held_out_fraction=0.3", "global_batch_size=8", "evaluation.num_batches=1", "data.num_epochs=null")
    )  # fmt: skip
    batches = iter(data["train"])
    for _ in range(3):
        position = batches.get_state()
        batch = next(batches)
        located = data.locate(position, range(8))
        for row, one in zip(batch["inputs"], located, strict=True):
            held = {f"{chr(token)}.txt" for token in row if chr(token) in "abcdefghij"}
            assert held <= set(one.names)
            assert len(one.names) == len(one.documents) <= len(held) + 1  # a document's end may be all that is there
            assert set(one.names) <= set(texts)


@pytest.mark.usefixtures("texts")
def test_rows_are_told_in_words(tmp_path):
    data = open_data(
        spec_of("data=text_files", f"data.source.paths=[{tmp_path}/*.txt]", "num_steps=1", "global_batch_size=8",
                "data.held_out_fraction=0.3", "evaluation.num_batches=1", "data.num_epochs=null")
    )  # fmt: skip
    located = data.locate({"next_batch": 0}, [2, 5, 6, 7])
    assert [one.row for one in located] == [2, 5, 6, 7]
    assert describe_documents(located[:1]).endswith(".txt' of data.source")
    told = describe_documents(located)
    assert told.startswith("documents '")
    assert told.endswith(".txt' of data.source, and those of 1 more sequence")
