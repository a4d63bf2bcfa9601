"""The data pipeline: what is drawn, what is held out, where it resumes."""

import numpy as np
import pytest

from conftest import spec_of
from meshloom.compiler.problems import ConfigError
from meshloom.runtime.data import (
    END_OF_DOCUMENT,
    TokenSequences,
    encode,
    open_data,
    python_stdlib,
    synthetic,
    tokens_of_splits,
)


def test_targets_are_the_next_tokens_and_nothing_is_skipped():
    sequences = TokenSequences(np.arange(101, dtype=np.uint16), 10)
    assert len(sequences) == 10
    rows = [sequences[i] for i in range(10)]
    np.testing.assert_array_equal(np.concatenate([row["inputs"] for row in rows]), np.arange(100))
    np.testing.assert_array_equal(np.concatenate([row["targets"] for row in rows]), np.arange(1, 101))
    assert len(TokenSequences(np.arange(10, dtype=np.uint16), 10)) == 0  # the last target is missing


def test_bytes_are_tokens_and_come_back():
    text = "def ü():\n\treturn '\x00'\n".encode()
    tokens = encode(text)
    assert tokens[-1] == END_OF_DOCUMENT
    assert bytes(tokens[:-1].astype(np.uint8)) == text


@pytest.mark.parametrize(("source", "documents"), [("synthetic", synthetic), ("python_stdlib", python_stdlib)])
def test_splits_are_all_documents_and_each_once(source, documents):
    splits = tokens_of_splits(source, 0.05)
    total = sum(len(text) + 1 for _, text in documents())
    assert len(splits["train"]) + len(splits["held_out"]) == total
    assert 0.01 < len(splits["held_out"]) / total < 0.12
    held_out = bytes(splits["held_out"][splits["held_out"] < 256].astype(np.uint8))
    train = bytes(splits["train"][splits["train"] < 256].astype(np.uint8))
    first = held_out[:2000]
    assert first not in train


def test_the_stdlib_is_real_text_and_only_the_stdlib():
    names = [name for name, _ in python_stdlib()]
    assert len(names) > 500
    assert "argparse.py" in names
    assert not [name for name in names if "site-packages" in name]


def test_batches_are_the_same_each_time_and_differ_by_seed():
    def first(*overrides):
        batches = iter(open_data(spec_of(*overrides))["train"])
        return [next(batches)["inputs"] for _ in range(3)]

    np.testing.assert_array_equal(first(), first())
    assert not np.array_equal(first(), first("data.shuffle_seed=1"))
    assert not np.array_equal(first()[0], first()[1])


def test_a_restored_iterator_goes_on_where_it_was():
    data = open_data(spec_of())["train"]
    batches = iter(data)
    for _ in range(5):
        next(batches)
    state = batches.get_state()
    expected = [next(batches)["inputs"] for _ in range(3)]
    other = iter(data)
    other.set_state(state)
    np.testing.assert_array_equal([next(other)["inputs"] for _ in range(3)], expected)


def test_an_epoch_sees_every_sequence_once():
    spec = spec_of("sequence_length=512", "global_batch_size=8", "evaluation.num_batches=1")
    source = TokenSequences(tokens_of_splits("synthetic", spec.data.held_out_fraction)["train"], 512)
    batches = iter(open_data(spec)["train"])
    num_batches = len(source) // 8
    drawn = np.concatenate([next(batches)["inputs"] for _ in range(num_batches)])
    assert len({row.tobytes() for row in drawn}) == len(drawn)


def test_held_out_batches_are_the_same_each_time():
    held_out = open_data(spec_of("evaluation.num_batches=2"))["held_out"]
    one, other = list(held_out), list(held_out)
    assert len(one) == len(other) == 2
    np.testing.assert_array_equal(one[1]["inputs"], other[1]["inputs"])
    another_seed = list(open_data(spec_of("evaluation.num_batches=2", "data.shuffle_seed=1"))["held_out"])
    np.testing.assert_array_equal(one[1]["inputs"], another_seed[1]["inputs"])


def test_too_little_data_is_an_error():
    with pytest.raises(ConfigError, match="held_out split has"):
        open_data(spec_of("evaluation.num_batches=100000"))
