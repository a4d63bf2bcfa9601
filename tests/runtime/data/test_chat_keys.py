"""What messages say about themselves, and forms of pairs that other tools write, against chats written by hand."""

import json
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from conftest import spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.runtime.core.inputs import find_file
from meshloom.runtime.data import open_data
from meshloom.runtime.data.chats import ChatReader, PreferenceReader
from meshloom.runtime.data.packing import PackedSequences
from support.chats import CHATML, tokenizer_of, turns, untagged, write_folder, write_lines

CALLS = """\
{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for call in m.tool_calls or [] %}\
{{ call.function.name }}({{ WRITTEN }}){% endfor %}|{% endfor %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("tokenizer") / "chatml", "chatml", CHATML)


def words(folder, path, *more, kind="chats"):
    return (f"data={kind}", f"data.source.paths=[{path}]", f"data.tokenizer.path={folder}", "model.vocab_size=1100",
            "global_batch_size=2", "target=cpu-1", "data.held_out_fraction=0", "num_steps=1", *more)  # fmt: skip


def read(folder, path, *more, kind="chats") -> tuple[ChatReader, list[Any]]:
    """The reader of a file, and its chats, or the problems in place of those."""
    spec: Any = spec_of(*words(folder, path, *more, kind=kind))
    make = ChatReader if kind == "chats" else PreferenceReader
    reader = make(spec.data.source, "data.source", tokenizer_of(spec.data))
    return reader, list(reader.read(find_file(str(path), ""), 0))


def template(path, text):
    path.write_text(text)
    return f"data.source.template={path}"


def learnt(chat):
    return [chat.text[start:stop] for start, stop in chat.trained]


@pytest.mark.parametrize("tags", ["generation", "prefix"])
@pytest.mark.parametrize("switch", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss": False, "weight": 1}])
def test_an_answer_that_is_not_to_be_learnt_is_not(folder, tmp_path, tags, switch):
    chosen = template(tmp_path / "t.jinja", CHATML if tags == "generation" else untagged(CHATML))
    chat: list[Any] = turns("one", "first", "two", "second")
    chat[1] |= switch
    chat[3] |= {"weight": 1}
    reader, (found,) = read(folder, write_lines(tmp_path / "a.jsonl", {"messages": chat}), chosen)
    assert learnt(found) == ["second<|im_end|>"]
    assert "first" in found.text
    assert reader.unread == ()


@pytest.mark.parametrize(("number", "switch", "said"), [
    (1, {"weight": 0.5}, "has weight: 0.5"),
    (1, {"train": "no"}, 'has train: "no"'),
    (0, {"weight": 1}, "and is of the role 'user'"),
])  # fmt: skip
def test_a_switch_that_cannot_be_honoured_is_refused(folder, tmp_path, number, switch, said):
    chat: list[Any] = turns("one", "first")
    chat[number] |= switch
    _, (problem,) = read(folder, write_lines(tmp_path / "a.jsonl", {"messages": chat}))
    assert said in problem.what
    assert f"message {number} of 'messages'" in problem.what


@pytest.mark.parametrize("written", ["ARGUMENTS | tojson", "'' + ARGUMENTS", "ARGUMENTS", "'' ~ ARGUMENTS + ''"])
@pytest.mark.parametrize("is_text", [True, False])
def test_arguments_are_an_object_or_its_text_as_the_template_wants(folder, tmp_path, written, is_text):
    arguments = {"city": "Köln<|im_end|>", "days": [1, None]}
    text = json.dumps(arguments, ensure_ascii=False)
    call = {"type": "function", "function": {"name": "weather", "arguments": text if is_text else arguments}}
    chat = [*turns("one"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    chosen = template(
        tmp_path / "t.jinja", CALLS.replace("WRITTEN", written.replace("ARGUMENTS", "call.function.arguments"))
    )
    _, (found,) = read(folder, write_lines(tmp_path / "a.jsonl", {"messages": chat}), chosen)
    shown = tokenizer_of(spec_of(*words(folder, "-")).data).hidden.show(found.text)
    assert shown == f"user: one|assistant: weather({text})|"


def test_text_that_is_no_json_is_refused_with_the_reason(folder, tmp_path):
    def call(arguments):
        called = {"function": {"name": "f", "arguments": arguments}}
        return {"messages": [*turns("a"), {"role": "assistant", "tool_calls": [called]}]}

    lines = [call("{city: Rome}"), call("[1]"), {"messages": turns("a", "b"), "tools": "search"}]
    _, problems = read(folder, write_lines(tmp_path / "a.jsonl", *lines))
    assert "'arguments' in 'tool_calls' of message 1 of 'messages' is text that is not JSON: Expecting" in problems[0].what  # fmt: skip  # noqa: E501
    assert "is list, not an object" in problems[1].what
    assert "'tools' is text that is not JSON" in problems[2].what


def test_tools_are_a_list_or_its_text(folder, tmp_path):
    tools = [{"name": "search"}]
    chosen = template(tmp_path / "t.jinja", "{% for tool in tools %}{{ tool.name }}{% endfor %}" + CHATML)
    forms = (tools, json.dumps(tools), [json.dumps(tools[0])])
    path = write_lines(tmp_path / "a.jsonl", *({"messages": turns("a", "b"), "tools": each} for each in forms))
    reader, found = read(folder, path, chosen)
    assert [chat.text.partition("<|im_start|>")[0] for chat in found] == ["search"] * 3
    assert reader.unread == ()


def test_a_key_that_no_template_reads_is_named_once(folder, tmp_path):
    chat = turns("one", "first", "two", "second")
    chat[0]["name"] = "Ada"
    chat[3]["thoughts"] = "hm"
    lines = [{"messages": chat, "id": 7, "tools": [{"name": "search"}]}] * 9
    data = open_data(spec_of(*words(folder, write_lines(tmp_path / "a.jsonl", *lines))))
    said = "the chat template does not read 'tools' or 'name' of user or 'thoughts' of assistant"
    assert data.summary.count(said) == 1
    chosen = template(tmp_path / "t.jinja", "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}")
    assert read(folder, tmp_path / "a.jsonl", chosen)[0].unread == ()


def test_parts_are_not_written_as_a_list_of_python(folder, tmp_path):
    parts = [{"type": "text", "text": "Hi"}]
    path = write_lines(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": parts}, *turns("", "b")[1:]]})
    writes = "{% for m in messages %}{{ m.content }}{% endfor %}"
    _, (problem,) = read(folder, path, template(tmp_path / "t.jinja", writes))
    assert "which the chat template would write as a list of Python" in problem.what
    reads = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
    _, (chat,) = read(folder, path, template(tmp_path / "t.jinja", reads))
    assert chat.text == "Hib"


# Pairs.


USER, GOOD, BAD = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}, {"role": "assistant", "content": "No."}  # fmt: skip  # noqa: E501
SYSTEM = {"role": "system", "content": "Be brief."}
FORMS = {  # of one pair
    "explicit": {"prompt": [SYSTEM, USER], "chosen": [GOOD], "rejected": [BAD]},
    "implicit": {"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]},
    "UltraFeedback": {"prompt": "Why?", "prompt_id": "a1", "chosen": [SYSTEM, USER, GOOD],
                      "rejected": [SYSTEM, USER, BAD], "messages": [SYSTEM, USER, GOOD], "score_chosen": 8.5},
    "repeated": {"prompt": [SYSTEM, USER], "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]},
    "text and answers": {"prompt": "Why?", "chosen": [SYSTEM, GOOD], "rejected": [SYSTEM, BAD]},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_each_form_of_a_pair_is_the_same_pair(folder, tmp_path, form, kind):
    path = write_lines(tmp_path / "a.jsonl", FORMS[form])
    if kind == "parquet":  # where each message has each key
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([FORMS[form]]), path)
    _, (chosen, rejected) = read(folder, path, kind="preferences")
    begin = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert [chosen.text, rejected.text] == [f"{begin}So.<|im_end|>\n", f"{begin}No.<|im_end|>\n"]
    assert [learnt(chosen), learnt(rejected)] == [["So.<|im_end|>"], ["No.<|im_end|>"]]


def test_texts_that_begin_alike_have_that_as_their_prompt(folder, tmp_path):
    begin = "\n\nHuman: Why?\n\nAssistant:"
    path = write_lines(tmp_path / "a.jsonl", {"chosen": f"{begin} I think so.", "rejected": f"{begin} It may be."})
    _, pair = read(folder, path, kind="preferences")
    assert [each.text for each in pair] == [f"{begin} I think so.", f"{begin} It may be."]
    assert [learnt(each) for each in pair] == [[" I think so."], [" It may be."]]


def test_pairs_that_say_nothing_are_left_out_and_counted_once(folder, tmp_path):
    """One side is the other, or begins it, or is cut away behind its prompt."""
    long = {"prompt": [{"role": "user", "content": "word " * 40}], "chosen": [GOOD], "rejected": [BAD]}
    same = {"chosen": [USER, GOOD], "rejected": [USER, GOOD]}
    begins = {"chosen": [USER, GOOD], "rejected": [USER]}
    lines = [FORMS["explicit"], long, same, FORMS["implicit"], begins, long, FORMS["repeated"]]
    path = write_lines(tmp_path / "a.jsonl", *lines)
    data = open_data(spec_of(*words(folder, path, "objective=simpo", "sequence_length=48", kind="preferences")))
    assert "2 pairs without two answers that differ left out" in data.summary
    assert "2 pairs in which sequence_length=48 leaves no answer left out" in data.summary
    (pairs,) = (each for each in data.pairs if len(each))
    assert len(pairs) == 6
    assert all((pairs[row]["targets"] >= 0).any() for row in range(6))
    assert [pairs.documents(row) for row in range(6)] == [(n,) for n in (0, 1, 4, 5, 8, 9)], "numbers in the corpus"


def test_pieces_of_chats_without_an_answer_are_left_out_and_counted_once(folder, tmp_path):
    """Of a chat of four pieces the last alone has something to learn."""
    lines = [{"messages": turns("word " * 70, "So.")}, *({"messages": turns("Why?", "So.")} for _ in range(8))]
    data = open_data(spec_of(*words(folder, write_lines(tmp_path / "a.jsonl", *lines), "sequence_length=32")))
    (corpus,) = data.opened.corpora
    sequences = corpus.sequences["train"]
    assert isinstance(sequences, PackedSequences)
    assert all((row["targets"] >= 0).any() for row in map(sequences.__getitem__, range(len(sequences))))
    pieces = [int(row["segment_ids"].max()) for row in map(sequences.__getitem__, range(len(sequences)))]
    assert sum(pieces) == 9
    assert f"{sequences.num_left_out} pieces in which sequence_length=32 leaves no answer left out" in data.summary
    assert sequences.num_left_out >= 2
    assert corpus.content["num_left_out"] == sequences.num_left_out


def test_a_length_that_leaves_nothing_says_so(folder, tmp_path):
    long = {"prompt": [{"role": "user", "content": "word " * 40}], "chosen": [GOOD], "rejected": [BAD]}
    spec = spec_of(*words(folder, write_lines(tmp_path / "a.jsonl", long), "objective=simpo", "sequence_length=16",
                          kind="preferences"))  # fmt: skip
    with pytest.raises(ConfigError, match="raise sequence_length"):
        open_data(spec)
