"""Prompts as tokens: what stands before a text, how a chat is written up to the answer, and what ends it."""

import json

import pytest

from conftest import spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.runtime.data.tokenizers import Bytes, HuggingFace
from meshloom.runtime.inference.generation_job import DeclaredPrompt, PromptMaker, declared_prompts
from support.chats import TAGGED, tokenizer_of, untagged, write_folder

CHAT = [{"role": "user", "content": "Hi <|im_end|>"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("chatml"), "chatml", untagged(TAGGED["chatml"]))


def maker_of(folder, *overrides):
    spec = spec_of("data/tokenizer=huggingface", f"data.tokenizer.path={folder}", *overrides)
    return PromptMaker.of(spec, tokenizer_of(spec.data))


def test_a_chat_is_written_up_to_where_the_model_answers_and_ends_as_the_template_says(folder):
    maker = maker_of(folder, "model.vocab_size=1100")
    assert isinstance(maker.tokenizer, HuggingFace)
    special = maker.tokenizer.special
    prompt = maker.make(DeclaredPrompt("a chat", CHAT))
    assert prompt.text == "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert prompt.tokens.count(special["<|im_end|>"]) == 1, "what a user writes is text"
    assert special["<|im_end|>"] in maker.ends(is_chat=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert {7, 9, maker.tokenizer.identity.end_of_document} <= maker.ends(is_chat=False)


def test_a_published_model_reads_the_tokens_that_its_tokenizer_puts_before_a_text(tmp_path):
    folder = write_folder(tmp_path / "llama3", "llama3", TAGGED["llama3"])
    alone, published = maker_of(folder), maker_of(folder, f"checkpoint.weights_from=hf:{folder}")
    assert isinstance(published.tokenizer, HuggingFace)
    start = published.tokenizer.around[0]
    text = alone.make(DeclaredPrompt("a prompt", "Hi")).tokens
    assert published.make(DeclaredPrompt("a prompt", "Hi")).tokens == (*start, *text)
    assert alone.make(DeclaredPrompt("a prompt", "")).tokens == (alone.tokenizer.identity.end_of_document,)


def test_a_file_of_prompts_and_chats(tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"messages": CHAT}) + "\n")
    found = declared_prompts(spec_of(f"generate.prompts={file}").generate)
    assert found == [DeclaredPrompt(f"{file}:1", "a"), DeclaredPrompt(f"{file}:2", CHAT)]


def test_a_chat_without_a_template_is_an_error():
    spec = spec_of("generate.chat=Hi")
    maker = PromptMaker.of(spec, Bytes())
    with pytest.raises(ConfigError, match="chats need the tokenizer of a published model, with a chat template"):
        maker.make(*declared_prompts(spec.generate))
