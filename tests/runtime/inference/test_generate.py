"""`meshloom generate`: a run's weights continue prompts as a forward pass without a cache does, on any mesh."""

import json
import random
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import meshloom
from conftest import SMALL, spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.visible import visible
from meshloom.compiler.declare.overrides import parse_override
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.declare.sections import GENERATE, in_section
from meshloom.compiler.driver import plan_run
from meshloom.runtime.checkpoint.adapters import find_saved, load_parameters
from meshloom.runtime.data.tokenizers import Bytes
from meshloom.runtime.inference.generate import Stops, TextStream
from meshloom.runtime.inference.generation_job import prepare_generation
from support.commands import run_in_process
from support.reference import forward

RUN = (*SMALL, "data=python_stdlib", "num_steps=3", "checkpoint.every_num_steps=3", "sharding=fsdp_tensor",
       "logging.trackers=[]", "model.attention_windows=[4]", "evaluation.num_batches=1")  # fmt: skip
GREEDY = ("temperature=0", "max_new_tokens=6")
LEARNED = ("model.positions=learned", "model.rope_theta=null", "model.num_positions=16")
PROMPTS = ("import os\n", "", "class Gr\u00f6\u00dfe:")
TEXT = "Grüße, 世界 🌍! e\u0301 "


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    done = run_in_process("train", *RUN, "hydra.run.dir=run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def expected(run_dir):
    """The tokens of each prompt by whole forward passes in float32, on one device."""
    plan = plan_run(meshloom.compose(*RUN, "target=cpu-1", "mesh.tensor=1"))
    one = SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), plan.abstract["params"])
    params = load_parameters(find_saved(str(run_dir), "checkpoint.weights_from"), abstract)
    whole, found = jax.jit(partial(forward, plan.model)), []
    for prompt in PROMPTS:
        tokens = list(prompt.encode()) or [256]
        first = len(tokens)
        for _ in range(6):
            padded = np.array([*tokens, *[0] * (32 - len(tokens))])[None]  # what follows is not seen
            tokens.append(int(np.argmax(whole(params, padded)[0, len(tokens) - 1, :257])))
        found.append(tokens[first:])
    return found


def lines_of(done):
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.cases(plain=1, ci=2)
@pytest.mark.ci
@pytest.mark.parametrize("mesh", [(), ("sharding=fsdp",), ("target=cpu-1", "mesh.tensor=1", "batch_size=2")], ids=str)
def test_prompts_of_a_file_are_continued_as_without_a_cache(run_dir, expected, mesh, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    lines = lines_of(run_in_process("generate", str(run_dir), f"prompts={file}", *GREEDY, *mesh, "--json"))
    assert [line["prompt"] for line in lines] == list(PROMPTS)
    assert [line["number"] for line in lines] == [0, 1, 2]
    for line, tokens in zip(lines, expected, strict=True):
        assert [*line["tokens"], *[256] * (line["ended_by"] == "end")] == tokens[: len(line["tokens"]) + 1]
        assert line["text"] == bytes(line["tokens"]).decode(errors="replace")


@pytest.mark.ci
def test_text_alone_goes_to_standard_output_and_python_returns_the_same(run_dir):
    done = run_in_process("generate", str(run_dir), "prompt=a, 'b' =", "max_new_tokens=9", "seed=5", "top_k=40")
    assert done.returncode == 0
    assert done.stderr == f"weights: step 3 of {run_dir}/checkpoints\n"
    found = meshloom.generate(run_dir, ["x", "a, 'b' ="], "max_new_tokens=9", "seed=5", "top_k=40")
    alone = meshloom.generate(run_dir, "a, 'b' =", "max_new_tokens=9", "seed=5", "top_k=40")
    assert [each.number for each in found] == [0, 1]
    assert found[1].tokens != alone.tokens  # another number draws otherwise
    assert done.stdout == visible(alone.text) + "\n"
    assert alone.ended_by == "length"


@pytest.mark.ci
@pytest.mark.parametrize("devices", [(), ("target=cpu-2", "mesh.tensor=2")], ids=str)
def test_logits_of_loaded_weights_are_those_of_a_whole_forward_pass(run_dir, expected, devices):
    """So are their gradients, also within a jit, on the devices of the run and on fewer."""
    loaded = meshloom.load(run_dir, *devices)
    assert {len(x.devices()) for x in jax.tree.leaves(loaded.params)} == {2 if devices else 8}
    text = PROMPTS[0]
    rows = jnp.array([loaded.encode(text), [*b"0123456789"]])
    assert loaded.decode(list(rows[0])) == text
    alone = jax.tree.map(np.asarray, loaded.params)
    whole = jax.jit(partial(forward, loaded.model))(alone, rows)
    logits = loaded.logits(rows)
    np.testing.assert_allclose(logits, whole, rtol=1e-4, atol=1e-5)
    assert int(logits[0, -1, :257].argmax()) == expected[0][0]
    np.testing.assert_array_equal(loaded.logits(loaded.encode(text)), logits[0])

    gradient = jax.jit(jax.grad(lambda params: jnp.sum(loaded.logits(rows, params)[0, -1] ** 2)))(loaded.params)
    reference = jax.jit(jax.grad(lambda params: jnp.sum(forward(loaded.model, params, rows)[0, -1] ** 2)))(alone)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-4), gradient, reference)
    for wrong, said in (([[1, 2], [3]], "nor lists of one length"), ("abc", "shape ()"), ([300_000], "go from")):
        with pytest.raises(meshloom.ConfigError, match=re.escape(said)):
            loaded.logits(wrong)


def problem_of(*overrides):
    with pytest.raises(ConfigError) as raised:
        prepare_generation(spec_of(*overrides, "checkpoint.weights_from=there"))
    return str(raised.value)


@pytest.mark.parametrize(("overrides", "said"), [
    ((), "generate.prompt: there is no prompt"),
    (("generate.prompt=a", "generate.prompts=b"), "generate.prompts: there is a generate.prompt, too"),
    (("generate.prompts=/nowhere/b",), "generate.prompts: no file matches '/nowhere/b'"),
    (("data=synthetic", "generate.prompt=a", "data.tokenizer=null"), "data.tokenizer: there is none"),
    (("generate.prompt=a", "model.vocab_size=200"), "data.tokenizer: it has 257 tokens, and the model has 200"),
    (("generate.prompt='0123456789abcdef'", *LEARNED),
     "generate.prompt: has 16 tokens, and the model has 16 positions for a prompt and its text"),
])  # fmt: skip
def test_a_mistake_is_one_clear_error_before_a_weight_is_read(overrides, said):
    assert said in problem_of(*overrides)


def test_a_line_of_prompts_that_is_none_is_named(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    said = problem_of(f"generate.prompts={file}")
    assert f"{file}:2: has no key 'prompt', and no 'messages'" in said
    assert "it has text" in said


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
