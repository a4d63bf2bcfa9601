"""Turns text into tokens. A tokenizer's identity is the hash of its file, which shards and checkpoints must match."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from meshloom.compiler.core.errors import ConfigError, Problem, use_one_of
from meshloom.compiler.declare.data_spec import HuggingFaceTokenizer, SentencePieceTokenizer, TokenizerSpec

from ..core.inputs import require
from .chat_template import HiddenTokens

WHERE = "data.tokenizer"
TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"  # of a folder
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a byte of a character that has no token; some files call these special
END_OF_DOCUMENT = "<|endoftext|>"  # the end token of a BPE that is trained here


@dataclass(frozen=True)
class TokenizerIdentity:
    """The identity of a tokenizer: equal identities give tokens the same meaning. sha256: the hash of the tokenizer's
    file; "" for bytes. end_of_document: the token that ends a document."""

    kind: str
    sha256: str
    vocab_size: int
    end_of_document: int

    @property
    def dtype(self) -> np.dtype:
        """Returns the type in which tokens are stored: the smaller of two that fits, little-endian."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")


class Tokenizer(ABC):
    """Turns texts into tokens. file: the file that it was read from; None without one."""

    identity: TokenizerIdentity
    file: Path | None

    @abstractmethod
    def encode_texts(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the tokens of each text in UTF-8, without end tokens. Raises UnicodeDecodeError."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, with U+FFFD for bytes that are no character."""

    def encode(self, contents: Sequence[bytes | np.ndarray]) -> list[np.ndarray]:
        """Returns the tokens of each document with its end token, in the identity's dtype. Arrays are tokens already.

        Raises UnicodeDecodeError for text that is not UTF-8, OverflowError for a token that the tokenizer lacks.
        """
        texts = iter(self.encode_texts([content for content in contents if isinstance(content, bytes)]))
        documents, vocab_size = [], self.identity.vocab_size
        for content in contents:
            tokens = next(texts) if isinstance(content, bytes) else content
            if tokens.size and int(tokens.max()) >= vocab_size:
                raise OverflowError(f"token {tokens.max()} is not among the {vocab_size} of the tokenizer")
            ended = np.empty(tokens.size + 1, self.identity.dtype)
            ended[:-1], ended[-1] = tokens, self.identity.end_of_document
            documents.append(ended)
        return documents


class Bytes(Tokenizer):
    """Takes each byte as a token; token 256 ends a document."""

    identity = TokenizerIdentity("bytes", "", 257, 256)
    file = None

    def encode_texts(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class HuggingFace(Tokenizer):
    """Uses a JSON file of the `tokenizers` library. Special tokens in a text are read as text.

    folder: the folder with the file, whose other files say what its special tokens are for, and how chats are written.
    """

    def __init__(self, spec: HuggingFaceTokenizer):
        named = Path(spec.path)
        self.file = named / TOKENIZER_FILE if named.is_dir() else named
        self.folder = self.file.parent
        data = _read(self.file)
        library = require("tokenizers", WHERE, "a tokenizer of kind huggingface")
        try:
            self._text = data.decode()
            self._tokenizer = library.Tokenizer.from_str(self._text)
        except Exception as error:  # the library raises nothing narrower
            raise _broken(str(self.file), "tokenizer of the tokenizers library", f": {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab()  # its numbers can have gaps
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = {
            token.content: number
            for number, token in added.items()
            if token.special and not BYTE.fullmatch(token.content)
        }
        end = self._end_of_document(spec, named.is_dir())
        self.identity = TokenizerIdentity(
            "huggingface", hashlib.sha256(data).hexdigest(), max(vocabulary.values()) + 1, end
        )

    def _end_of_document(self, spec: HuggingFaceTokenizer, is_folder: bool) -> int:
        special, path = self.special, str(self.file)
        if spec.end_of_document is not None:
            return _token(self._tokenizer.token_to_id(spec.end_of_document), spec.end_of_document, path, special)
        declared = self.token_variables.get("eos_token") if is_folder else None
        if declared is not None:
            return _token(self._tokenizer.token_to_id(declared), declared, path, special)
        if len(special) == 1:
            return next(iter(special.values()))
        what = f"{path} has {len(special)} special tokens, and does not say which one ends a document"
        raise ConfigError([Problem(f"{WHERE}.end_of_document", what, use_one_of(END_OF_DOCUMENT, list(special)[:8]))])

    @cached_property
    def _config(self) -> dict[str, Any]:
        """Returns what the folder says of its tokenizer. Raises ConfigError if that is not JSON."""
        path = self.folder / CONFIG_FILE
        try:
            config = json.loads(path.read_bytes()) if path.is_file() else {}
        except (OSError, ValueError) as error:
            raise _broken(str(path), "tokenizer_config.json", f": {error}") from error
        if not isinstance(config, dict):
            raise _broken(str(path), "tokenizer_config.json", f": it is a {type(config).__name__}")
        return config

    @cached_property
    def token_variables(self) -> dict[str, str]:
        """Returns the special tokens that templates know by name: bos_token, eos_token and others."""
        named = {key: value for key, value in self._config.items() if key.endswith("_token")}
        contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
        return {key: value for key, value in contents.items() if isinstance(value, str)}

    @cached_property
    def templates(self) -> dict[str, tuple[str, str]]:
        """Returns the chat templates of the folder by name, each with its place. The main one is `default`."""
        declared, place = self._config.get("chat_template"), str(self.folder / CONFIG_FILE)
        entries = declared if isinstance(declared, list) else [{"name": "default", "template": declared}]
        named = [(one.get("name"), one.get("template")) for one in entries if isinstance(one, dict)]
        found = {name: (text, place) for name, text in named if isinstance(name, str) and isinstance(text, str)}
        files = {path.stem: path for path in sorted((self.folder / "additional_chat_templates").glob("*.jinja"))}
        files |= {"default": main} if (main := self.folder / "chat_template.jinja").is_file() else {}
        try:
            return found | {name: (path.read_text(encoding="utf-8"), str(path)) for name, path in files.items()}
        except (OSError, UnicodeDecodeError) as error:
            what = f"a chat template of {self.folder} cannot be read: {error}"
            raise ConfigError([Problem(f"{WHERE}.path", what, "write it again, in UTF-8")]) from error

    @cached_property
    def hidden(self) -> HiddenTokens:
        """Returns what hides the special tokens in texts of users."""
        return HiddenTokens(self.special)

    def encode_texts(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        decoded = [text.decode() for text in texts]
        encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    @cached_property
    def json(self) -> dict[str, Any]:
        """Returns the file without what is added around a text, which would also change the places of tokens."""
        return json.loads(self._text) | {"post_processor": None, "truncation": None, "padding": None}

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """Returns the tokens before and after a text: those of the file, and the end of a document."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        at = next(n for n in range(len(whole) + 1) if whole[n : n + len(plain)] == plain)
        after = whole[at + len(plain) :]
        return whole[:at], after if self.identity.end_of_document in after else [self.identity.end_of_document]


class SentencePiece(Tokenizer):
    """Uses a `.model` file of SentencePiece."""

    def __init__(self, spec: SentencePieceTokenizer):
        self.file = Path(spec.path)
        data = _read(self.file)
        library = require("sentencepiece", WHERE, "a tokenizer of kind sentencepiece")
        try:
            self._processor: Any = library.SentencePieceProcessor(model_proto=data)
        except Exception as error:  # the library raises nothing narrower
            raise _broken(spec.path, "SentencePiece model", "") from error
        self.identity = TokenizerIdentity(
            "sentencepiece",
            hashlib.sha256(data).hexdigest(),
            self._processor.vocab_size(),
            self._end_of_document(spec),
        )

    def _end_of_document(self, spec: SentencePieceTokenizer) -> int:
        processor = self._processor
        controls = [processor.id_to_piece(i) for i in range(processor.vocab_size()) if processor.is_control(i)]
        if spec.end_of_document is not None:
            found = processor.piece_to_id(spec.end_of_document)
            known = None if processor.is_unknown(found) else found
            return _token(known, spec.end_of_document, spec.path, controls)
        if processor.eos_id() >= 0:
            return processor.eos_id()
        what = f"{spec.path} has no end-of-sentence token"
        raise ConfigError([Problem(f"{WHERE}.end_of_document", what, use_one_of("</s>", controls))])

    def encode_texts(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        tokens = self._processor.encode([text.decode() for text in texts], add_bos=False, add_eos=False)
        return [np.array(one, np.uint32) for one in tokens]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._processor.decode([int(token) for token in tokens])


def open_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Returns the declared tokenizer. Raises ConfigError for a file that is missing or not a tokenizer."""
    if spec.kind == "bytes":
        return Bytes()
    return HuggingFace(spec) if spec.kind == "huggingface" else SentencePiece(spec)


def train_bpe(texts: Iterable[bytes], vocab_size: int, path: Path) -> None:
    """Trains a byte-level BPE on texts and writes its JSON file; END_OF_DOCUMENT is its only special token.

    Raises ConfigError if the vocabulary is too small for all bytes and that token.
    """
    library = require("tokenizers", "shards.bpe_vocab_size", "training a BPE")
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        what = f"{vocab_size} is less than the {len(alphabet)} bytes and the end of a document"
        raise ConfigError([Problem("shards.bpe_vocab_size", what, f"use {len(alphabet) + 1} or more")])
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator((text.decode(errors="replace") for text in texts), trainer)
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(tokenizer.to_str(pretty=True))
    partial.replace(path)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        what = f"cannot read {path}: {error.strerror}"
        raise ConfigError([Problem(f"{WHERE}.path", what, "name a tokenizer's file")]) from error


def _broken(path: str, kind: str, why: str) -> ConfigError:
    fix = "name another file, or choose another data/tokenizer"
    return ConfigError([Problem(f"{WHERE}.path", f"{path} is not a {kind}{why}", fix)])


def _token(found: int | None, token: str, path: str, known: Iterable[str]) -> int:
    if found is None:
        what = f"{path} has no token '{token}'"
        raise ConfigError([Problem(f"{WHERE}.end_of_document", what, use_one_of(token, list(known)[:8]))])
    return found
