"""A folder that transformers wrote continues texts and chats as transformers does, greedily and in float32."""

import json

import pytest
from tokenizers import Tokenizer

from support.chats import TAGGED, write_folder
from support.commands import run_in_process

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[peers]'")
NUM_NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("llama3"), "llama3", TAGGED["llama3"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, max_position_embeddings=128,
        bos_token_id=tokenizer.token_to_id("<|begin_of_text|>"), eos_token_id=tokenizer.token_to_id("<|eot_id|>"),
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def of_transformers(folder, ids):
    model = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager")
    made = model.generate(torch.tensor([ids]), max_new_tokens=NUM_NEW, do_sample=False)[0].tolist()[len(ids) :]
    return made[: made.index(model.config.eos_token_id)] if model.config.eos_token_id in made else made


@pytest.mark.parametrize("given", ["prompt=import json", "chat=Hi, you"])
def test_a_published_folder_generates_what_transformers_does(folder, given):
    key, _, text = given.partition("=")
    words = ("temperature=0", f"max_new_tokens={NUM_NEW}", "precision=float32", "sharding=fsdp_tensor", "mesh.tensor=2")
    done = run_in_process("generate", str(folder), given, *words, "--json")
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    if key == "chat":
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    else:
        ids = tokenizer(text)["input_ids"]
    assert line["num_prompt_tokens"] == len(ids)
    assert line["tokens"] == of_transformers(folder, ids)
