"""The way back from a batch to its documents: what is named is what the batch holds."""

import pytest

from conftest import spec_of
from meshloom.runtime.data import open_data
from meshloom.runtime.data.splits import describe_documents


@pytest.fixture(autouse=True)
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
