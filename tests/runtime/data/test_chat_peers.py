"""Chats against the transformers library: the same tokens, and for templates with tags the same masks."""

from itertools import pairwise

import pytest

from conftest import spec_of
from support.chats import FAMILIES, TAGGED, store_of, turns, untagged, write_folder, write_lines

transformers = pytest.importorskip("transformers", reason="pip install -e '.[peers]'")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

CHATS = [
    turns("Hi", "Hello."),
    turns("  Who? ünïcode 日本 ", "I am <json>, 日本.", "Why?\n\nTell", "def f(x):\n    return x + 1\n", "", "No"),
    turns("a" * 50, " spaces  inside   and after ", "\n", "x"),
]


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.mark.parametrize("tags", ["generation", "prefix"])
def test_tokens_and_masks_are_those_of_transformers(tmp_path, family, tags):
    """A mask of transformers counts only the first token of a character in several tokens that ends a span; ours counts
    all. The chats end in no such character. Without tags it has no mask, so ours is held to the one with them."""
    folder = write_folder(tmp_path / family, family, TAGGED[family])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    path = write_lines(tmp_path / "chats.jsonl", *({"messages": chat} for chat in CHATS))
    template = TAGGED[family] if tags == "generation" else untagged(TAGGED[family])
    (tmp_path / "t.jinja").write_text(template)
    words = ("data=chats", f"data.source.paths=[{path}]", f"data.tokenizer.path={folder}")
    data = spec_of(*words, f"data.source.template={tmp_path}/t.jinja").data
    (shard,) = store_of(data).shards
    assert shard.trained is not None
    for chat, (start, stop) in zip(CHATS, pairwise([0, *shard.documents[:, 0].astype(int).tolist()]), strict=True):
        wanted = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        plain = theirs.apply_chat_template(chat, return_dict=True, chat_template=template)
        assert shard.tokens[start:stop].tolist() == wanted["input_ids"] == plain["input_ids"]
        assert shard.trained[start:stop].tolist() == [bool(one) for one in wanted["assistant_masks"]]


def test_tools_and_other_variables_reach_the_template_as_in_transformers(tmp_path):
    folder = write_folder(tmp_path / "llama3", "llama3", TAGGED["llama3"])
    tools = [{"type": "function", "function": {"name": "f", "description": "é < 3", "parameters": {"x": [1, None]}}}]
    path = write_lines(tmp_path / "chats.jsonl", {"messages": CHATS[0], "tools": tools})
    data = spec_of("data=chats", f"data.source.paths=[{path}]", f"data.tokenizer.path={folder}").data
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    wanted = theirs.apply_chat_template(CHATS[0], tools=tools, return_dict=True)["input_ids"]
    assert store_of(data).shards[0].tokens.tolist() == wanted
