"""A run directory, or a folder of published weights, as the request that opens its weights."""

import gzip
import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request
from meshloom.runtime.cli.app import parse_flags
from meshloom.runtime.cli.commands import Command
from meshloom.runtime.data.tokenizers import Bytes, HuggingFace
from meshloom.runtime.inference import run_request
from meshloom.runtime.inference.generation_job import DeclaredPrompt, PromptMaker, declared_prompts
from meshloom.runtime.inference.run_request import request_of_run
from meshloom.runtime.rundir.folders import recorded_run
from support.chats import TAGGED, tokenizer_of, untagged, write_folder

OF_ITS_WEIGHTS = (
    "sharding=fsdp_tensor", "mesh.tensor=2", "data=text_files", "data.source.paths=[a.txt]", "model.num_layers=3",
)  # fmt: skip
DECLARED = (
    *OF_ITS_WEIGHTS, "hydra.run.dir=runs/a", "artifact=x", "checkpoint.every_num_steps=9", "compilation_cache=c",
    "evaluation.tasks_path=tasks", "compiler_options.xla_dump_to=there",
)  # fmt: skip
OPENS = Command("evaluate", "", "", opens_weights=True)
CHAT = [{"role": "user", "content": "Hi <|im_end|>"}]


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run_a"
    folder.mkdir()
    with recorded_run(folder, "train", Request(DECLARED)):
        return folder


def _error(place: Path | str) -> str:
    with pytest.raises(ConfigError) as raised:
        request_of_run(str(place), ())
    return str(raised.value)


def test_a_run_is_opened_by_its_own_words_less_those_of_its_files_processes_and_code(run_dir):
    request = request_of_run(str(run_dir), ("num_microbatches=2",))
    weights = f"checkpoint.weights_from={run_dir}/checkpoints"
    assert request.overrides == (*OF_ITS_WEIGHTS, "num_microbatches=2", weights)
    assert request_of_run(f"{run_dir}/checkpoints/20", ()).overrides[-1] == f"{weights}/20"
    assert request_of_run(f"{run_dir}/checkpoints", ()).overrides[-1] == weights


@pytest.mark.parametrize(("typed", "left"), [
    ("sharding=ddp", OF_ITS_WEIGHTS[2:]),  # which brings its own mesh
    ("data=jsonl", (*OF_ITS_WEIGHTS[:2], OF_ITS_WEIGHTS[4])),
    ("data.source.paths=[b.txt]", OF_ITS_WEIGHTS),
])  # fmt: skip
def test_a_group_that_is_chosen_anew_takes_none_of_the_old_keys(run_dir, typed, left):
    assert request_of_run(str(run_dir), (typed,)).overrides[:-1] == (*left, typed)


def test_checkpoints_are_read_where_the_run_put_them(run_dir, monkeypatch):
    monkeypatch.setattr(run_request, "check_bucket", lambda folder, key: None)
    monkeypatch.setattr(run_request, "newest_meaning", lambda checkpoints, step: None)
    (run_dir / "spec.yaml").write_text("checkpoint: {directory: s3://bucket/run}\n")
    assert request_of_run(f"{run_dir}/checkpoints/7", ()).overrides[-1] == "checkpoint.weights_from='s3://bucket/run/7'"


def test_a_folder_of_published_weights_declares_its_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    declared = ("model=from_hf", "seed=1", f"model.path={tmp_path}", f"checkpoint.weights_from='hf:{tmp_path}'")
    for place in (f"{tmp_path}", f"hf:{tmp_path}"):
        assert request_of_run(place, ("seed=1",)).overrides == declared


def test_what_is_no_folder_of_weights_is_one_error_that_says_what_to_name(run_dir, tmp_path):
    name = "name a run directory (`meshloom runs` lists them), RUN/checkpoints/STEP, or a folder of published weights"
    assert _error(tmp_path / "run_b") == (
        f"error: {tmp_path}/run_b: there is no such directory\n  fix: {name} (did you mean '{run_dir}'?)"
    )
    neither = "is neither the directory of a trained run nor a folder of published weights"
    assert _error(tmp_path) == f"error: {tmp_path}: {neither}\n  fix: {name}, such as {run_dir}"
    assert "holds no config.json with safetensors files" in _error(f"hf:{run_dir}")
    assert "is a URL" in _error("gs://bucket/run")
    record = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps(record | {"request": None}))
    assert "records no overrides" in _error(run_dir)


def test_a_run_of_somebody_else_sends_no_value_of_this_machine(tmp_path):
    paths = "data.source.paths=['https://host/${oc.env:TOKEN}']"
    with recorded_run(tmp_path, "train", Request(("data=text_files", paths))):
        assert "records a URL with a value in it" in _error(tmp_path)


@pytest.mark.parametrize(("words", "what"), [
    ((), "the line names no folder of weights"),
    (("a", "b"), "the line names 2 folders (a, b)"),
    (("-m", "a", "seed=1,2"), "opens one folder, and -m asks for several"),
])  # fmt: skip
def test_a_line_names_one_folder(words, what):
    _, problems = parse_flags(OPENS, words)
    assert [what in problem.what for problem in problems] == [True]


def test_the_folder_may_stand_anywhere_and_be_named_like_a_point_of_a_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("seed=1,sharding=ddp").mkdir()
    for place in ("runs/a", "seed=1,sharding=ddp"):
        flags, problems = parse_flags(OPENS, (place, "seed=1"))
        assert (flags.place, flags.overrides, problems) == (place, ["seed=1"], [])
    assert parse_flags(OPENS, ("seed=1", "runs/a"))[0].place == "runs/a"


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
    assert found == [DeclaredPrompt(f"{file}:1", "a"), DeclaredPrompt(f"{file}:2", CHAT, {"messages": CHAT})]


def test_tools_of_a_prompt_reach_the_template(folder, tmp_path):
    file, template = tmp_path / "some.jsonl", tmp_path / "tools.jinja"
    file.write_text(json.dumps({"messages": CHAT, "tools": '[{"name": "search"}]'}) + "\n")
    template.write_text("{{ tools[0].name }}" + TAGGED["chatml"])
    for more, begin in (((), ""), ((f"data.source.template={template}",), "search")):
        maker = maker_of(folder, "data=chats", "data.source.paths=[a]", f"generate.prompts={file}", *more)
        (given,) = declared_prompts(maker.spec.generate)
        assert maker.make(given).text.partition("<|im_start|>")[0] == begin
        assert maker.chats.unread == (() if begin else ("'tools'",))


@pytest.mark.parametrize(("name", "compress"), [("some.txt", bytes), ("some.txt.gz", gzip.compress)])
def test_a_line_of_prompts_ends_as_a_line_of_data_does(tmp_path, name, compress):
    """An editor of Windows leaves a byte order mark and \\r; a text may hold the other separators of Unicode."""
    file = tmp_path / name
    file.write_bytes(compress("\ufeffone\u2028still one\x0b\r\n\r\n  \n two\x85 \r\n".encode()))
    found = declared_prompts(spec_of(f"generate.prompts={file}").generate)
    said = [(f"{file}:1", "one\u2028still one\x0b"), (f"{file}:4", " two\x85 ")]
    assert found == [DeclaredPrompt(*each) for each in said]


def test_records_of_prompts_are_those_of_data(tmp_path):
    lines = [{"prompt": "a\u2028b"}, {"prompt": CHAT}, {"messages": CHAT}]
    text = "\ufeff" + "\r\n\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    fsspec.filesystem("memory").pipe_file("/prompts/some.jsonl.gz", gzip.compress(text.encode()))
    pq.write_table(pa.table({"prompt": ["a\u2028b", "b"]}), tmp_path / "rows")
    found = declared_prompts(spec_of("generate.prompts=memory://prompts/some.jsonl.gz").generate)
    assert [each.content for each in found] == ["a\u2028b", CHAT, CHAT]
    assert found[1].where.endswith("some.jsonl.gz:3")
    rows = declared_prompts(spec_of(f"generate.prompts={tmp_path / 'rows'}").generate)
    assert [each.content for each in rows] == ["a\u2028b", "b"]


def test_a_chat_without_a_template_is_an_error():
    spec = spec_of("generate.chat=Hi")
    maker = PromptMaker.of(spec, Bytes())
    with pytest.raises(ConfigError, match="chats need the tokenizer of a published model, with a chat template"):
        maker.make(*declared_prompts(spec.generate))
