"""Turns rendered chats into tokens, and says which of them the model is to learn.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    1 510 10 421 2 10 1 617 10 733 2 10
    0 0   0  0   0 0  0 0   0  1   1 0

A token is learnt if one of its characters is to be. So are all between the first and the last such token of a span.
"""

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from .chat_template import FIRST_ALIAS, Chat, ChatError
from .files import require
from .tokenizers import WHERE, HuggingFace


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
