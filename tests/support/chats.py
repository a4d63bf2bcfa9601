"""Tokenizers, chat templates and chats of our own, for tests; templates are written as those of published models."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from meshloom.compiler.declare.data_spec import ChatsSource, DataSpec
from meshloom.runtime.data.corpus import open_store
from meshloom.runtime.data.store import TokenStore
from meshloom.runtime.data.tokenizers import HuggingFace, open_tokenizer

CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
{%- generation %}
{{- m.content + '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- else %}
{{- m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- if tools %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nTools: ' + tools | tojson + '<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if m['role'] == 'assistant' %}
        {%- generation %}{{- m['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
    {%- else %}
        {{- m['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """\
{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must alternate user/assistant.') }}{% endif %}{% if m['role'] == 'user' %}\
{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{% generation %}{{ ' ' + m['content'] + eos_token }}\
{% endgeneration %}{% endif %}{% endfor %}"""
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{ '<start_of_turn>' + role + '\n' }}{% if role == 'model' %}{% generation %}{{ m['content'] | trim }}<end_of_turn>\
{% endgeneration %}{% else %}{{ m['content'] | trim }}<end_of_turn>{% endif %}{{ '\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

SPECIAL = {
    "chatml": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
    "gemma": ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
}
NAMED = {
    "chatml": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
}
TAGGED = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA}
FAMILIES = tuple(TAGGED)
TEXT = Path(json.__file__).read_text()


def untagged(template: str) -> str:
    """Returns the template without its tags, as most are published."""
    for tag in ("{%- generation %}\n", "{%- endgeneration %}\n", "{%- generation %}", "{% generation %}", "{% endgeneration %}"):  # fmt: skip  # noqa: E501
        template = template.replace(tag, "")
    assert "generation %}" not in template.replace("add_generation_prompt %}", "")
    return template


def make_tokenizer(family: str, *, num_merges: int = 300) -> Tokenizer:
    """Returns a small BPE: of bytes, or of characters and bytes with spaces as SentencePiece has them."""
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL[family]]
    if family in ("chatml", "llama3"):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        size = 256 + len(special) + num_merges
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Replace(" ", "▁") if family == "gemma" else None
        if family == "mistral":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        fallback = [AddedToken(f"<0x{byte:02X}>", special=False, normalized=False) for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=700 + num_merges, special_tokens=[*special, *fallback], show_progress=False
        )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    tokenizer = _with_bytes_as_text(tokenizer)
    if "bos_token" in NAMED[family]:
        bos = NAMED[family]["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def _with_bytes_as_text(tokenizer: Tokenizer) -> Tokenizer:
    """Returns the tokenizer with its bytes among the tokens of its model alone, as published ones have them."""
    declared = json.loads(tokenizer.to_str())
    declared["added_tokens"] = [token for token in declared["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(declared))


def write_folder(folder: Path, family: str, template: str | None, **settings: Any) -> Path:
    """Writes the tokenizer's files of a published model. settings: more of tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(family).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED[family], **settings}
    config |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def turns(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """Returns the messages of a user and a model, in turn."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def chats_of(data: DataSpec) -> ChatsSource:
    """Returns the declared source, which is one of chats."""
    assert isinstance(data.source, ChatsSource)
    return data.source


def tokenizer_of(data: DataSpec) -> HuggingFace:
    """Returns the declared tokenizer, which is that of a published model."""
    assert data.tokenizer is not None
    tokenizer = open_tokenizer(data.tokenizer)
    assert isinstance(tokenizer, HuggingFace)
    return tokenizer


def store_of(data: DataSpec) -> TokenStore:
    """Returns the declared chats as tokens."""
    return open_store(data, chats_of(data), "data.source", tokenizer_of(data))
