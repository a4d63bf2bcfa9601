"""Shows a document as a model sees it: which of its tokens are special, and which are trained on."""

from collections.abc import Iterable, Sequence
from itertools import groupby, islice

import numpy as np

from meshloom.compiler.core.console import Console, Part
from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any
from meshloom.compiler.core.format import counted

from .chat_template import Chat, ChatError
from .chats import how_masked
from .documents import Document
from .tokenize import encoded, is_empty
from .tokenizers import HuggingFace, Tokenizer

MOST_TOKENS = 2000  # that are shown
STYLES = {(True, False): "green", (True, True): "bold green", (False, False): "", (False, True): "bold cyan"}
BEGIN, END = "[[", "]]"  # around what is trained on


def show_document(
    console: Console,
    documents: Iterable[Document | Problem],
    tokenizer: Tokenizer,
    where: str,
    *,
    sides: Sequence[str] = ("",),
) -> None:
    """Prints the first document that is not empty. Raises ConfigError if there is none, or it cannot be read.

    sides: what the documents of a pair are called, which are printed one after the other.
    """
    readable = (one for one in documents if isinstance(one, Problem) or not is_empty(one))
    found = [*islice(readable, len(sides))]
    raise_if_any(one for one in found if isinstance(one, Problem))
    if not found:
        raise ConfigError([Problem(where, "has no document to show", "name files with text in them")])
    for number, (side, document) in enumerate(zip(sides, found, strict=False)):
        assert isinstance(document, Document)
        try:
            (tokens,), masks = encoded([document.content], tokenizer)
        except (UnicodeDecodeError, OverflowError, ChatError) as error:
            raise ConfigError([Problem(document.name, str(error), "convert it to UTF-8")]) from error
        is_trained = masks[0] if masks else np.ones(len(tokens), bool)
        is_special = np.isin(tokens, [*tokenizer.special.values()] if isinstance(tokenizer, HuggingFace) else [])
        title = f"{document.name}, {side}" if side else document.name
        by = f" ({how_masked([document.content.masked_by])})" if isinstance(document.content, Chat) else ""
        counts = f"{counted(len(tokens), 'token')}, {int(is_trained.sum()):,} trained on"
        if number:
            console.line()
        console.wrapped(f"{title}: {counts}{by}, in {BEGIN} {END}; special tokens are bold")
        console.line()
        for line in _lines(_pieces(tokens[:MOST_TOKENS], is_trained, is_special, tokenizer)):
            console.line(*line)
        if len(tokens) > MOST_TOKENS:
            console.line(f"... and {counted(len(tokens) - MOST_TOKENS, 'more token')}")


def _pieces(
    tokens: np.ndarray, is_trained: np.ndarray, is_special: np.ndarray, tokenizer: Tokenizer
) -> Iterable[tuple[str, str]]:
    """Yields stretches of text with their styles. Each is what its tokens add to the text before them."""
    shown, was_trained, stop = 0, False, 0
    for kind, run in groupby(range(len(tokens)), key=lambda n: (bool(is_trained[n]), bool(is_special[n]))):
        stop = [*run][-1] + 1
        text = tokenizer.decode(tokens[:stop].tolist())
        if kind[0] != was_trained:
            yield (BEGIN if kind[0] else END), "green"
        yield text[shown:], STYLES[kind]
        shown, was_trained = len(text), kind[0]
    if was_trained:
        yield END, "green"


def _lines(pieces: Iterable[tuple[str, str]]) -> Iterable[list[Part]]:
    """Yields the lines of a text in pieces."""
    line: list[Part] = []
    for text, style in pieces:
        first, *more = text.split("\n")
        line.append((first, style))
        for each in more:
            yield line
            line = [(each, style)]
    yield line
