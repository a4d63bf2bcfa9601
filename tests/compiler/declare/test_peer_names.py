"""Settings under the names of other tools: the error types ours, wherever it lies."""

import re

import pytest

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare import peer_names
from meshloom.compiler.declare.choices import all_keys
from meshloom.compiler.declare.compose import Request, read_spec

OF_OTHER_OPTIONS = {"adapter.rank", "adapter.alpha", "adapter.dropout", "adapter.targets", "objective.beta",
                    "model.path", "data.source.paths", "data/tokenizer", "data.tokenizer.path",
                    "hydra.run.dir"}  # fmt: skip


def test_every_word_of_the_table_is_a_key_that_exists():
    keys = {*all_keys(), *OF_OTHER_OPTIONS}
    for words, names in peer_names._TABLE:
        for key in re.findall(r"([a-z_0-9./]+)=", words):
            assert key in keys, words
        assert not set(names.split()) & keys, "a key of ours is no mistake"


@pytest.mark.parametrize(("word", "fix"), {
    "lr=2e-5": "type optimizer.learning_rate=2e-5",
    "learning_rate=2e-5": "type optimizer.learning_rate=2e-5",
    "optimizer.lr=0.001": "type optimizer.learning_rate=0.001",
    "training.lr=3e-4": "type optimizer.learning_rate=0.0003",
    "batch_size=8": "type global_batch_size=8",
    "epochs=3": "type data.num_epochs=3",
    "num_epochs=3": "type data.num_epochs=3",
    "seq_len=2048": "type sequence_length=2048",
    "tp=2": "type sharding=fsdp_tensor mesh.tensor=2",
    "mesh.tp=2": "type sharding=fsdp_tensor mesh.tensor=2",
    "pp=4": "type mesh.stage=4",
    "bf16=true": "type precision=bfloat16",
    "torch_dtype=float32": "type precision=bfloat16, float16 or float32",
    "tokenizer_path=here": "type data/tokenizer=huggingface data.tokenizer.path=here",
    "trainer={max_steps: 10, wd: 0.1}": "type num_steps=10 optimizer.weight_decay=0.1",
    "model=org/name-8B": "type hf download org/name-8B --local-dir DIR, then model=from_hf model.path=DIR",
    "data=a.jsonl.gz": "type data=jsonl 'data.source.paths=[a.jsonl.gz]', or data=chats if its lines are chats",
}.items())  # fmt: skip
def test_the_fix_begins_with_our_words(word, fix):
    with pytest.raises(ConfigError) as error:
        read_spec(Request((word,)), then=lambda spec: spec)
    (problem,) = error.value.problems
    assert problem.fix == fix
