"""Pairs of chats as rows: side by side after shuffling, in one split, each with its own answer to learn."""

import json

import numpy as np
import pytest

from conftest import spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.models import PADDING_TARGET
from meshloom.runtime.cli.data import prepare_corpus, show_example
from meshloom.runtime.data import open_data
from meshloom.runtime.data.store import Split
from meshloom.runtime.data.tokenizers import open_tokenizer
from support.chats import CHATML, turns, write_folder, write_lines

NUM_PAIRS = 60


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
    assert "2 chats without an answer left out" in data.summary
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
    lines = [{"prompt": "a", "chosen": "b"}, {"chosen": turns("a", "b"), "rejected": turns("a", "b")}]
    with pytest.raises(ConfigError) as error:
        open_data(declared(folder, write_lines(tmp_path / "wrong.jsonl", *lines)))
    first, second = error.value.problems
    assert first.where.endswith("wrong.jsonl:1")
    assert "has no key 'rejected'" in first.what
    assert second.where.endswith("wrong.jsonl:2")
    assert "is the rejected one" in second.what


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
