"""A family names each key of config.json once: reading, writing and fitting follow from its table."""

from collections import Counter

import pytest

from meshloom.models.published import FAMILIES
from meshloom.models.published.family import Reader, read_table

SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 4, "n_embd": 64, "n_head": 8, "n_layer": 4}
LENGTHS = {"max_position_embeddings", "original_max_position_embeddings"}  # what a stretch of positions begins with


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_each_key_is_in_one_entry(family):
    named = Counter(name for entry in family.table for name in set(entry.names))
    assert [name for name, count in named.items() if count > 1] == []


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_an_entry_asks_for_no_key_of_another(family):
    """So no function of an entry reads a key of config.json that the table does not show there."""
    before = read_table(family.table, Reader(SIZES))
    for entry in family.table:
        reader = Reader(SIZES)
        read = entry.read(reader, before)
        assert reader.asked - LENGTHS <= set(entry.names)
        if entry.ours:
            assert read.keys() <= set(entry.ours)
            assert entry.fits.keys() <= set(entry.ours)
