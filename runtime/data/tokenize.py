"""Tokenises documents and chats in batches, and says which tokens of a chat the model is to learn.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    1 510 10 421 2 10 1 617 10 733 2 10
    0 0   0  0   0 0  0 0   0  1   1 0

A token is learnt if one of its characters is to be. So are all between the first and the last such token of a span. The
tokenizers' own threads have work for a batch, and memory stays bounded.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any

from ..core.inputs import require
from .chat_template import FIRST_ALIAS, Chat, ChatError
from .chats import TODAY
from .documents import CorpusPart, Document
from .store import Shard, TokenStore, name_hash
from .tokenizers import WHERE, HuggingFace, Tokenizer

BATCH_BYTES = 2**21
MOST_PROBLEMS = 5  # reported at once for a corpus
EMPTY_DOCUMENTS = np.zeros((0, 2), "<u8")


@dataclass(frozen=True)
class Encoded:
    """Documents as tokens. documents: (n, 2) as in a `Shard`, with lengths instead of ends. trained: as in a `Shard`.
    masked_by: how that was found, and TODAY. num_empty: documents without text, which are left out. part,
    next_document: the place of the next document in the corpus."""

    tokens: np.ndarray
    documents: np.ndarray
    trained: np.ndarray | None
    masked_by: frozenset[str]
    num_text_bytes: int
    num_empty: int
    part: int
    next_document: int


def encode_corpus(
    parts: Sequence[CorpusPart], tokenizer: Tokenizer, *, part: int = 0, document: int = 0, where: str
) -> Iterator[Encoded]:
    """Yields the corpus from a document of a part on, in order, about BATCH_BYTES of text at a time.

    Raises ConfigError for documents that cannot be read or encoded.
    """
    for number in range(part, len(parts)):
        first = document if number == part else 0
        for batch, problems in _batches(parts[number].read(first)):
            raise_if_any(problems)
            first += len(batch)
            tokens, table, trained = _encode(batch, tokenizer, where)
            size, num_empty = sum(map(_size, batch)), len(batch) - len(table)
            yield Encoded(tokens, table, trained, _masked_by(batch), size, num_empty, number, first)


def tokens_in_memory(
    parts: Sequence[CorpusPart], tokenizer: Tokenizer, where: str, advance: Callable[[int], None]
) -> TokenStore:
    """Returns a whole corpus. advance: takes the number of bytes of text after each batch. Raises ConfigError with the
    first MOST_PROBLEMS documents that are wrong."""
    arrays, tables, masks, problems, num_empty = [], [EMPTY_DOCUMENTS], [], [], 0
    masked_by: set[str] = set()
    for part in parts:
        for batch, found in _batches(part.read(0)):
            problems += found
            if len(problems) >= MOST_PROBLEMS:
                break
            try:
                tokens, table, trained = _encode(batch, tokenizer, where)
            except ConfigError as error:
                problems += error.problems
                continue
            arrays.append(tokens)
            tables.append(table)
            masks += [] if trained is None else [trained]
            masked_by |= _masked_by(batch)
            num_empty += len(batch) - len(table)
            advance(sum(map(_size, batch)))
        if len(problems) >= MOST_PROBLEMS:
            break
    if len(problems) >= MOST_PROBLEMS:
        more = Problem(where, "there may be more: reading stopped here", "correct these first")
        problems = [*problems[:MOST_PROBLEMS], more]
    raise_if_any(problems)
    tokens = np.concatenate(arrays or [np.zeros(0, tokenizer.identity.dtype)])
    documents = np.concatenate(tables)
    documents[:, 0] = np.cumsum(documents[:, 0])
    largest = int(tokens.max()) if len(tokens) else -1
    content = hashlib.sha256(tokens.data)
    content.update(documents.data)
    trained = np.concatenate(masks) if masks else None
    if trained is not None:
        content.update(trained.data)
    shards = (Shard(tokens, documents, trained),)
    return TokenStore(shards, tokenizer.identity, content.hexdigest(), largest, num_empty, tuple(sorted(masked_by)))


def _batches(documents: Iterator[Document | Problem]) -> Iterator[tuple[list[Document], list[Problem]]]:
    batch: list[Document] = []
    problems: list[Problem] = []
    num_bytes = 0
    for document in documents:
        if isinstance(document, Problem):
            problems.append(document)
            if len(problems) >= MOST_PROBLEMS:
                break
            continue
        batch.append(document)
        num_bytes += _size(document) + 64  # so that batches of empty documents end too
        if num_bytes >= BATCH_BYTES:
            yield batch, problems
            batch, problems, num_bytes = [], [], 0
    if batch or problems:
        yield batch, problems


def _size(document: Document) -> int:
    return document.content.nbytes if isinstance(document.content, np.ndarray) else len(document.content)


def _masked_by(batch: Sequence[Document]) -> frozenset[str]:
    chats = [one.content for one in batch if isinstance(one.content, Chat)]
    return frozenset([*(chat.masked_by for chat in chats), *(TODAY for chat in chats if chat.holds_today)])


def _encode(
    batch: list[Document], tokenizer: Tokenizer, where: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Returns the tokens of a batch, the lengths and name hashes of its documents, without empty ones, and which tokens
    of chats are to be learnt. Raises ConfigError with all documents that are wrong."""
    batch = [document for document in batch if not is_empty(document)]
    try:
        found, masks = encoded([document.content for document in batch], tokenizer)
    except (UnicodeDecodeError, OverflowError, ChatError) as error:
        raise ConfigError(_problems_of_each(batch, tokenizer, where)) from error
    table = np.array([(len(tokens), name_hash(d.name)) for tokens, d in zip(found, batch, strict=True)], "<u8")
    empty = np.zeros(0, tokenizer.identity.dtype)
    trained = np.concatenate(masks) if masks else None
    return np.concatenate([empty, *found]), table.reshape(-1, 2), trained


def encoded(
    contents: Sequence[bytes | np.ndarray | Chat], tokenizer: Tokenizer
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the tokens of documents; and of chats, which a source has alone, what is to be learnt."""
    chats = [content for content in contents if isinstance(content, Chat)]
    if not chats:
        return tokenizer.encode([content for content in contents if not isinstance(content, Chat)]), []
    assert isinstance(tokenizer, HuggingFace)
    pairs = chat_tokens(tokenizer).encode(chats)
    return [tokens for tokens, _ in pairs], [trained for _, trained in pairs]


def is_empty(document: Document) -> bool:
    """Returns True for a null or empty text, which is not counted as a document in any format."""
    return len(document.content) == 0


def _problems_of_each(batch: list[Document], tokenizer: Tokenizer, where: str) -> list[Problem]:
    problems = []
    for document in batch:
        try:
            encoded([document.content], tokenizer)
        except ChatError as error:
            problems.append(Problem(where, f"document '{document.name}' {error.what}", error.fix))
        except UnicodeDecodeError as error:
            what = f"document '{document.name}' is not UTF-8 at byte {error.start}"
            problems.append(Problem(where, what, "convert it, or use data/tokenizer=bytes, which takes any bytes"))
        except OverflowError as error:
            problems.append(Problem(where, f"document '{document.name}': {error}", "give tokens of the tokenizer's"))
    return problems


@lru_cache(maxsize=4)
def chat_tokens(tokenizer: HuggingFace) -> "ChatTokens":
    """Returns what encodes chats for a tokenizer."""
    return ChatTokens(tokenizer)


class ChatTokens:
    """Encodes chats with the tokens of a tokenizer."""

    def __init__(self, tokenizer: HuggingFace):
        self._tokenizer, self._hidden = tokenizer, tokenizer.hidden
        self._load = require("tokenizers", WHERE, "a tokenizer of kind huggingface").Tokenizer.from_str

    def encode(self, chats: Sequence[Chat]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the tokens of each chat in the identity's dtype, and which of them are to be learnt. A completion
        ends with the end of a document; a chat ends as its template does. Raises ChatError."""
        rendered = [chat.text for chat in chats if chat.masked_by != "completion"]
        simple = [text for text in rendered if not self._hidden.is_hiding(text)]
        encoded = iter(self._of_template.encode_batch(simple, add_special_tokens=False) if simple else ())
        encodings = (self._apart(text) if self._hidden.is_hiding(text) else next(encoded) for text in rendered)
        plain = [chat.text for chat in chats if chat.masked_by == "completion"]
        texts = iter(self._of_text.encode_batch(plain, add_special_tokens=False) if plain else ())
        return [
            self._trained(chat, next(texts), *self._tokenizer.around)
            if chat.masked_by == "completion"
            else self._trained(chat, next(encodings))
            for chat in chats
        ]

    def _apart(self, text: str) -> Any:
        """Returns the encoding of a text with special tokens of the template and others that are text: the former are
        replaced by their aliases, which have the same length."""
        found = self._hidden.tokens.findall(text)
        aliased = self._hidden.show(self._hidden.tokens.sub(lambda token: self._aliases[token[0]], text))
        encoding = self._of_aliases.encode(aliased, add_special_tokens=False)
        unknown = self._tokenizer.json["model"].get("unk_token")  # which any text may become
        special = {token: number for token, number in self._tokenizer.special.items() if token != unknown}
        numbers = {*special.values()}
        if [n for n in encoding.ids if n in numbers] != [special[token] for token in found if token != unknown]:
            what = "holds special tokens as text, which its tokenizer does not tell from those of the template"
            raise ChatError(what, "leave them out of the text")
        return encoding

    def _trained(
        self, chat: Chat, encoding: Any, before: Sequence[int] = (), after: Sequence[int] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.array([*before, *encoding.ids, *after], self._tokenizer.identity.dtype)
        is_trained = np.zeros(len(tokens), bool)
        places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        for start, stop in chat.trained:
            inside = np.flatnonzero((places[:, 0] < stop) & (places[:, 1] > start)) + len(before)
            if len(inside):  # tokens between them may have no characters of their own
                is_trained[inside[0] : inside[-1] + 1] = True
        is_trained[len(tokens) - len(after) :] = True
        return tokens, is_trained

    @cached_property
    def _of_template(self) -> Any:
        """Returns the tokenizer of texts in which all special tokens are special."""
        return self._load(json.dumps(self._tokenizer.json))

    @cached_property
    def _of_text(self) -> Any:
        """Returns the tokenizer of texts in which special tokens are text."""
        tokenizer = self._load(json.dumps(self._tokenizer.json))
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def _of_aliases(self) -> Any:
        """Returns the tokenizer with its special tokens under the names of their aliases, with the same numbers."""
        aliases, declared = self._aliases, self._tokenizer.json
        added = declared["added_tokens"]
        added = [token | {"content": aliases.get(token["content"], token["content"])} for token in added]
        model, vocab = dict(declared["model"]), declared["model"]["vocab"]
        if isinstance(vocab, dict):
            model |= {"vocab": {aliases.get(text, text): number for text, number in vocab.items()}}
        else:  # of Unigram
            model |= {"vocab": [[aliases.get(text, text), score] for text, score in vocab]}
        if unknown := model.get("unk_token"):
            model |= {"unk_token": aliases.get(unknown, unknown)}
        return self._load(json.dumps({**declared, "added_tokens": added, "model": model}))

    @cached_property
    def _aliases(self) -> dict[str, str]:
        """Returns a private text for each special token, of the same length."""
        return {text: chr(FIRST_ALIAS + number) * len(text) for number, text in enumerate(self._tokenizer.special)}
