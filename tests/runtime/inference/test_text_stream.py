"""Text that comes token by token is the text of all tokens, in whole characters, up to a text that stops it."""

import random

import pytest

from meshloom.compiler.declare.overrides import parse_override
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.declare.sections import GENERATE, in_section
from meshloom.runtime.data.tokenizers import Bytes
from meshloom.runtime.inference.generate import Stops, TextStream

TEXT = "Grüße, 世界 🌍! e\u0301 "


def streamed(tokens, before=()):
    stream = TextStream(Bytes().decode, before)
    return [*(stream.add(token) for token in tokens), stream.end()]


def test_a_character_comes_when_its_last_byte_does():
    pieces = streamed(TEXT.encode(), before=b"as ")
    assert [piece for piece in pieces if piece] == list(TEXT)
    assert all(not piece or piece.encode()[-1] == byte for piece, byte in zip(pieces, TEXT.encode(), strict=False))


def test_bytes_that_are_no_text_come_as_python_decodes_them():
    draw = random.Random(0)
    for _ in range(200):
        tokens = [draw.choice([*TEXT.encode(), *range(256)]) for _ in range(draw.randrange(1, 40))]
        assert "".join(streamed(tokens)) == bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize(("stops", "expected"), [
    ((), "one two three"),
    (("two",), "one "),
    (("three", "one t"), ""),
    (("twx", "tthr"), "one two three"),
    (("e e", "ee"), "one two thr"),
])  # fmt: skip
def test_a_stop_is_never_shown_however_the_text_is_cut(stops, expected):
    for width in range(1, 14):
        stream, shown = Stops(stops), ""
        for start in range(0, 13, width):
            shown += stream.add("one two three"[start : start + width])
            assert expected.startswith(shown)
            if stream.is_over:
                break
        assert stream.is_over == (expected != "one two three")
        assert shown + stream.end() == expected


@pytest.mark.parametrize(
    "text", ["", "12", "null", "a, 'b' = {c} [d", 'say "hi"', "${oc.env:HOME}", "a\\", "l\nm", "=", "~/x"]
)
def test_a_prompt_is_text_as_it_stands(text):
    (word,) = in_section(GENERATE, [f"prompt={text}"])
    parsed = parse_override(word)
    assert parsed.key_or_group == "generate.prompt"
    value = parsed.value()
    assert str(value).replace("\\${", "${") == text


def test_keys_of_generation_need_no_section():
    words = [
        "top_k=5",
        "stop=[a,b]",
        "stop=###",
        "target=cpu-1",
        "seed=3",
        "generate.top_p=1",
        "model.seed=2",
        "max_tokens=4",
    ]
    assert in_section(GENERATE, words) == [
        "generate.top_k=5", "generate.stop=[a,b]", "generate.stop=['###']", "target=cpu-1", "generate.seed=3",
        "generate.top_p=1", "model.seed=2", "generate.max_tokens=4",
    ]  # fmt: skip


def test_no_other_key_is_taken_for_one_of_generation():
    assert in_section(GENERATE, [f"{key}=1" for key in RunSpec.model_fields if key != "seed"]) == [
        f"{key}=1" for key in RunSpec.model_fields if key != "seed"
    ]
