"""The data of an evaluation: each sequence of a split once, whatever its length."""

from collections import Counter

import numpy as np
import pytest

from conftest import spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.runtime.data import open_data
from meshloom.runtime.data.splits import open_evaluated
from support.chats import TAGGED, tokenizer_of, turns, write_folder, write_lines

EVERYTHING = "evaluation.num_batches=100000"
LONG = ("sequence_length=512", "global_batch_size=7")


def _rows(batches) -> Counter[bytes]:
    """The rows that count, each by its tokens."""
    rows = [(x, y) for batch in batches for x, y in zip(batch["inputs"], batch["targets"], strict=True)]
    return Counter(x.tobytes() for x, y in rows if (y >= 0).any())


def test_its_first_held_out_batches_are_those_of_a_run():
    spec = spec_of("evaluation.num_batches=3")
    (whole,) = open_evaluated(spec).parts
    for mine, of_run in zip(whole.batches, open_data(spec)["held_out"], strict=True):
        assert mine.keys() == of_run.keys()
        for name, x in mine.items():
            np.testing.assert_array_equal(x, of_run[name])


@pytest.mark.parametrize("packing", ["concatenate", pytest.param("first_fit", marks=pytest.mark.ci)])
def test_every_sequence_counts_once_and_the_last_batch_is_filled_with_rows_without_targets(packing):
    rows = {}
    for split in ("held_out", "train", "all"):
        spec = spec_of(*LONG, EVERYTHING, f"evaluation.split={split}", f"data.packing={packing}")
        (whole,) = open_evaluated(spec).parts
        assert len(whole.batches) == -(-whole.num_sequences // 7)
        assert whole.num_sequences % 7
        rows[split] = _rows(whole.batches)
        assert rows[split].total() == whole.num_sequences
    assert not rows["held_out"] & rows["train"]
    assert rows["all"].total() == pytest.approx(rows["train"].total() + rows["held_out"].total(), abs=2)


def test_a_part_of_a_batch_is_enough():
    spec = spec_of(*LONG, "global_batch_size=4096", "num_steps=1", "evaluation.split=all")
    (whole,) = open_evaluated(spec).parts
    assert (len(whole.batches), whole.num_sequences < 4096) == (1, True)


def test_of_a_mixture_each_source_is_evaluated_alone_too(tmp_path):
    for name, text in (("a", "a" * 5000), ("b", "b" * 9000)):
        (tmp_path / f"{name}.txt").write_text(text)
    parts = (f"data.source.parts.{name}={{weight:1,source:{{kind:text_files,paths:['{tmp_path}/{name}.txt']}}}}"
             for name in "ab")  # fmt: skip
    spec = spec_of("data=mixture", *parts, EVERYTHING,
                   "evaluation.split=all", "sequence_length=100")  # fmt: skip
    data = open_evaluated(spec)
    assert [(part.name, part.num_sequences) for part in data.parts] == [("data", 100), ("a", 50), ("b", 90)]
    assert {token for batch in data.parts[1].batches for token in batch["inputs"].ravel()} == {ord("a")}
    assert data.unit == "byte"


def test_of_chats_the_answers_alone_count(tmp_path):
    """Each answer has a target for each of its tokens, and one for the token that ends it."""
    folder = write_folder(tmp_path / "tokenizer", "chatml", TAGGED["chatml"])
    answers = ["four", "A longer one, of two clauses."]
    path = write_lines(tmp_path / "x.jsonl", *({"messages": turns("A question?", answer)} for answer in answers))
    spec = spec_of("data=chats", f"data.source.paths=[{path}]", f"data.tokenizer.path={folder}", "evaluation.split=all",
                   "sequence_length=128", "model.vocab_size=1100")  # fmt: skip
    (whole,) = open_evaluated(spec).parts
    tokenizer = tokenizer_of(spec.data)
    own = [len(tokens) + 1 for tokens in tokenizer.encode_texts([answer.encode() for answer in answers])]
    assert sum(int((batch["targets"] >= 0).sum()) for batch in whole.batches) == sum(own)


@pytest.mark.parametrize(("overrides", "said"), [
    (("data.held_out_fraction=0",), "evaluation.split: is held_out, and data.held_out_fraction is 0"),
    (("sequence_length=1000000",), "its held_out split has no sequence of 1,000,000 tokens"),
])  # fmt: skip
def test_a_split_without_sequences_is_an_error(overrides, said):
    with pytest.raises(ConfigError) as raised:
        open_evaluated(spec_of(*overrides))
    assert said in str(raised.value)
    assert "use evaluation.split=all" in str(raised.value)
